// What the loaders read of Gemma models: config.json of text models and of those with a vision tower, and GGUF files.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint_files.h"
#include "models/checkpoint.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using test::GgufWriter;
using test::SafeTensorsWriter;
using test::TempFolder;

#define EXPECT_MENTIONS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

template <typename F>
std::string error_of(F&& action) {
  try {
    action();
  } catch (const ModelError& error) {
    return error.what();
  }
  return "no error";
}

// ---- folders

std::unique_ptr<Checkpoint> open_folder(const TempFolder& folder, const std::string& config,
                                        const std::string& prefix = {}) {
  folder.write("config.json", config);
  folder.write("tokenizer.json", R"({"version": "1.0", "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  SafeTensorsWriter weights;
  weights.tensor(prefix + "model.norm.weight", "F32", {2}, test::bytes_of({0.5F, -0.25F}));
  weights.tensor("vision_tower.embeddings.weight", "F32", {1}, test::bytes_of({1}));
  folder.write("model.safetensors", weights.bytes());
  return open_checkpoint(folder.path());
}

Config config_of(const std::string& config) {
  const TempFolder folder;
  return open_folder(folder, config)->config();
}

std::string text_config(const std::string& more) {
  return R"({"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16,
    "sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 168, "eos_token_id": 1)" +
         more + "}";
}

std::string config_error(const std::string& more) {
  return error_of([&] { (void)config_of(text_config(more)); });
}

TEST(Gemma3Config, ReadsATextModel) {
  const Config config = config_of(text_config(R"(, "rope_theta": 2e6, "rope_local_base_freq": 3e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_attention_heads": 8, "num_key_value_heads": 2)"));
  EXPECT_EQ(config.family, "gemma3");
  EXPECT_EQ(config.hidden, 64);
  EXPECT_EQ(config.heads, 8);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.query_scalar, 168.0F);
  EXPECT_TRUE(config.norms_add_one);
  EXPECT_TRUE(config.tied_head);
  EXPECT_EQ(config.sliding.window, 32);
  EXPECT_TRUE(config.sliding.slides(0));
  EXPECT_FALSE(config.sliding.slides(1));
  EXPECT_TRUE(config.sliding.slides(2));
  EXPECT_EQ(config.rope_base, 2e6F);
  EXPECT_EQ(config.sliding.rope_base, 3e4F);
  EXPECT_EQ(config.rope_scaling.type, "linear");
  EXPECT_EQ(config.rope_scaling.factor, 8.0F);
}

TEST(Gemma3Config, WhatIsAbsentIsAsInGemma3_1B) {
  const Config config = config_of(R"({"model_type": "gemma3_text", "eos_token_id": 1})");
  EXPECT_EQ(config.hidden, 1152);
  EXPECT_EQ(config.layers, 26);
  EXPECT_EQ(config.heads, 4);
  EXPECT_EQ(config.kv_heads, 1);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.intermediate, 6912);
  EXPECT_EQ(config.vocab, 262144);
  EXPECT_EQ(config.context, 32768);
  EXPECT_EQ(config.norm_eps, 1e-6F);
  EXPECT_EQ(config.query_scalar, 256.0F);
  EXPECT_EQ(config.sliding.window, 512);
  EXPECT_EQ(config.sliding.pattern, 6);
  EXPECT_EQ(config.rope_base, 1e6F);
  EXPECT_EQ(config.sliding.rope_base, 1e4F);
  EXPECT_EQ(config.rope_scaling.type, "");
}

TEST(Gemma3Config, ReadsTheNewerRopeParameters) {
  const Config config = config_of(text_config(R"(, "rope_parameters": {
    "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
    "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"}})"));
  EXPECT_EQ(config.rope_base, 5e5F);
  EXPECT_EQ(config.rope_scaling.type, "linear");
  EXPECT_EQ(config.rope_scaling.factor, 4.0F);
  EXPECT_EQ(config.sliding.rope_base, 2e4F);
}

