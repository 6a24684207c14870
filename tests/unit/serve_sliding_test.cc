// Rows of a model with sliding layers, which keep only what their window sees: they share blocks, make room for each
// other and begin with what an earlier process left, windows crossed, and nobody can tell from the answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "serve_fused.h"
#include "temporary_folder.h"

namespace galley::testing {
namespace {

constexpr int kWindow = 40, kBlock = 32;

Answer solo(const Tokens& prompt, int max_tokens, std::optional<std::uint64_t> seed = std::nullopt,
            const KvFormats& kv = {}) {
  return alone_on(*make_sliding(kBudget, 0, std::nullopt, kv), prompt, max_tokens, seed);
}

int blocks(int tokens) { return (tokens + kBlock - 1) / kBlock; }

TEST(SlidingKv, ALongRowHoldsOnlyWhatItsWindowSees) {
  const auto forward = make_sliding();
  Server server(*forward);
  server.ask(text(700, 1), 300);
  int length = 0;
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    const models::KvUsage kv = forward->kv();
    if (kv.used_bytes == 0) break;  // it has ended
    // The last token said is not in the KV yet.
    const auto said = static_cast<int>(server.answers[0]->tokens.size());
    length = said == 0 ? static_cast<int>(server.tally.prompt_tokens) : 700 + said - 1;
    const int seen = length < kWindow ? 0 : (length - kWindow + 1) / kBlock;
    const auto windows = static_cast<std::size_t>(blocks(length) - seen) * 2 * kSlidingUnit;
    ASSERT_EQ(kv.window_used_bytes, windows) << length;
    ASSERT_EQ(kv.used_bytes, static_cast<std::size_t>(blocks(length)) * kSlidingUnit + windows) << length;
    ASSERT_EQ(kv.unused_bytes, static_cast<std::size_t>(blocks(length) * kBlock - length) * 3 * kSlidingUnit / kBlock);
    ASSERT_LE(kv.used_bytes, forward->bytes_for(1000));
  }
  EXPECT_GT(length, 900);
  // 32 text blocks and at most 5 window blocks of two units: less than half of what all layers' whole text would take.
  EXPECT_EQ(forward->bytes_for(1000), (32 + 5 * 2) * kSlidingUnit);
  EXPECT_EQ(forward->bytes_for(90), 9 * kSlidingUnit);
  EXPECT_EQ(make_sliding(42 * kSlidingUnit)->max_row_tokens(), 32 * kBlock);
  EXPECT_EQ(make_sliding(41 * kSlidingUnit)->max_row_tokens(), 31 * kBlock);
  EXPECT_EQ(make_sliding(9 * kSlidingUnit)->max_row_tokens(), 3 * kBlock);
}

TEST(SlidingKv, TheLongestRowThatIsSaidToFitFits) {
  const auto forward = make_sliding(20 * kSlidingUnit);
  ASSERT_EQ(forward->max_row_tokens(), 10 * kBlock);
  Server server(*forward);
  const Tokens prompt = text(250, 1);
  for (int i = 0; i < 2; ++i) {  // the second time on top of what the first left
    server.ask(prompt, 70);
    server.run();
    EXPECT_TRUE(server.answers.back()->says(solo(prompt, 70)));
  }
  EXPECT_GT(server.answers.back()->usage.cached_tokens, 0);
  EXPECT_EQ(server.tally.preempted, 0U);
}

TEST(SlidingKv, AnAnswerIsTheSameColdOrFromTheCache) {
  const KvFormats mixed{{4, 64}, {8, 32}, {8, 64}, {4, 32}, {0, 64}, {4, 64}};
  for (const KvFormats& kv : {KvFormats{}, mixed}) {
    const auto forward = make_sliding(4 * kBudget, std::nullopt, std::nullopt, kv);
    Server server(*forward);
    const Tokens system = text(100, 1), question = system + text(20, 2);
    server.ask(question, 40);
    server.run();
    const Tokens& said = server.answers[0]->tokens;
    // The same again, another question, the next turn of the same conversation, and something else.
    const std::vector<Tokens> prompts{question, system + text(33, 3), question + said + text(9, 4), text(70, 5)};
    // The second answer went on further than the first, so that all whole blocks of the next turn are there.
    const std::vector<int> cached{119, 100, 160, 0};
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const std::size_t n = server.ask(prompts[i], 90);
      server.run();
      EXPECT_TRUE(server.answers[n]->says(solo(prompts[i], 90, std::nullopt, kv))) << i;
      EXPECT_EQ(server.answers[n]->usage.cached_tokens, cached[i]) << i;
    }
    EXPECT_EQ(forward->kv().used_bytes, 0U);
    EXPECT_EQ(forward->kv().reserved_bytes, 0U);
    EXPECT_GT(forward->kv().window_cached_bytes, 0U);
    EXPECT_LT(forward->kv().window_cached_bytes, forward->kv().cached_bytes);
  }
}

