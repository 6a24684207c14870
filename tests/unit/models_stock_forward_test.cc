// The stock forwards as the serving side drives them. Their numerics are the parity suite's business; here it is who
// gets what, budgets, sampling while looking ahead, and that rows keep out of each other's way.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "memory_checkpoint.h"
#include "models/stock_forward.h"
#include "ops/error.h"
#include "stock_speaker.h"

namespace galley::models {
namespace {

using galley::testing::kPlenty;
using galley::testing::MemoryCheckpoint;
using Tokens = std::vector<std::int32_t>;

std::shared_ptr<StockModel> tiny() { return galley::testing::tiny_stock_model(); }

std::unique_ptr<StockForward> make(bool batched, std::size_t budget = kPlenty, int rows = 8,
                                   const std::shared_ptr<StockModel>& model = tiny()) {
  const StockOptions options{budget, rows};
  return batched ? make_batched_stock_forward(model, options) : make_serial_stock_forward(model, options);
}

struct Client {
  explicit Client(Tokens p, sample::Params params = {}) : prompt(std::move(p)), sampler(params) {}
  Tokens prompt;
  sample::RowSampler sampler;
  RowId id = -1;
  Tokens out;
  std::vector<sample::Choice> choices;
};

// All prompts in one step, then `steps` decode steps, each launched before the one before is collected.
void drive(StockForward& forward, const std::vector<Client*>& clients, int steps, bool look_ahead = true) {
  std::map<RowId, Client*> by_id;
  StepPlan prompt;
  StepPlan decode;
  for (Client* client : clients) {
    client->id = forward.join({static_cast<int>(client->prompt.size()), steps + 1, &client->sampler});
    by_id[client->id] = client;
    prompt.prompt.push_back({client->id, client->prompt, true});
    decode.decode.push_back(client->id);
  }
  const auto collect = [&](int in_flight) {
    while (forward.in_flight() > in_flight) {
      for (Emission& emission : forward.collect()) {
        Client& client = *by_id.at(emission.row);
        EXPECT_FALSE(emission.fault.has_value());
        client.out.push_back(emission.choice.token);
        client.choices.push_back(std::move(emission.choice));
      }
    }
  };
  forward.launch(prompt);
  for (int step = 0; step < steps; ++step) {
    if (!look_ahead) collect(0);
    forward.launch(decode);
    collect(1);
  }
  collect(0);
  for (Client* client : clients) forward.leave(client->id);
}

Tokens alone(const Tokens& prompt, int steps, sample::Params params = {}) {
  Client client(prompt, params);
  drive(*make(false), {&client}, steps);
  return client.out;
}

TEST(StockForward, WantsToBeDrivenAsMlxLm) {
  for (const bool batched : {false, true}) {
    const auto forward = make(batched);
    EXPECT_TRUE(forward->traits().split_forwards);
    EXPECT_TRUE(forward->traits().look_ahead);
    EXPECT_FALSE(forward->traits().invariant);
    EXPECT_EQ(forward->traits().vocab, 96);
  }
}

TEST(StockForward, BatchedRowsAnswerLikeRowsAlone) {
  Client a({5, 6, 7});
  Client b({1});
  Client c({9, 8, 7, 6, 5, 4, 3});
  drive(*make(true), {&a, &b, &c}, 20);
  EXPECT_EQ(a.out, alone(a.prompt, 20));
  EXPECT_EQ(b.out, alone(b.prompt, 20));
  EXPECT_EQ(c.out, alone(c.prompt, 20));
  EXPECT_NE(a.out, c.out);
}

TEST(StockForward, EmissionsComeInPlanOrder) {
  const auto forward = make(true);
  Client a({5, 6, 7});
  Client b({1, 2});
  a.id = forward->join({3, 4, &a.sampler});
  b.id = forward->join({2, 4, &b.sampler});
  forward->launch({{}, {{a.id, a.prompt, true}}});
  forward->launch({{a.id}, {{b.id, b.prompt, true}}});
  EXPECT_EQ(forward->in_flight(), 2);
  ASSERT_EQ(forward->collect().size(), 1U);
  const auto second = forward->collect();
  ASSERT_EQ(second.size(), 2U);
  EXPECT_EQ(second[0].row, a.id);
  EXPECT_EQ(second[1].row, b.id);
  forward->launch({{b.id, a.id}, {}});
  EXPECT_EQ(forward->collect()[0].row, b.id);
}

TEST(StockForward, ARowThatSitsOutGoesOnWhereItWas) {
  const auto forward = make(true);
  Client a({5, 6, 7});
  Client b({9, 8, 7, 6});
  a.id = forward->join({3, 8, &a.sampler});
  b.id = forward->join({4, 8, &b.sampler});
  std::map<RowId, Tokens> out;
  const auto step = [&](const StepPlan& plan) {
    forward->launch(plan);
    for (const Emission& emission : forward->collect()) out[emission.row].push_back(emission.choice.token);
  };
  step({{}, {{a.id, a.prompt, true}, {b.id, b.prompt, true}}});
  step({{a.id}, {}});
  step({{b.id}, {}});
  step({{a.id, b.id}, {}});
  EXPECT_EQ(out[a.id], alone(a.prompt, 2));
  EXPECT_EQ(out[b.id], alone(b.prompt, 2));
}

TEST(StockForward, SampledRowsLookAhead) {
  const sample::Params hot{.temperature = 1.5F, .seed = 11};
  for (const bool batched : {false, true}) {
    Client with({4, 5, 6}, hot);
    Client without({4, 5, 6}, hot);
    drive(*make(batched), {&with}, 12, true);
    drive(*make(batched), {&without}, 12, false);
    EXPECT_EQ(with.out, without.out);
    EXPECT_EQ(with.sampler.draws(), 13U);
    EXPECT_NE(with.out, alone(with.prompt, 12));
  }
}

TEST(StockForward, GreedyAndSampledRowsShareABatch) {
  Client greedy({4, 5, 6});
  Client hot({4, 5, 6}, {.temperature = 1.5F, .seed = 11});
  Client reporting({4, 5, 6}, {.seed = {}, .logprobs = true, .top_logprobs = 3});
  drive(*make(true), {&greedy, &hot, &reporting}, 12);
  EXPECT_EQ(greedy.out, alone(greedy.prompt, 12));
  EXPECT_EQ(greedy.sampler.draws(), 13U);
  EXPECT_EQ(hot.out, alone(hot.prompt, 12, hot.sampler.params()));
  EXPECT_EQ(reporting.out, greedy.out);
  for (const sample::Choice& choice : reporting.choices) {
    ASSERT_EQ(choice.top.size(), 3U);
    EXPECT_EQ(choice.top[0].token, choice.token);
    EXPECT_EQ(choice.top[0].logprob, choice.logprob);
    EXPECT_LT(choice.logprob, 0.0F);
  }
}

TEST(StockForward, ProbeSeesTheLogProbabilitiesOfTheChoice) {
  const auto forward = make(true);
  std::vector<float> seen;
  forward->set_probe([&](RowId, const mlx::core::array& logprobs) {
    ASSERT_EQ(logprobs.shape(), (mlx::core::Shape{96}));
    const float* data = logprobs.data<float>();
    seen.push_back(*std::max_element(data, data + 96));
  });
  Client client({4, 5, 6}, {.seed = {}, .logprobs = true});
  drive(*forward, {&client}, 5);
  ASSERT_EQ(seen.size(), 6U);
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(client.choices[i].logprob, seen[i]);
}

TEST(StockForward, RowsThatLeftAreOmittedAndTheRestGoesOn) {
  for (const bool batched : {false, true}) {
    const auto forward = make(batched);
    Client a({5, 6, 7});
    Client b({9, 8, 7, 6});
    a.id = forward->join({3, 8, &a.sampler});
    b.id = forward->join({4, 8, &b.sampler});
    Tokens out;
    forward->launch({{}, {{a.id, a.prompt, true}, {b.id, b.prompt, true}}});
    forward->launch({{a.id, b.id}, {}});
    EXPECT_EQ(forward->collect().size(), 2U);
    forward->leave(a.id);
    const auto rest = forward->collect();
    ASSERT_EQ(rest.size(), 1U);
    EXPECT_EQ(rest[0].row, b.id);
    forward->launch({{b.id}, {}});
    EXPECT_EQ(forward->collect()[0].choice.token, alone(b.prompt, 2).back());
    forward->leave(b.id);
    EXPECT_EQ(forward->kv().used_bytes, 0U);
    EXPECT_EQ(forward->kv().reserved_bytes, 0U);
  }
}

TEST(StockForward, OneRowsFaultIsItsOwn) {
  // Token 50 poisons whoever has it in the prompt; the head is untied so that its logit isn't NaN for everyone.
  models::Config config = MemoryCheckpoint::tiny_llama();
  config.tied_head = false;
  MemoryCheckpoint checkpoint(config);
  checkpoint.edit = [](const std::string& tensor, std::vector<float>& values) {
    if (tensor == "model.embed_tokens.weight") {
      values[static_cast<std::size_t>(50) * 32] = std::numeric_limits<float>::quiet_NaN();
    }
  };
  const auto model = load_stock_model(checkpoint);
  for (const sample::Params params : {sample::Params{}, sample::Params{.temperature = 1.0F, .seed = 3}}) {
    Client good({5, 6, 7}, params);
    Client reference({5, 6, 7}, params);
    Client bad({5, 50, 7}, params);
    Client other({5, 51, 7}, params);
    drive(*make(true, kPlenty, 8, model), {&good, &bad}, 6);
    drive(*make(true, kPlenty, 8, model), {&reference, &other}, 6);
    for (const sample::Choice& choice : bad.choices) EXPECT_FALSE(choice.finite);
    for (const sample::Choice& choice : good.choices) EXPECT_TRUE(choice.finite);
    EXPECT_EQ(good.out, reference.out);
  }
}

TEST(StockBudget, ABatchIsAsWideAsItsLongestRow) {
  const std::size_t token = tiny()->kv_bytes.front().plain * 2;
  EXPECT_EQ(token, 2U * 2U * 2U * 8U * 4U);  // layers, k and v, kv_heads, head_dim, float32
  const auto forward = make(true, 3 * (100 + 256) * token);
  EXPECT_EQ(forward->bytes_for(100), (100 + 256) * token);
  EXPECT_EQ(forward->max_row_tokens(), 3 * (100 + 256) - 256);
  Client client({1});
  const RowSpec short_row{10, 10, &client.sampler};
  const RowSpec long_row{60, 40, &client.sampler};
  const RowSpec huge_row{500, 40, &client.sampler};
  const RowId first = forward->join(short_row);
  EXPECT_EQ(forward->kv().reserved_bytes, (20 + 256) * token);
  EXPECT_FALSE(forward->can_join(huge_row));  // alone it would fit, but two rows as wide as it don't
  forward->join(long_row);
  EXPECT_EQ(forward->kv().reserved_bytes, 2 * (100 + 256) * token);
  forward->join(short_row);
  EXPECT_FALSE(forward->can_join(short_row));
  EXPECT_THROW(forward->join(short_row), Error);
  forward->leave(first);
  EXPECT_TRUE(forward->can_join(short_row));
}

TEST(StockBudget, SerialRowsReserveTheirOwnLength) {
  const std::size_t token = tiny()->kv_bytes.front().plain * 2;
  const auto forward = make(false, kPlenty, 2);
  Client client({1});
  forward->join({10, 10, &client.sampler});
  forward->join({60, 40, &client.sampler});
  EXPECT_EQ(forward->kv().reserved_bytes, (20 + 100 + 2 * 256) * token);
  EXPECT_EQ(forward->kv().blocks_free, 0);
  EXPECT_FALSE(forward->can_join({1, 1, &client.sampler}));  // rows, not bytes
}

TEST(StockBudget, WhatIsUsedWasReserved) {
  Config wide = MemoryCheckpoint::tiny_llama();
  wide.head_dim = 64;
  const MemoryCheckpoint checkpoint(wide);
  const auto quantized = load_stock_model(checkpoint, false, KvQuant::choose("4", checkpoint, 1));
  for (const auto& layer : quantized->kv_bytes) EXPECT_EQ(layer.stored * 32 / 5, layer.plain);  // 4 + 2 * 32 / 64 bits
  using Lane = std::pair<std::shared_ptr<StockModel>, bool>;
  for (const auto& [model, batched] :
       {Lane{tiny(), false}, Lane{tiny(), true}, Lane{quantized, false}, Lane{quantized, true}}) {
    const auto forward = make(batched, kPlenty, 8, model);
    Client a(Tokens(250, 7));
    Client b(Tokens(5, 9));
    a.id = forward->join({250, 30, &a.sampler});
    b.id = forward->join({5, 30, &b.sampler});
    forward->launch({{}, {{a.id, a.prompt, true}, {b.id, b.prompt, true}}});
    for (int step = 0; step < 30; ++step) {
      forward->launch({{a.id, b.id}, {}});
      forward->collect();
      EXPECT_LE(forward->kv().used_bytes, forward->kv().reserved_bytes);
      EXPECT_GT(forward->kv().used_bytes, 0U);
    }
  }
}

TEST(Registry, NamesTheFamiliesItKnows) {
  Config config = MemoryCheckpoint::tiny_llama();
  config.family = "abacus";
  try {
    load_stock_model(MemoryCheckpoint(config));
    FAIL();
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("abacus"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("llama"), std::string::npos);
  }
}

}  // namespace
}  // namespace galley::models