TEST(Gemma3Config, ReadsTheTextModelBesideAVisionTower) {
  const TempFolder folder;
  const auto checkpoint = open_folder(folder, R"({"model_type": "gemma3", "eos_token_id": 1,
    "hidden_size": 5, "text_config": {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 7},
    "vision_config": {"hidden_size": 1152}})",
                                      "language_model.");
  const Config& config = checkpoint->config();
  EXPECT_EQ(config.family, "gemma3");
  EXPECT_EQ(config.hidden, 64);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.heads, 8);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.vocab, 262208);  // the outer one counts, here by default
  EXPECT_TRUE(checkpoint->has("model.norm.weight"));
  EXPECT_EQ(checkpoint->vector("model.norm.weight", 2).values, (std::vector<float>{0.5F, -0.25F}));
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->vector("model.other.weight", 2); }),
                  "\"language_model.model.other.weight\"");
  EXPECT_MENTIONS(error_of([] { (void)config_of(R"({"model_type": "gemma3", "eos_token_id": 1})"); }),
                  "\"text_config\" is missing");
}

TEST(Gemma3Config, RefusesByNameWhatIsNotSupported) {
  EXPECT_MENTIONS(config_error(R"(, "hidden_activation": "relu")"), "\"hidden_activation\"");
  EXPECT_MENTIONS(config_error(R"(, "attn_logit_softcapping": 50.0)"), "\"attn_logit_softcapping\" is not supported");
  EXPECT_MENTIONS(config_error(R"(, "final_logit_softcapping": 30.0)"), "\"final_logit_softcapping\" is not supported");
  EXPECT_MENTIONS(config_error(R"(, "use_bidirectional_attention": true)"), "\"use_bidirectional_attention\": true");
  EXPECT_MENTIONS(config_error(R"(, "rope_scaling": {"rope_type": "yarn", "factor": 2})"), "\"yarn\"");
  EXPECT_MENTIONS(config_error(R"(, "sliding_window": 0)"), "\"sliding_window\"");
  EXPECT_MENTIONS(config_error(R"(, "sliding_window_pattern": 0)"), "\"sliding_window_pattern\"");
  EXPECT_MENTIONS(config_error(R"(, "query_pre_attn_scalar": -1)"), "\"query_pre_attn_scalar\"");
  EXPECT_MENTIONS(config_error(R"(, "layer_types": ["full_attention", "sliding_attention"])"), "\"layer_types\"");
  EXPECT_EQ(config_error(R"(, "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
    "full_attention"], "attn_logit_softcapping": null, "hidden_activation": "gelu_pytorch_tanh")"),
            "no error");
}

// ---- GGUF

/// Hidden 32, two heads, one key/value head, intermediate 64, vocabulary 4, tied head. Every tensor counts up from a
/// number of its own.
GgufWriter gguf(int layers = 1, std::uint32_t head_dim = 16) {
  GgufWriter out;
  out.string("general.architecture", "gemma3");
  out.integer("gemma3.block_count", static_cast<std::uint32_t>(layers));
  out.integer("gemma3.context_length", 64);
  out.integer("gemma3.embedding_length", 32);
  out.integer("gemma3.feed_forward_length", 64);
  out.integer("gemma3.attention.head_count", 2);
  out.integer("gemma3.attention.head_count_kv", 1);
  out.integer("gemma3.attention.key_length", head_dim);
  out.integer("gemma3.attention.value_length", head_dim);
  out.integer("gemma3.attention.sliding_window", 512);
  out.number("gemma3.attention.layer_norm_rms_epsilon", 1e-6F);
  out.number("gemma3.rope.freq_base", 1e6F);
  out.string("tokenizer.ggml.model", "gpt2");
  out.string("tokenizer.ggml.pre", "qwen2");
  out.strings("tokenizer.ggml.tokens", {"<eos>", "<bos>", "<end_of_turn>", "a"});
  out.integers("tokenizer.ggml.token_type", {3, 3, 3, 1});
  out.strings("tokenizer.ggml.merges", {});
  out.integer("tokenizer.ggml.eos_token_id", 0);
  const auto tensor = [&](const std::string& name, const std::vector<std::uint64_t>& shape, float first) {
    std::uint64_t n = 1;
    for (const std::uint64_t size : shape) n *= size;
    std::vector<float> values;
    for (std::uint64_t i = 0; i < n; ++i) values.push_back(first + static_cast<float>(i));
    out.tensor(name, shape, 0, test::bytes_of(values));
  };
  tensor("token_embd.weight", {4, 32}, 0);
  tensor("output_norm.weight", {32}, 1);
  for (int layer = 0; layer < layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    tensor(block + "attn_norm.weight", {32}, 2);
    tensor(block + "attn_q.weight", {2 * head_dim, 32}, 0);
    tensor(block + "attn_k.weight", {head_dim, 32}, 0);
    tensor(block + "attn_v.weight", {head_dim, 32}, 0);
    tensor(block + "attn_q_norm.weight", {head_dim}, 3);
    tensor(block + "attn_k_norm.weight", {head_dim}, 4);
    tensor(block + "attn_output.weight", {32, 2 * head_dim}, 0);
    tensor(block + "post_attention_norm.weight", {32}, 5);
    tensor(block + "ffn_norm.weight", {32}, 6);
    tensor(block + "ffn_gate.weight", {64, 32}, 0);
    tensor(block + "ffn_up.weight", {64, 32}, 0);
    tensor(block + "ffn_down.weight", {32, 64}, 0);
    tensor(block + "post_ffw_norm.weight", {32}, 7);
  }
  return out;
}

