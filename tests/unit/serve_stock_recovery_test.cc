// The stock rung after an exception inside a step: the rows run again one by one, and only a culprit fails.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory_checkpoint.h"
#include "models/stock_forward.h"
#include "serve/scheduler.h"
#include "serve/serial_lane.h"
#include "support/scripted_forward.h"

namespace galley::serve {
namespace {

using galley::testing::MemoryCheckpoint;

/// Throws while the forwards whose numbers are given are built.
class Failing final : public models::Model {
 public:
  Failing(std::unique_ptr<models::Model> inner, std::vector<int> at) : inner_(std::move(inner)), at_(std::move(at)) {}
  [[nodiscard]] const models::Config& config() const override { return inner_->config(); }
  [[nodiscard]] std::span<const ops::AttentionSpec> attention_layers() const override {
    return inner_->attention_layers();
  }
  ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const override {
    ops::Value logits = inner_->forward(ops, kv);  // with the KV written, as far as it is a graph
    if (std::ranges::find(at_, calls_++) != at_.end()) throw std::runtime_error("device lost");
    return logits;
  }

 private:
  std::unique_ptr<models::Model> inner_;
  std::vector<int> at_;
  mutable int calls_ = 0;
};

std::shared_ptr<models::StockModel> stock_model(std::vector<int> failing) {
  const MemoryCheckpoint checkpoint(MemoryCheckpoint::tiny_llama());
  auto stock = models::load_stock_model(checkpoint);
  stock->model = std::make_unique<Failing>(std::move(stock->model), std::move(failing));
  return stock;
}

models::StockOptions options() {
  models::StockOptions options;
  options.kv_budget = 100'000'000;
  options.max_rows = 4;
  return options;
}

struct Asked {
  std::vector<std::int32_t> tokens;
  std::shared_ptr<test::RecordingSink> sink = std::make_shared<test::RecordingSink>();
};

std::unique_ptr<Row> row(const RowContext& context, Asked& asked, int i) {
  GenerationRequest request;
  for (int k = 0; k < 4 + 2 * i; ++k) request.prompt.push_back((k * 17 + i * 5) % 96);
  request.max_tokens = 8;
  auto row = std::make_unique<Row>(context, std::move(request), asked.sink, nullptr);
  row->observe([&asked](const sample::Choice& choice) { asked.tokens.push_back(choice.token); });
  return row;
}

std::vector<Asked> batched(std::vector<int> failing) {
  const auto forward = models::make_batched_stock_forward(stock_model(std::move(failing)), options());
  const RowContext context{};
  Scheduler scheduler(*forward, {3, 3, 64, 0});
  std::vector<Asked> asked(3);
  for (int i = 0; i < 3; ++i) scheduler.enqueue(row(context, asked[static_cast<std::size_t>(i)], i));
  while (!scheduler.idle()) scheduler.tick();
  EXPECT_EQ(forward->kv().used_bytes, 0U);
  return asked;
}

TEST(StockRecovery, RowsOfALostStepGoOnOneByOne) {
  const auto expected = batched({});
  const auto asked = batched({4});
  for (std::size_t i = 0; i < asked.size(); ++i) {
    EXPECT_EQ(asked[i].sink->finish(), FinishReason::length);
    EXPECT_EQ(asked[i].tokens.size(), 8U);
    EXPECT_EQ(asked[i].tokens, expected[i].tokens) << "no near-ties in this model, so B does not matter";
  }
}

TEST(StockRecovery, ARowThatFailsAgainFails) {
  const auto expected = batched({});
  // Forwards 4 (all rows) and 5 (the first of them, alone).
  const auto asked = batched({4, 5});
  ASSERT_TRUE(asked[0].sink->error());
  EXPECT_EQ(asked[0].sink->error()->code(), "row_fault");
  EXPECT_EQ(asked[1].tokens, expected[1].tokens);
  EXPECT_EQ(asked[2].tokens, expected[2].tokens);
}

TEST(StockRecovery, TheSerialLaneServesTheNextRow) {
  const auto forward = models::make_serial_stock_forward(stock_model({3}), options());
  const RowContext context{};
  SerialLane lane(*forward, 64);
  Asked first, second;
  lane.start(row(context, first, 0));
  while (lane.busy()) lane.step();
  ASSERT_TRUE(first.sink->error());
  EXPECT_EQ(first.sink->error()->status(), 500);
  lane.start(row(context, second, 1));
  while (lane.busy()) lane.step();
  EXPECT_EQ(second.sink->finish(), FinishReason::length);
  EXPECT_EQ(second.tokens.size(), 8U);
}

}  // namespace
}  // namespace galley::serve
