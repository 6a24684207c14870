// The stock forwards over a model with sliding windows: rows alone and in a batch say the same, and rings are counted
// as what they are. Their bits are the parity suite's business.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "memory_checkpoint.h"
#include "models/stock_forward.h"
#include "models_rows.h"

namespace galley::models {
namespace {

using galley::testing::MemoryCheckpoint;
using galley::testing::run;
using galley::testing::Said;
using galley::testing::Script;

constexpr std::size_t kPlenty = 1U << 30;
constexpr int kWindow = 16;
constexpr std::size_t kLayerToken = 2U * 2U * 16U * 4U;  // k and v, kv_heads, head_dim, float32

/// Layers 0, 1 and 3 slide, layer 2 sees everything.
std::shared_ptr<StockModel> tiny() {
  static const auto model = [] {
    Config config = MemoryCheckpoint::tiny_llama();
    config.family = "gemma3";
    config.layers = 4;
    config.head_dim = 16;
    config.sliding = {.window = kWindow, .pattern = 3, .rope_base = 1e4F};
    config.query_scalar = 16.0F;
    return load_stock_model(MemoryCheckpoint(config));
  }();
  return model;
}

Script script(int prompt, int tokens, int arrival = 0) {
  Script s;
  for (int i = 0; i < prompt; ++i) s.prompt.push_back((i * 31 + prompt * 7) % 96);
  s.tokens = tokens;
  s.arrival = arrival;
  return s;
}

TEST(StockWindows, BatchedRowsAnswerLikeRowsAlone) {
  const std::vector<Script> all{script(5, 40), script(40, 36), script(1, 36, 3), script(70, 34, 15),
                                script(17, 34, 28)};
  std::vector<Said> alone;
  for (Script each : all) {
    each.arrival = 0;
    alone.push_back(run(*make_serial_stock_forward(tiny(), {kPlenty, 1}), {each}, 512).front());
  }
  EXPECT_NE(alone[0].tokens, alone[1].tokens);
  for (const int chunk : {512, 9}) {
    const auto together = run(*make_batched_stock_forward(tiny(), {kPlenty, 8}), all, chunk);
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(together[i].tokens, alone[i].tokens) << i << ' ' << chunk;
  }
  const auto in_pieces = run(*make_serial_stock_forward(tiny(), {kPlenty, 8}), all, 9);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(in_pieces[i].tokens, alone[i].tokens);
}

TEST(StockWindows, ARingWeighsItsWindowAndAPiece) {
  for (const auto& layer : tiny()->kv_bytes) ASSERT_EQ(layer.plain, kLayerToken);
  for (const bool batched : {false, true}) {
    EXPECT_EQ(tiny()->row_bytes(1000, 64, batched), kLayerToken * ((1000 + 256) + 3 * (kWindow + 64)));
    EXPECT_EQ(tiny()->row_bytes(10, 64, batched), kLayerToken * ((10 + 256) + 3 * (kWindow + 10)));
  }
  const StockOptions options{.kv_budget = tiny()->row_bytes(1000, 64, true), .max_rows = 4, .prefill_step = 64};
  const auto forward = make_batched_stock_forward(tiny(), options);
  EXPECT_EQ(forward->bytes_for(1000), options.kv_budget);
  EXPECT_EQ(forward->max_row_tokens(), 1000);
}

TEST(StockWindows, WhatIsUsedWasReserved) {
  for (const bool batched : {false, true}) {
    const StockOptions options{.kv_budget = kPlenty, .max_rows = 8, .prefill_step = 32};
    const auto forward =
        batched ? make_batched_stock_forward(tiny(), options) : make_serial_stock_forward(tiny(), options);
    sample::RowSampler sampler{sample::Params{}};
    const std::vector<std::int32_t> prompt(96, 7);
    const auto checked = [&](const StepPlan& plan) {
      forward->launch(plan);
      forward->collect();
      const KvUsage usage = forward->kv();
      EXPECT_GT(usage.used_bytes, 0U);
      EXPECT_LE(usage.used_bytes, usage.reserved_bytes);
    };
    const RowId a = forward->join({96, 60, &sampler});
    checked({{}, {{a, std::span(prompt).first(32), false}}});
    checked({{}, {{a, std::span(prompt).subspan(32, 32), false}}});
    checked({{}, {{a, std::span(prompt).subspan(64, 32), true}}});
    for (int step = 0; step < 20; ++step) checked({{a}, {}});
    const RowId b = forward->join({32, 60, &sampler});
    checked({{a}, {{b, std::span(prompt).first(32), true}}});
    for (int step = 0; step < 20; ++step) checked({{a, b}, {}});
    forward->leave(a);
    checked({{b}, {}});
    forward->leave(b);
    EXPECT_EQ(forward->kv().used_bytes, 0U);
  }
}

}  // namespace
}  // namespace galley::models
