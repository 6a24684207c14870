// Gemma 3 270M, the one real model with sliding windows, where its file has been put (it is optional: its licence asks
// for consent; scripts/model-gemma.sh fetches it). Contexts cross the window of 512 twice.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <vector>

#include "models/checkpoint.h"
#include "models/fused_forward.h"
#include "models/model.h"
#include "models_rows.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {
namespace {

using galley::testing::greedy_with_logprobs;
using galley::testing::run;
using galley::testing::Said;
using galley::testing::Script;
using galley::testing::seeded;

const std::filesystem::path kModel = std::filesystem::path(GALLEY_SOURCE_DIR) / "models" / "gemma-3-270m-q4_k_m.gguf";

std::vector<std::int32_t> prompt_of(int length, int salt) {
  std::vector<std::int32_t> ids{2};  // <bos>
  for (int i = 1; i < length; ++i) ids.push_back(1000 + (i * 7919 + salt * 104729) % 200000);
  return ids;
}

std::unique_ptr<FusedForward> forward(int threads) {
  const auto checkpoint = open_checkpoint(kModel);
  auto ops = std::make_shared<ops::FusedOps>(kernels::select_isa("best"), threads);
  std::shared_ptr<const Model> model = load_model(*checkpoint, *ops);
  return std::make_unique<FusedForward>(std::move(ops), std::move(model),
                                        FusedForwardOptions{400'000'000, kernels::KvElement::f16});
}

TEST(Gemma3Model, SaysWhatItIs) {
  if (!std::filesystem::exists(kModel))
    GTEST_SKIP()
        << "the optional model is not there; fetch it with scripts/model-gemma.sh (the families have tiny models)";
  const auto checkpoint = open_checkpoint(kModel);
  const Config& config = checkpoint->config();
  EXPECT_EQ(config.family, "gemma3");
  EXPECT_EQ(config.layers, 18);
  EXPECT_EQ(config.hidden, 640);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.query_scalar, 256.0F);
  EXPECT_EQ(config.vocab, 262144);
  EXPECT_EQ(config.sliding.window, 512);
  EXPECT_FALSE(config.sliding.slides(5));
  EXPECT_TRUE(config.sliding.slides(6));
  EXPECT_FALSE(config.sliding.slides(17));
  EXPECT_TRUE(config.tied_head);
  EXPECT_EQ(checkpoint->assets().bos_id, 2);
  EXPECT_TRUE(checkpoint->assets().add_bos);
}

TEST(Gemma3Model, RowsAreTheSameAloneAndTogetherAcrossTheWindow) {
  if (!std::filesystem::exists(kModel))
    GTEST_SKIP()
        << "the optional model is not there; fetch it with scripts/model-gemma.sh (the families have tiny models)";
  const std::vector<Script> all{
      {prompt_of(1050, 1), greedy_with_logprobs(), 12, 0},
      {prompt_of(503, 2), seeded(7), 20, 0},  // its window begins to slide while it decodes
      {prompt_of(30, 3), greedy_with_logprobs(), 12, 4},
      {prompt_of(600, 4), seeded(8), 12, 2},
  };
  const auto one = forward(1);
  std::vector<Said> alone;
  for (Script script : all) {
    script.arrival = 0;
    alone.push_back(run(*one, {script}, 512).front());
  }
  EXPECT_NE(alone[0], alone[2]);
  const auto two = forward(2);
  for (const int chunk : {512, 100}) {
    const auto together = run(*two, all, chunk);
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(together[i], alone[i]) << "row " << i << ", chunk " << chunk;
  }
}

}  // namespace
}  // namespace galley::models
