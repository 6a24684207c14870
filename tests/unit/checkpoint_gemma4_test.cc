// What the loaders read of Gemma 4 models: the config.json of its three shapes, alone and beside towers.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint_files.h"
#include "gemma4_gguf.h"
#include "models/checkpoint.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using test::SafeTensorsWriter;
using test::TempFolder;

#define EXPECT_MENTIONS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

std::unique_ptr<Checkpoint> open_folder(const TempFolder& folder, const std::string& config,
                                        const std::string& prefix = {}) {
  folder.write("config.json", config);
  folder.write("tokenizer.json", R"({"version": "1.0", "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  SafeTensorsWriter weights;
  weights.tensor(prefix + "model.norm.weight", "F32", {2}, test::bytes_of({0.5F, -0.25F}));
  weights.tensor(prefix + "model.layers.0.layer_scalar", "F32", {1}, test::bytes_of({0.75F}));
  weights.tensor("audio_tower.embeddings.weight", "F32", {1}, test::bytes_of({1}));
  folder.write("model.safetensors", weights.bytes());
  return open_checkpoint(folder.path());
}

Config config_of(const std::string& more) {
  const TempFolder folder;
  return open_folder(folder, R"({"model_type": "gemma4_text", "eos_token_id": 1)" + more + "}")->config();
}

std::string config_error(const std::string& more) {
  try {
    (void)config_of(more);
  } catch (const ModelError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Gemma4Config, WhatIsAbsentIsAsInGemma4E2B) {
  const Config config = config_of("");
  EXPECT_EQ(config.family, "gemma4");
  EXPECT_EQ(config.hidden, 1536);
  EXPECT_EQ(config.layers, 35);
  EXPECT_EQ(config.heads, 8);
  EXPECT_EQ(config.kv_heads, 1);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.full.head_dim, 512);
  EXPECT_EQ(config.full.kv_heads, 0);
  EXPECT_FALSE(config.full.keys_are_values);
  EXPECT_EQ(config.intermediate, 6144);
  EXPECT_EQ(config.vocab, 262144);
  EXPECT_EQ(config.context, 131072);
  EXPECT_EQ(config.norm_eps, 1e-6F);
  EXPECT_EQ(config.logit_softcap, 30.0F);
  EXPECT_EQ(config.sliding.window, 512);
  EXPECT_TRUE(config.sliding.slides(3));
  EXPECT_FALSE(config.sliding.slides(4));
  EXPECT_EQ(config.shared_kv.layers, 20);
  EXPECT_TRUE(config.shared_kv.double_wide_mlp);
  EXPECT_EQ(config.per_layer.width, 256);
  EXPECT_EQ(config.per_layer.vocab, 262144);
  EXPECT_EQ(config.rope_base, 1e6F);
  EXPECT_EQ(config.rope_scaling.type, "proportional");
  EXPECT_EQ(config.rope_scaling.rotated, 0.25);
  EXPECT_EQ(config.sliding.rope_base, 1e4F);
  EXPECT_EQ(config.experts.count, 0);
  EXPECT_TRUE(config.tied_head);
}

TEST(Gemma4Config, ReadsADenseModel) {
  const Config config = config_of(R"(, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_k_eq_v": true,
    "num_global_key_value_heads": 2, "global_head_dim": null, "final_logit_softcapping": null,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": false,
    "rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
                        "sliding_attention": {"rope_theta": 2e4}}, "use_bidirectional_attention": "vision")");
  EXPECT_TRUE(config.full.keys_are_values);
  EXPECT_EQ(config.full.kv_heads, 2);
  EXPECT_EQ(config.full.head_dim, 0);
  EXPECT_EQ(config.logit_softcap, 0.0F);
  EXPECT_EQ(config.per_layer.width, 0);
  EXPECT_EQ(config.shared_kv.layers, 0);
  EXPECT_FALSE(config.sliding.slides(0));
  EXPECT_TRUE(config.sliding.slides(1));
  EXPECT_FALSE(config.sliding.slides(2));
  EXPECT_EQ(config.rope_base, 5e5F);
  EXPECT_EQ(config.rope_scaling.type, "linear");
  EXPECT_EQ(config.rope_scaling.factor, 4.0F);
  EXPECT_EQ(config.sliding.rope_base, 2e4F);
  EXPECT_FALSE(config.tied_head);
}

TEST(Gemma4Config, ReadsExpertsBesideTheMlp) {
  const Config config = config_of(R"(, "enable_moe_block": true, "num_experts": 16, "top_k_experts": 4,
    "moe_intermediate_size": 96)");
  EXPECT_EQ(config.experts.count, 16);
  EXPECT_EQ(config.experts.per_token, 4);
  EXPECT_EQ(config.experts.intermediate, 96);
  EXPECT_TRUE(config.experts.beside_mlp);
  EXPECT_MENTIONS(config_error(R"(, "enable_moe_block": true)"), "\"num_experts\" is missing");
}

