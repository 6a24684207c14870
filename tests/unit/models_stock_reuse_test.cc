// The stock forwards with a prompt cache: what rows leave behind and take, and that the budget holds. That the bits are
// mlx-lm's is the parity suite's business.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "memory_checkpoint.h"
#include "models/stock_forward.h"
#include "stock_speaker.h"

namespace galley::models {
namespace {

using galley::testing::kPlenty;
using galley::testing::MemoryCheckpoint;
using galley::testing::Speaker;
using Tokens = std::vector<std::int32_t>;

std::shared_ptr<StockModel> tiny() { return galley::testing::tiny_stock_model(); }

struct Lane {
  std::shared_ptr<kv::PromptCache> cache;
  std::unique_ptr<StockForward> forward;
};

Lane lane(bool batched, std::size_t budget = kPlenty, const std::shared_ptr<StockModel>& model = tiny(),
          std::shared_ptr<kv::PromptCache> cache = std::make_shared<kv::PromptCache>(kPlenty)) {
  const StockOptions options{.kv_budget = budget, .max_rows = 8, .prompt_cache = cache};
  return {std::move(cache),
          batched ? make_batched_stock_forward(model, options) : make_serial_stock_forward(model, options)};
}

Tokens text(int length, int salt) {
  Tokens tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((i * 7 + salt * 13 + i * i) % 90);
  return tokens;
}

TEST(StockReuse, ATurnGoesOnWhereTheOneBeforeEnded) {
  for (const bool batched : {false, true}) {
    const Lane with = lane(batched);
    const auto without =
        batched ? make_batched_stock_forward(tiny(), {kPlenty, 8}) : make_serial_stock_forward(tiny(), {kPlenty, 8});
    Speaker first(text(12, 1), 9);
    first.speak(*with.forward, batched);
    EXPECT_EQ(first.reused, 0U);
    EXPECT_EQ(with.cache->size(), 1U);
    EXPECT_EQ(with.forward->kv().cached_bytes, with.cache->nbytes());
    EXPECT_GT(with.cache->nbytes(), 0U);
    EXPECT_EQ(with.forward->kv().used_bytes, 0U);

    Tokens more = first.text();
    const Tokens question = text(5, 2);
    more.insert(more.end(), question.begin(), question.end());
    Speaker second(more, 9);
    second.speak(*with.forward, batched);
    EXPECT_EQ(second.reused, 21U) << "the last token of the answer too";
    EXPECT_EQ(with.cache->size(), 1U) << "the longer text holds the shorter";
    Speaker cold(more, 9);
    cold.speak(*without, batched);
    EXPECT_EQ(cold.reused, 0U);
    EXPECT_EQ(second.said, cold.said);
  }
}

TEST(StockReuse, RowsThatShareABeginningTakeItBesideRowsThatDont) {
  const Lane with = lane(true);
  Speaker first(text(20, 1), 6);
  first.speak(*with.forward, true);
  Tokens same = text(20, 1);
  same.resize(15);
  same.push_back(95);
  same.push_back(94);
  Speaker sharing(same, 8), fresh(text(9, 3), 8), again(first.text(), 8);
  galley::testing::speak_together(*with.forward, {&sharing, &fresh, &again}, true);
  EXPECT_EQ(sharing.reused, 15U);
  EXPECT_EQ(fresh.reused, 0U);
  EXPECT_EQ(again.reused, 25U) << "all but the last token";
  for (const Speaker* speaker : {&sharing, &fresh, &again}) {
    Speaker alone(speaker->prompt, 8);
    alone.speak(*make_serial_stock_forward(tiny(), {kPlenty, 8}), false);
    EXPECT_EQ(speaker->said, alone.said);
  }
}

/// Says something on a lane; gives the text then, and what a person asks next.
Tokens next_turn(const Lane& lane, bool batched) {
  Speaker first(text(12, 1), 4);
  first.speak(*lane.forward, batched);
  Tokens more = first.text();
  more.push_back(3);
  return more;
}

std::size_t reused(const Lane& lane, bool batched, const Tokens& prompt) {
  Speaker speaker(prompt, 4);
  speaker.speak(*lane.forward, batched);
  return speaker.reused;
}

TEST(StockReuse, LanesShareWhatTheyKeep) {
  const auto cache = std::make_shared<kv::PromptCache>(kPlenty);
  const Lane serial = lane(false, kPlenty, tiny(), cache);
  const Lane batched = lane(true, kPlenty, tiny(), cache);
  EXPECT_EQ(reused(batched, true, next_turn(serial, false)), 16U);
}

TEST(StockReuse, QuantizedLanesKeepTheirsApart) {
  Config config = MemoryCheckpoint::tiny_llama();
  config.head_dim = 64;
  const MemoryCheckpoint checkpoint(config);
  const auto model = load_stock_model(checkpoint, false, KvQuant::choose("4", checkpoint, 1));
  const auto cache = std::make_shared<kv::PromptCache>(kPlenty);
  const Lane serial = lane(false, kPlenty, model, cache);
  const Lane batched = lane(true, kPlenty, model, cache);
  const Tokens turn = next_turn(serial, false);
  EXPECT_EQ(reused(batched, true, turn), 0U);
  EXPECT_EQ(reused(serial, false, turn), 16U);
  EXPECT_EQ(cache->size(), 2U);
}

TEST(StockReuse, ASeededRowTakesNothing) {
  for (const bool batched : {false, true}) {
    const Lane with = lane(batched);
    const sample::Params hot{.temperature = 1.2F, .seed = 5};
    Speaker first(text(12, 1), 9, hot);
    first.speak(*with.forward, batched);
    Speaker again(text(12, 1), 9, hot);
    again.speak(*with.forward, batched);
    EXPECT_EQ(again.reused, 0U);
    EXPECT_EQ(again.said, first.said);
    Speaker greedy(text(12, 1), 9);
    greedy.speak(*with.forward, batched);
    EXPECT_EQ(greedy.reused, 11U);
  }
}

TEST(StockReuse, LiveRowsComeFirst) {
  const std::size_t token = tiny()->kv_bytes.front().plain * 2;
  for (const bool batched : {false, true}) {
    const Lane with = lane(batched, 2 * (100 + 256) * token);
    Speaker first(text(12, 1), 4), second(text(12, 2), 4);
    first.speak(*with.forward, batched);
    second.speak(*with.forward, batched);
    EXPECT_EQ(with.cache->size(), 2U);
    const RowSpec half{50, 50, &first.sampler};
    const auto total = [&] { return with.forward->kv().cached_bytes + with.forward->kv().reserved_bytes; };
    EXPECT_TRUE(with.forward->can_join(half));
    const RowId a = with.forward->join(half);
    EXPECT_LE(total(), with.forward->kv().budget_bytes);
    EXPECT_TRUE(with.forward->can_join(half));
    const RowId b = with.forward->join(half);
    EXPECT_LE(total(), with.forward->kv().budget_bytes);
    EXPECT_EQ(with.forward->kv().cached_bytes, 0U);
    with.forward->leave(a);
    with.forward->leave(b);
  }
}

TEST(StockReuse, WhatWentWrongOrNeverSpokeIsNotKept) {
  Config config = MemoryCheckpoint::tiny_llama();
  config.tied_head = false;
  MemoryCheckpoint checkpoint(config);
  checkpoint.edit = [](const std::string& tensor, std::vector<float>& values) {
    if (tensor == "model.embed_tokens.weight") {
      values[static_cast<std::size_t>(50) * 32] = std::numeric_limits<float>::quiet_NaN();
    }
  };
  const auto model = load_stock_model(checkpoint);
  for (const bool batched : {false, true}) {
    const Lane with = lane(batched, kPlenty, model);
    Speaker bad({5, 50, 7}, 4);
    bad.speak(*with.forward, batched);
    EXPECT_EQ(with.cache->size(), 0U);
    Speaker silent(text(12, 1), 4);
    const RowId id = with.forward->join({12, 4, &silent.sampler, silent.prompt});
    with.forward->launch({{}, {{id, std::span(silent.prompt).first(6), false}}});
    with.forward->collect();
    with.forward->leave(id);
    EXPECT_EQ(with.cache->size(), 0U);
  }
}

}  // namespace
}  // namespace galley::models