std::unique_ptr<Checkpoint> open_gguf(const TempFolder& folder, const GgufWriter& file) {
  return open_checkpoint(folder.write("model.gguf", file.bytes()));
}

TEST(Gemma3Gguf, ReadsMetadataAndNames) {
  const TempFolder folder;
  const auto checkpoint = open_gguf(folder, gguf());
  const Config& config = checkpoint->config();
  EXPECT_EQ(config.family, "gemma3");
  EXPECT_FALSE(config.norms_add_one);  // converters add it
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.query_scalar, 16.0F);
  EXPECT_EQ(config.sliding.window, 512);
  EXPECT_EQ(config.sliding.pattern, 6);
  EXPECT_EQ(config.sliding.rope_base, 1e4F);
  EXPECT_EQ(config.rope_base, 1e6F);
  EXPECT_TRUE(config.tied_head);
  const auto first = [&](const std::string& tensor, int size) { return checkpoint->vector(tensor, size).values[0]; };
  EXPECT_EQ(first("model.norm.weight", 32), 1);
  const std::string layer = "model.layers.0.";
  EXPECT_EQ(first(layer + "input_layernorm.weight", 32), 2);
  EXPECT_EQ(first(layer + "self_attn.q_norm.weight", 16), 3);
  EXPECT_EQ(first(layer + "self_attn.k_norm.weight", 16), 4);
  EXPECT_EQ(first(layer + "post_attention_layernorm.weight", 32), 5);
  EXPECT_EQ(first(layer + "pre_feedforward_layernorm.weight", 32), 6);
  EXPECT_EQ(first(layer + "post_feedforward_layernorm.weight", 32), 7);
  std::vector<float> row(32);
  checkpoint->matrix(layer + "self_attn.q_proj.weight", 32, 32)->values(1, row);
  EXPECT_EQ(row[0], 32);  // rows lie in their place, not in pairs
}

TEST(Gemma3Gguf, TheLargestModelDividesByAnotherRoot) {
  const TempFolder folder;
  EXPECT_EQ(open_gguf(folder, gguf(61, 48))->config().query_scalar, 48.0F);
  EXPECT_EQ(open_gguf(folder, gguf(62, 48))->config().query_scalar, 16.0F);  // hidden 32 / 2 heads
}

TEST(Gemma3Gguf, ReadsLinearScalingOfFullLayers) {
  GgufWriter file = gguf();
  file.string("gemma3.rope.scaling.type", "linear");
  file.number("gemma3.rope.scaling.factor", 8.0F);
  const TempFolder folder;
  const auto checkpoint = open_gguf(folder, file);
  EXPECT_EQ(checkpoint->config().rope_scaling.type, "linear");
  EXPECT_EQ(checkpoint->config().rope_scaling.factor, 8.0F);
}

TEST(Gemma3Gguf, RefusesWhatTheFamilyDoesNotHave) {
  const TempFolder folder;
  GgufWriter file = gguf();
  file.number("gemma3.final_logit_softcapping", 30.0F);
  EXPECT_MENTIONS(error_of([&] { (void)open_gguf(folder, file); }), "\"gemma3.final_logit_softcapping\"");
  file = gguf();
  file.integer("gemma3.attention.sliding_window_pattern", 0);
  EXPECT_MENTIONS(error_of([&] { (void)open_gguf(folder, file); }), "pattern of sliding and full layers");
  file = gguf();
  file.tensor("blk.0.attn_q.bias", {32}, 0, std::string(128, '\0'));
  EXPECT_MENTIONS(error_of([&] { (void)open_gguf(folder, file); }), "not part of a gemma3 model");
}

}  // namespace
}  // namespace galley::models