TEST(Gemma4Config, ReadsTheTextModelBesideTowers) {
  const TempFolder folder;
  const auto checkpoint = open_folder(folder, R"({"model_type": "gemma4", "eos_token_id": 1, "vocab_size": 9,
    "text_config": {"hidden_size": 64, "vocab_size": 7}, "audio_config": {"hidden_size": 5}})",
                                      "language_model.");
  EXPECT_EQ(checkpoint->config().family, "gemma4");
  EXPECT_EQ(checkpoint->config().hidden, 64);
  EXPECT_EQ(checkpoint->config().vocab, 9);  // the outer one counts
  EXPECT_EQ(checkpoint->vector("model.norm.weight", 2).values, (std::vector<float>{0.5F, -0.25F}));
  EXPECT_EQ(checkpoint->vector("model.layers.0.layer_scalar", 1).values, std::vector<float>{0.75F});
}

TEST(Gemma4Config, ReadsTheTextModelWhereItsMakersPutIt) {
  const TempFolder folder;
  folder.write("config.json", R"({"model_type": "gemma4", "eos_token_id": 1, "text_config": {"hidden_size": 64}})");
  folder.write("tokenizer.json", R"({"version": "1.0", "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  SafeTensorsWriter weights;
  weights.tensor("model.language_model.norm.weight", "F32", {2}, test::bytes_of({0.5F, -0.25F}));
  weights.tensor("model.vision_tower.embeddings.weight", "F32", {1}, test::bytes_of({1}));
  weights.tensor("lm_head.weight", "F32", {1, 2}, test::bytes_of({3, 4}));
  folder.write("model.safetensors", weights.bytes());
  const auto checkpoint = open_checkpoint(folder.path());
  EXPECT_EQ(checkpoint->vector("model.norm.weight", 2).values, (std::vector<float>{0.5F, -0.25F}));
  EXPECT_TRUE(checkpoint->has("model.norm.weight"));
  EXPECT_TRUE(checkpoint->has("lm_head.weight"));
  EXPECT_FALSE(checkpoint->has("model.vision_tower.embeddings.weight"));
}

TEST(Gemma4Config, RefusesByNameWhatIsNotSupported) {
  EXPECT_MENTIONS(config_error(R"(, "hidden_activation": "relu")"), "\"hidden_activation\"");
  EXPECT_MENTIONS(config_error(R"(, "attn_logit_softcapping": 50.0)"), "\"attn_logit_softcapping\" is not supported");
  EXPECT_MENTIONS(config_error(R"(, "attention_bias": true)"), "\"attention_bias\"");
  EXPECT_MENTIONS(config_error(R"(, "use_bidirectional_attention": true)"), "\"use_bidirectional_attention\": true");
  EXPECT_MENTIONS(config_error(R"(, "sliding_window": 0)"), "\"sliding_window\"");
  EXPECT_MENTIONS(config_error(R"(, "sliding_window_pattern": 0)"), "\"sliding_window_pattern\"");
  EXPECT_MENTIONS(config_error(R"(, "layer_types": ["full_attention"])"), "as many as there are layers, 35");
  EXPECT_MENTIONS(config_error(R"(, "num_hidden_layers": 1, "num_kv_shared_layers": 0, "layer_types": ["linear"])"),
                  "\"layer_types\": expected sliding_attention or full_attention");
  EXPECT_MENTIONS(config_error(R"(, "rope_parameters": {"full_attention": {"rope_type": "yarn"}})"), "\"yarn\"");
  EXPECT_MENTIONS(config_error(R"(, "rope_parameters": {"sliding_attention": {"rope_type": "linear"}})"), "\"linear\"");
  EXPECT_MENTIONS(config_error(R"(, "rope_parameters": {"full_attention": {"rope_type": "linear"}})"),
                  "factor\" is missing");
  EXPECT_MENTIONS(config_error(R"(, "rope_parameters": {"full_attention": {"rope_type": "proportional",
        "partial_rotary_factor": 1.5}})"),
                  "between 0 and 1");
  EXPECT_MENTIONS(config_error(R"(, "num_kv_shared_layers": 35)"), "none of the 35 to share with");
  EXPECT_MENTIONS(config_error(R"(, "vocab_size_per_layer_input": 10)"), "smaller than the model's");
  EXPECT_MENTIONS(config_error(R"(, "attention_k_eq_v": true, "num_global_key_value_heads": 3)"),
                  "key/value heads of full layers, 3");
  EXPECT_MENTIONS(config_error(R"(, "final_logit_softcapping": -1.0)"), "soft-cap");
}

// ---- GGUF

using galley::testing::gemma4_metadata;
using galley::testing::Gemma4Tensors;
using galley::testing::MemoryCheckpoint;
using test::GgufWriter;

Config small(MemoryCheckpoint::Gemma4 shape) {
  Config config = MemoryCheckpoint::tiny_gemma4(shape);
  config.vocab = 4;
  if (config.per_layer.width > 0) config.per_layer.vocab = 4;
  return config;
}

Config read_back(const Config& config, GgufWriter metadata, const std::vector<float>& stops = {}) {
  const MemoryCheckpoint memory(config);
  Gemma4Tensors tensors(metadata, memory);
  if (!stops.empty()) tensors.stops = stops;
  tensors.write();
  const TempFolder folder;
  return open_checkpoint(folder.write("model.gguf", metadata.bytes()))->config();
}

