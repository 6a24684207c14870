// The default model, where it has been downloaded.
#include <gtest/gtest.h>

#include "models/checkpoint.h"
#include "ops/error.h"

namespace galley::models {
namespace {

TEST(CheckpointModel, SmolLm2) {
  const std::filesystem::path file =
      std::filesystem::path(GALLEY_SOURCE_DIR) / "models/SmolLM2-135M-Instruct.Q4_1.gguf";
  ASSERT_TRUE(std::filesystem::exists(file)) << "the default model is missing; run: make model";
  const auto checkpoint = open_checkpoint(file);
  const Config& config = checkpoint->config();
  EXPECT_EQ(config.layers, 30);
  EXPECT_EQ(config.hidden, 576);
  EXPECT_EQ(config.heads, 9);
  EXPECT_EQ(config.kv_heads, 3);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.intermediate, 1536);
  EXPECT_EQ(config.vocab, 49152);
  EXPECT_EQ(config.context, 8192);
  EXPECT_EQ(config.rope_base, 100000.0F);
  EXPECT_TRUE(config.tied_head);
  EXPECT_EQ(checkpoint->format(), "GGUF v3, Q4_1 + Q8_0");
  EXPECT_EQ(checkpoint->file_bytes(), std::filesystem::file_size(file));
  EXPECT_EQ(checkpoint->assets().end_ids, (std::vector<std::int32_t>{2}));
  EXPECT_EQ(checkpoint->assets().vocabulary.merges.size(), 48900U);
  EXPECT_FALSE(checkpoint->assets().chat_template.empty());

  const auto embedding = checkpoint->matrix("model.embed_tokens.weight", 49152, 576);
  EXPECT_EQ(embedding->affine().bits, 8);
  for (int layer = 0; layer < config.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    EXPECT_EQ(checkpoint->matrix(prefix + "self_attn.k_proj.weight", 192, 576)->affine().bits, 4);
    EXPECT_EQ(checkpoint->matrix(prefix + "mlp.down_proj.weight", 576, 1536)->affine().group, 32);
    EXPECT_EQ(checkpoint->vector(prefix + "input_layernorm.weight", 576).values.size(), 576U);
  }
}

}  // namespace
}  // namespace galley::models