TEST(SlidingKv, ARowBeginsOnlyWhereItsWindowIsThere) {
  // Six full blocks are remembered, which is 18 units; two too many for the cache, and what slid out of the window
  // first goes first: the window block of the first 32 tokens.
  const auto forward = make_sliding(kBudget, 16 * kSlidingUnit);
  Server server(*forward);
  const auto ask = [&](const Tokens& prompt) {
    const std::size_t n = server.ask(prompt, 4);
    server.run();
    EXPECT_TRUE(server.answers[n]->says(solo(prompt, 4)));
    return server.answers[n]->usage.cached_tokens;
  };
  const Tokens all = text(195, 1), beginning = text(40, 1);
  EXPECT_EQ(ask(all), 0);
  EXPECT_EQ(forward->kv().cached_bytes, 16 * kSlidingUnit);
  EXPECT_EQ(forward->kv().window_cached_bytes, 10 * kSlidingUnit);
  EXPECT_EQ(ask(all), 192) << "behind the last block all that it sees is there";
  EXPECT_EQ(ask(beginning), 0) << "its text is known, but what its sliding layers see is gone";
  EXPECT_EQ(ask(beginning), 32) << "and is there again, in the block that was known";
  EXPECT_EQ(forward->kv().cached_bytes, 16 * kSlidingUnit);
  EXPECT_EQ(forward->kv().used_bytes, 0U);
}

TEST(SlidingKv, RowsThatArriveTogetherComputeTheirCommonBeginningOnce) {
  const Tokens system = text(300, 1);
  const auto forward = make_sliding();
  Server server(*forward);
  std::vector<Tokens> prompts;
  std::size_t own = 0;
  for (int i = 0; i < 8; ++i) {
    prompts.push_back(system + text(10 + i, 10 + i));
    server.ask(prompts.back(), 60);
    own += prompts.back().size() - system.size();
  }
  std::size_t most = 0;
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    most = std::max(most, forward->kv().used_bytes);
  }
  EXPECT_EQ(server.tally.prompt_tokens, system.size() + own);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_TRUE(server.answers[i]->says(solo(prompts[i], 60))) << i;
    EXPECT_EQ(server.answers[i]->usage.cached_tokens, i == 0 ? 0 : 300);
  }
  // The common text once; of each row up to 4 blocks of its own, and of the common windows the last few.
  EXPECT_LE(most, (10 + 2 * 5 + 8 * 4 * 3) * kSlidingUnit);
  EXPECT_EQ(forward->kv().used_bytes, 0U);
}

TEST(SlidingKv, RowsThatMadeRoomAnswerAsIfTheyHadNot) {
  // Eight rows that end with six to eight text blocks and two or three window blocks each.
  constexpr std::size_t budget = 34 * kSlidingUnit;
  const auto alone = [](const Tokens& prompt, int tokens, auto seed) { return solo(prompt, tokens, seed); };
  for (const std::optional<std::size_t> cache : {std::optional<std::size_t>(), std::optional<std::size_t>(0)}) {
    expect_that_preemption_changes_nothing(*make_sliding(budget, cache), budget, 15, 160, alone);
  }
}

class SlidingStore : public ::testing::Test {
 protected:
  kv::PrefixStore store() {
    return kv::PrefixStore({folder, "sliding", 3 * kSlidingUnit, kSlidingUnit, 4'000'000,
                            [](const std::string& why) { ADD_FAILURE() << why; }});
  }
  /// Asks a server that has just started; what it knows is from the folder.
  int ask_new(const Tokens& prompt, std::size_t budget = kBudget, std::optional<std::size_t> cache = std::nullopt) {
    const auto forward = make_sliding(budget, cache, store());
    const int cached = ask(*forward, prompt);
    save(*forward);
    return cached;
  }
  static int ask(models::FusedForward& forward, const Tokens& prompt) {
    Server server(forward);
    server.ask(prompt, 4);
    server.run();
    EXPECT_TRUE(server.answers[0]->says(solo(prompt, 4)));
    EXPECT_EQ(forward.kv().used_bytes + forward.kv().reserved_bytes, 0U);
    return server.answers[0]->usage.cached_tokens;
  }
  static void save(models::FusedForward& forward) {
    while (forward.tidy()) {
    }
  }
  galley::testing::TemporaryFolder temporary;
  std::filesystem::path folder = temporary.path();
};

TEST_F(SlidingStore, WhatWasSavedIsFoundAgainAtEveryBorder) {
  EXPECT_EQ(ask_new(text(200, 1)), 0);
  EXPECT_EQ(ask_new(text(200, 1)), 192);
  EXPECT_EQ(ask_new(text(100, 1)), 96);
  EXPECT_EQ(ask_new(text(200, 1), kBudget, 0), 192) << "even if nothing is to stay cached";
  EXPECT_EQ(ask_new(text(200, 1), 17 * kSlidingUnit), 192) << "even if just the row has room";
}

TEST_F(SlidingStore, BlocksThatLostTheirWindowPartAreSavedWithout) {
  // As in ARowBeginsOnlyWhereItsWindowIsThere, the first block's window part is gone before anything is saved.
  EXPECT_EQ(ask_new(text(195, 1), kBudget, 16 * kSlidingUnit), 0);
  EXPECT_EQ(ask_new(text(195, 1)), 192);
  const auto forward = make_sliding(kBudget, std::nullopt, store());
  EXPECT_EQ(ask(*forward, text(40, 1)), 0) << "the block is there, but not what its sliding layers see";
  EXPECT_EQ(ask(*forward, text(195, 1)), 192) << "the block that was loaded has been completed";
  EXPECT_EQ(ask(*forward, text(40, 1)), 39);
}

}  // namespace
}  // namespace galley::testing