std::string gguf_error(const Config& config, const GgufWriter& metadata, const std::vector<float>& stops = {}) {
  try {
    (void)read_back(config, metadata, stops);
  } catch (const ModelError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Gemma4Gguf, ReadsWhatTheConverterWrites) {
  using Gemma4 = MemoryCheckpoint::Gemma4;
  for (const Gemma4 shape : {Gemma4::dense, Gemma4::per_layer, Gemma4::experts}) {
    const Config wrote = small(shape);
    const Config read = read_back(wrote, gemma4_metadata(wrote));
    EXPECT_EQ(read.family, "gemma4");
    EXPECT_EQ(read.heads, wrote.heads);
    EXPECT_EQ(read.kv_heads, wrote.kv_heads);
    EXPECT_EQ(read.head_dim, wrote.head_dim);
    EXPECT_EQ(read.full.head_dim, wrote.full.head_dim);
    EXPECT_EQ(read.full.kv_heads, wrote.full.kv_heads);
    EXPECT_EQ(read.full.keys_are_values, wrote.full.keys_are_values);
    EXPECT_EQ(read.intermediate, wrote.intermediate);
    EXPECT_EQ(read.shared_kv.layers, wrote.shared_kv.layers);
    EXPECT_EQ(read.shared_kv.double_wide_mlp, wrote.shared_kv.double_wide_mlp);
    EXPECT_EQ(read.per_layer.width, wrote.per_layer.width);
    EXPECT_EQ(read.per_layer.vocab, wrote.per_layer.vocab);
    EXPECT_EQ(read.logit_softcap, wrote.logit_softcap);
    EXPECT_EQ(read.rope_base, wrote.rope_base);
    EXPECT_EQ(read.rope_scaling.type, "proportional");
    EXPECT_EQ(read.rope_scaling.rotated, wrote.rope_scaling.rotated);
    EXPECT_EQ(read.sliding.rope_base, wrote.sliding.rope_base);
    EXPECT_EQ(read.sliding.window, wrote.sliding.window);
    EXPECT_EQ(read.experts.count, wrote.experts.count);
    EXPECT_EQ(read.experts.beside_mlp, wrote.experts.beside_mlp);
    for (int layer = 0; layer < wrote.layers; ++layer)
      EXPECT_EQ(read.sliding.slides(layer), wrote.sliding.slides(layer));
  }
}

TEST(Gemma4Gguf, RefusesWhatTheFamilyDoesNotHave) {
  const Config dense = small(MemoryCheckpoint::Gemma4::dense);
  const Config shared = small(MemoryCheckpoint::Gemma4::per_layer);
  EXPECT_EQ(gguf_error(shared, gemma4_metadata(shared)), "no error");
  const auto odd = [&](const galley::testing::Gemma4Oddities& what) {
    return gguf_error(dense, gemma4_metadata(dense, what));
  };
  EXPECT_MENTIONS(odd({.sliding = {true, true}}), "expected 3 booleans");
  EXPECT_MENTIONS(odd({.kv_heads = {2, 4, 1}}), "\"gemma4.attention.head_count_kv\": layers 1 and before differ, 4");
  EXPECT_MENTIONS(odd({.kv_heads = {2, 2}}), "lists 2 numbers, expected 3");
  EXPECT_MENTIONS(odd({.widths = {192, 192, 256}}), "sliding and full layers differ");
  const std::vector<std::int32_t> thrice{192, 192, 192, 576, 576, 576};
  EXPECT_MENTIONS(gguf_error(shared, gemma4_metadata(shared, {.widths = thrice})), "twice as wide, or alike");

  GgufWriter file = gemma4_metadata(dense);
  file.integer("gemma4.expert_count", 8);
  EXPECT_MENTIONS(gguf_error(dense, file), "\"gemma4.expert_used_count\" is missing");
  file = gemma4_metadata(dense);
  file.tensor("blk.0.attn_q.bias", {192}, 0, std::string(768, '\0'));
  EXPECT_MENTIONS(gguf_error(dense, file), "not part of a gemma4 model");
  file = gemma4_metadata(dense);
  file.string("gemma4.rope.scaling.type", "linear");
  file.number("gemma4.rope.scaling.factor", 2.0F);
  EXPECT_MENTIONS(gguf_error(dense, file), "linear RoPE scaling together with");
  Config other = dense;
  other.shared_kv = {.layers = 3};
  EXPECT_MENTIONS(gguf_error(dense, gemma4_metadata(other)), "to share with");
  other = dense;
  other.rope_scaling.rotated = 0;
  EXPECT_MENTIONS(gguf_error(other, gemma4_metadata(other)), "between 0 and 1");
  std::vector<float> stretched(32, 8.0F);
  EXPECT_MENTIONS(gguf_error(dense, gemma4_metadata(dense), stretched), "\"rope_freqs.weight\": expected ones and");
  stretched.resize(16);
  EXPECT_MENTIONS(gguf_error(dense, gemma4_metadata(dense), stretched), "expected shape [32], found [16]");
}

}  // namespace
}  // namespace galley::models
