// A row's tokens and log-probabilities are the same bits whoever shares its steps: alone, in any batch, at any chunk
// size, with any number of threads, greedy and seeded, on each instruction set this CPU has. On the real default model.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "models/fused_forward.h"
#include "models/model.h"
#include "models/runtime.h"
#include "models_rows.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {
namespace {

using galley::testing::greedy_with_logprobs;
using galley::testing::run;
using galley::testing::Said;
using galley::testing::Script;
using galley::testing::seeded;

const std::filesystem::path kModel =
    std::filesystem::path(GALLEY_SOURCE_DIR) / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf";

std::vector<std::int32_t> prompt_of(int length, int salt) {
  std::vector<std::int32_t> ids;
  for (int i = 0; i < length; ++i) ids.push_back(1000 + (i * 7919 + salt * 104729) % 40000);
  return ids;
}

class Invariance : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<FusedForward> forward(int threads, const std::vector<ops::KvFormat>& kv = {}) {
    EXPECT_TRUE(std::filesystem::exists(kModel)) << "the default model is missing; run: make model";
    const auto checkpoint = open_checkpoint(kModel);
    auto ops = std::make_shared<ops::FusedOps>(kernels::select_isa(GetParam()), threads);
    std::shared_ptr<const Model> model = load_model(*checkpoint, *ops);
    return std::make_unique<FusedForward>(std::move(ops), std::move(model),
                                          FusedForwardOptions{400'000'000, kernels::KvElement::f16, {}, 0, {}, kv});
  }
  /// The scalar reference is some hundred times slower: shorter texts, the same cases.
  [[nodiscard]] bool slow() const { return GetParam() == "scalar"; }
  [[nodiscard]] std::vector<Script> scripts() const {
    std::vector<Script> all;
    const std::vector<int> lengths =
        slow() ? std::vector<int>{5, 3} : std::vector<int>{70, 1, 33, 150, 32, 17, 64, 5, 90};
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto salt = static_cast<int>(i);
      all.push_back({prompt_of(lengths[i], salt), i % 2 == 0 ? greedy_with_logprobs() : seeded(1000 + i),
                     slow() ? 3 : 12 + salt * 3, static_cast<int>(i) / 3 * 4});
    }
    return all;
  }
};

TEST_P(Invariance, AloneInABatchChunkedAndThreaded) {
  const std::vector<Script> all = scripts();
  const auto one = forward(1);
  std::vector<Said> alone;
  for (Script script : all) {
    script.arrival = 0;
    alone.push_back(run(*one, {script}, 512).front());
    ASSERT_EQ(static_cast<int>(alone.back().tokens.size()), script.tokens);
  }
  ASSERT_NE(alone[0], alone[1]) << "different rows say different things, else this test shows nothing";

  const auto two = forward(2);
  for (FusedForward* f : {one.get(), two.get()}) {
    for (const int chunk : slow() ? std::vector<int>{2} : std::vector<int>{512, 64, 7, 1}) {
      const std::vector<Said> together = run(*f, all, chunk);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(together[i], alone[i]) << "row " << i << ", chunks of " << chunk << ", "
                                         << (f == one.get() ? "one thread" : "two threads");
      }
    }
    EXPECT_EQ(f->kv().used_bytes, 0U);
    EXPECT_EQ(f->kv().reserved_bytes, 0U);
  }
}

TEST_P(Invariance, OnQuantizedKvToo) {
  if (slow()) GTEST_SKIP() << "covered by the kernels' and the families' tests; the scalar reference is too slow";
  std::vector<ops::KvFormat> formats;
  for (int layer = 0; layer < 30; ++layer) {
    formats.push_back(layer % 4 == 0 ? ops::KvFormat{8, 64} : ops::KvFormat{layer % 4 == 3 ? 0 : 4, layer % 4 * 32});
  }
  const std::vector<Script> all = scripts();
  const auto one = forward(1, formats);
  std::vector<Said> alone;
  for (Script script : all) {
    script.arrival = 0;
    alone.push_back(run(*one, {script}, 512).front());
  }
  const auto two = forward(2, formats);
  for (const int chunk : {512, 7}) {
    const std::vector<Said> together = run(*two, all, chunk);
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(together[i], alone[i]) << "row " << i << ", " << chunk;
  }
}

TEST_P(Invariance, ArgmaxInTheKernelIsArgmaxOfTheLogits) {
  if (slow()) GTEST_SKIP() << "covered by the kernels' own tests; the scalar reference is too slow for the model";
  const auto f = forward(2);
  std::vector<Script> logged, fused;
  for (int i = 0; i < 4; ++i) {
    logged.push_back({prompt_of(20 + i * 9, i), greedy_with_logprobs(), 24, 0});
    fused.push_back({prompt_of(20 + i * 9, i), sample::Params{}, 24, 0});
  }
  const auto a = run(*f, logged, 512), b = run(*f, fused, 512);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].tokens, b[i].tokens);
}

TEST_P(Invariance, EqualSeedsAgreeAndDifferentOnesDont) {
  if (slow()) GTEST_SKIP() << "a matter of the sampler, not of the instruction set";
  const auto f = forward(2);
  const auto said = run(*f,
                        {{prompt_of(30, 1), seeded(7), 20, 0},
                         {prompt_of(30, 1), seeded(7), 20, 3},
                         {prompt_of(30, 1), seeded(8), 20, 1}},
                        16);
  EXPECT_EQ(said[0], said[1]);
  EXPECT_NE(said[0].tokens, said[2].tokens);
}

TEST_P(Invariance, ARowThatLeavesMidwayDisturbsNobody) {
  if (slow()) GTEST_SKIP() << "block handling does not depend on the instruction set";
  const auto f = forward(2);
  const Script stays{prompt_of(40, 3), greedy_with_logprobs(), 40, 0};
  const Said alone = run(*f, {stays}, 512).front();
  // Short rows come and go around it and hand their blocks on.
  std::vector<Script> crowd{stays};
  for (int i = 0; i < 12; ++i) crowd.push_back({prompt_of(3 + i * 5, 50 + i), seeded(i), 2 + i % 4, i * 3});
  EXPECT_EQ(run(*f, crowd, 32).front(), alone);
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, Invariance, ::testing::ValuesIn(kernels::supported_isas()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace galley::models
