#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint_files.h"
#include "models/checkpoint.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using test::SafeTensorsWriter;
using test::TempFolder;

#define EXPECT_MENTIONS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

constexpr const char* tokenizer = R"({"version": "1.0",
  "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 1, "content": "</s>"}, {"id": 2, "content": "<|im_end|>"}],
  "post_processor": {"type": "TemplateProcessing",
                     "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}]},
  "model": {"type": "BPE", "vocab": {"a": 3}, "merges": [], "added_tokens": "not the list above"}})";

/// The text of config.json of a one-layer llama: hidden 64, 4 heads, 2 key/value heads; `more` begins with a comma.
std::string config(const std::string& more = {}) {
  return R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 8, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "eos_token_id": 1)" +
         more + "}";
}

std::string quantized_config(int bits, int group) {
  std::string more = R"(, "quantization": {"bits": )";
  more += std::to_string(bits);
  more += R"(, "group_size": )";
  more += std::to_string(group);
  more += "}";
  return config(more);
}

/// A folder with everything but weights that a test doesn't read.
class Folder {
 public:
  Folder() {
    write("config.json", config());
    write("tokenizer.json", tokenizer);
    weights_.tensor("model.norm.weight", "F32", {2}, test::bytes_of({1, 2}));
  }
  void write(const std::string& name, const std::string& text) { folder_.write(name, text); }
  void remove(const std::string& name) { std::filesystem::remove(folder_.path() / name); }
  SafeTensorsWriter& weights() { return weights_; }
  std::unique_ptr<Checkpoint> open() {
    write("model.safetensors", weights_.bytes());
    return open_checkpoint(folder_.path());
  }
  [[nodiscard]] std::unique_ptr<Checkpoint> open_as_is() const { return open_checkpoint(folder_.path()); }
  [[nodiscard]] const std::filesystem::path& path() const { return folder_.path(); }

 private:
  TempFolder folder_;
  SafeTensorsWriter weights_;
};

template <typename F>
std::string error_of(F&& action) {
  try {
    action();
  } catch (const ModelError& error) {
    return error.what();
  }
  return "no error";
}

std::string config_error(const std::string& more) {
  Folder folder;
  folder.write("config.json", config(more));
  return error_of([&] { (void)folder.open(); });
}

TEST(CheckpointFolder, ReadsConfig) {
  Folder folder;
  folder.write("config.json", config(R"(, "head_dim": 32, "rope_theta": 500000.0, "tie_word_embeddings": true,
    "attention_bias": true, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})"));
  const Config got = folder.open()->config();
  EXPECT_EQ(got.family, "llama");
  EXPECT_EQ(got.name, folder.path().filename().string());
  EXPECT_EQ(got.hidden, 64);
  EXPECT_EQ(got.heads, 4);
  EXPECT_EQ(got.kv_heads, 2);
  EXPECT_EQ(got.head_dim, 32);
  EXPECT_EQ(got.intermediate, 96);
  EXPECT_EQ(got.vocab, 8);
  EXPECT_EQ(got.context, 128);
  EXPECT_EQ(got.norm_eps, 1e-6F);
  EXPECT_EQ(got.rope_base, 500000.0F);
  EXPECT_EQ(got.rope_scaling.type, "llama3");
  EXPECT_EQ(got.rope_scaling.factor, 32.0F);
  EXPECT_TRUE(got.tied_head);
  EXPECT_TRUE(got.attention_bias);
}

TEST(CheckpointFolder, ReadsTheNewerRopeParameters) {
  Folder folder;
  folder.write("config.json",
               config(R"(, "head_dim": null, "rope_parameters": {"rope_theta": 250.0, "rope_type": "linear",
    "factor": 2.0})"));
  const Config got = folder.open()->config();
  EXPECT_EQ(got.head_dim, 16);
  EXPECT_EQ(got.rope_base, 250.0F);
  EXPECT_EQ(got.rope_scaling.type, "linear");
  EXPECT_EQ(got.rope_scaling.factor, 2.0F);
}

TEST(CheckpointFolder, HeadIsTiedWhereNothingElseIsSaid) {
  Folder folder;
  EXPECT_TRUE(folder.open()->config().tied_head);
  folder.weights().tensor("lm_head.weight", "F32", {1}, test::bytes_of({1}));
  EXPECT_FALSE(folder.open()->config().tied_head);
}

TEST(CheckpointFolder, RefusesByNameWhatIsNotSupported) {
  EXPECT_MENTIONS(config_error(R"(, "model_type": "mamba")"), "model_type \"mamba\" is not supported; supported are ");
  EXPECT_MENTIONS(config_error(R"(, "rope_scaling": {"type": "yarn", "factor": 2})"), "type \"yarn\" is not supported");
  EXPECT_MENTIONS(config_error(R"(, "rope_scaling": {"factor": 2})"), "\"rope_type\" is missing");
  EXPECT_MENTIONS(config_error(R"(, "rope_scaling": {"type": "linear"})"), "\"rope_scaling.factor\" is missing");
  EXPECT_MENTIONS(config_error(R"(, "hidden_act": "gelu")"), "expected \"silu\", found \"gelu\"");
  EXPECT_MENTIONS(config_error(R"(, "layer_types": ["sliding_attention"])"), "sliding_attention");
  EXPECT_MENTIONS(config_error(R"(, "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"})"), "\"mxfp4\"");
  EXPECT_MENTIONS(config_error(R"(, "quantization": {"bits": 7, "group_size": 32})"), "7 bits");
  EXPECT_MENTIONS(config_error(R"(, "quantization": {"bits": 4, "group_size": 48})"), "groups of 48");
  EXPECT_MENTIONS(config_error(R"(, "quantization_config": {"quant_method": "awq", "bits": 4})"), "\"awq\"");
  EXPECT_MENTIONS(config_error(R"(, "hidden_size": "64")"), "\"hidden_size\": expected an integer, found \"64\"");
  EXPECT_MENTIONS(config_error(R"(, "hidden_size": -64)"), "found -64");
  EXPECT_MENTIONS(config_error(R"(, "num_key_value_heads": 3)"), "not a multiple");
  EXPECT_MENTIONS(config_error(R"(, "num_attention_heads": 0)"), "num_attention_heads 0");
  EXPECT_MENTIONS(config_error(R"(, "num_hidden_layers": null)"), "\"num_hidden_layers\" is missing");
}

TEST(CheckpointFolder, NamesMissingAndDamagedFiles) {
  Folder folder;
  folder.write("model.safetensors", folder.weights().bytes());
  for (const char* name : {"config.json", "tokenizer.json", "model.safetensors"}) {
    Folder lacking;
    lacking.write("model.safetensors", folder.weights().bytes());
    lacking.remove(name);
    const std::string error = error_of([&] { (void)lacking.open_as_is(); });
    EXPECT_MENTIONS(error, name);
    EXPECT_MENTIONS(error, "missing");
    if (std::string(name) == "model.safetensors") continue;
    lacking.write(name, "{");
    EXPECT_MENTIONS(error_of([&] { (void)lacking.open(); }), "not valid JSON");
  }
  EXPECT_MENTIONS(error_of([&] { (void)open_checkpoint(folder.path() / "absent.gguf"); }), "no such model");
}

TEST(CheckpointFolder, ReadsTokensAndTemplates) {
  Folder folder;
  folder.write("tokenizer_config.json", R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>",
    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D<|im_end|>"}]})");
  folder.write("generation_config.json", R"({"eos_token_id": [1, 7]})");
  auto assets = folder.open()->assets();
  EXPECT_EQ(assets.tokenizer_json, tokenizer);
  EXPECT_EQ(assets.bos_token, "<s>");
  EXPECT_EQ(assets.bos_id, 0);
  EXPECT_TRUE(assets.add_bos);
  EXPECT_EQ(assets.eos_token, "</s>");
  EXPECT_EQ(assets.chat_template, "D<|im_end|>");
  std::ranges::sort(assets.end_ids);
  EXPECT_EQ(assets.end_ids, (std::vector<std::int32_t>{1, 2, 7}));

  folder.write("chat_template.jinja", "from its own file");
  folder.write("generation_config.json", R"({"eos_token_id": 5})");
  folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "add_bos_token": false, "chat_template": "C"})");
  assets = folder.open()->assets();
  EXPECT_EQ(assets.chat_template, "from its own file");
  EXPECT_FALSE(assets.add_bos);
  EXPECT_EQ(assets.end_ids, (std::vector<std::int32_t>{5, 1}));
}

TEST(CheckpointFolder, ReadsRecommendedSampling) {
  Folder folder;
  EXPECT_FALSE(folder.open()->generation_config().temperature);
  folder.write("generation_config.json", R"({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true})");
  const GenerationConfig config = folder.open()->generation_config();
  EXPECT_EQ(config.temperature, 0.6);
  EXPECT_EQ(config.top_k, 20);
  EXPECT_EQ(config.top_p, 0.95);
  EXPECT_FALSE(config.min_p);
  folder.write("generation_config.json", R"({"top_p": "high"})");
  try {
    (void)folder.open()->generation_config();
    ADD_FAILURE() << "not refused";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("generation_config.json: \"top_p\""), std::string::npos) << error.what();
  }
}

// Codes 0, 1, 2 … modulo 2^bits, packed as MLX does: one little-endian stream.
std::string packed_row(int cols, int bits, int first) {
  std::string out(static_cast<std::size_t>(cols * bits / 8), '\0');
  for (int i = 0; i < cols; ++i) {
    const int code = (first + i) & ((1 << bits) - 1);
    for (int bit = 0; bit < bits; ++bit) {
      const int at = i * bits + bit;
      if ((code >> bit) & 1) out[static_cast<std::size_t>(at / 8)] |= static_cast<char>(1 << (at % 8));
    }
  }
  return out;
}

void add_quantized(SafeTensorsWriter& weights, const std::string& module, int rows, int cols, int bits, int group) {
  std::string codes;
  std::vector<float> scales;
  std::vector<float> biases;
  for (int row = 0; row < rows; ++row) {
    codes += packed_row(cols, bits, row);
    for (int g = 0; g < cols / group; ++g) {
      scales.push_back(static_cast<float>(row + 1));
      biases.push_back(static_cast<float>(-g));
    }
  }
  const auto r = static_cast<std::uint64_t>(rows);
  const auto groups = static_cast<std::uint64_t>(cols / group);
  weights.tensor(module + ".weight", "U32", {r, static_cast<std::uint64_t>(cols * bits / 32)}, codes);
  weights.tensor(module + ".scales", "F32", {r, groups}, test::bytes_of(scales));
  weights.tensor(module + ".biases", "F32", {r, groups}, test::bytes_of(biases));
}

TEST(CheckpointFolder, UnpacksEveryWidthAndGroup) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group : {32, 64, 128}) {
      Folder folder;
      folder.write("config.json", quantized_config(bits, group));
      add_quantized(folder.weights(), "m", 3, 256, bits, group);
      const auto checkpoint = folder.open();
      const auto matrix = checkpoint->matrix("m.weight", 3, 256);
      ASSERT_TRUE(matrix->quantized());
      EXPECT_EQ(matrix->affine().bits, bits);
      EXPECT_EQ(matrix->affine().group, group);
      std::vector<std::uint8_t> codes(256);
      std::vector<float> values(256);
      matrix->codes(2, codes);
      matrix->values(2, values);
      for (int i = 0; i < 256; ++i) {
        const auto at = static_cast<std::size_t>(i);
        ASSERT_EQ(codes[at], (i + 2) & ((1 << bits) - 1)) << bits << " bits, " << i;
        ASSERT_EQ(values[at], 3.0F * codes[at] - static_cast<float>(i / group));
      }
    }
  }
}

// Bytes that mx.quantize(arange(64) % 8 …, bits=3) wrote: the layout above is MLX's own.
TEST(CheckpointFolder, ThreeBitLayoutIsMlxs) {
  Folder folder;
  folder.write("config.json", config(R"(, "quantization": {"bits": 3, "group_size": 32})"));
  std::string codes;
  for (int i = 0; i < 4; ++i) codes += "\x77\x39\x05";  // 7 6 5 4 3 2 1 0
  folder.weights().tensor("m.weight", "U32", {1, 3}, codes);
  folder.weights().tensor("m.scales", "F16", {1, 1}, test::halves_of({0xBC00}));  // -1
  folder.weights().tensor("m.biases", "F16", {1, 1}, test::halves_of({0x4700}));  // 7
  const auto checkpoint = folder.open();
  const auto matrix = checkpoint->matrix("m.weight", 1, 32);
  EXPECT_EQ(matrix->type(), ops::ElementType::f16);
  std::vector<float> values(32);
  matrix->values(0, values);
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(values[i], static_cast<float>(i % 8));
}

TEST(CheckpointFolder, OverridesOfSingleModules) {
  Folder folder;
  folder.write("config.json", config(R"(, "quantization": {"bits": 4, "group_size": 64, "mode": "affine",
    "a": {"bits": 8, "group_size": 32}, "b": false, "d": {"bits": 8, "group_size": 32}})"));
  add_quantized(folder.weights(), "a", 2, 64, 8, 32);
  folder.weights().tensor("b.weight", "BF16", {1, 2}, test::halves_of({0x3F80, 0xC040}));
  add_quantized(folder.weights(), "c", 2, 64, 4, 64);
  add_quantized(folder.weights(), "d", 2, 64, 4, 64);
  add_quantized(folder.weights(), "e", 2, 64, 6, 32);
  const auto checkpoint = folder.open();
  EXPECT_EQ(checkpoint->format(), "MLX 4-bit, groups of 64, mixed");
  EXPECT_EQ(checkpoint->matrix("a.weight", 2, 64)->affine().bits, 8);
  EXPECT_EQ(checkpoint->matrix("c.weight", 2, 64)->affine().bits, 4);
  const auto plain = checkpoint->matrix("b.weight", 1, 2);
  EXPECT_FALSE(plain->quantized());
  std::vector<float> values(2);
  plain->values(0, values);
  EXPECT_EQ(values, (std::vector<float>{1.0F, -3.0F}));
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->matrix("d.weight", 2, 64); }),
                  "expected shape [2, 16], found [2, 8]");
  // Not listed and not as the whole: its shapes tell, as in mlx-lm.
  EXPECT_EQ(checkpoint->matrix("e.weight", 2, 64)->affine().bits, 6);
  EXPECT_EQ(checkpoint->matrix("e.weight", 2, 64)->affine().group, 32);
}

TEST(CheckpointFolder, NamesMissingAndMismatchedTensors) {
  Folder folder;
  folder.write("config.json", config(R"(, "quantization": {"bits": 4, "group_size": 32})"));
  auto& weights = folder.weights();
  weights.tensor("a.weight", "U32", {1, 4}, std::string(16, '\0'));
  weights.tensor("b.weight", "U32", {1, 4}, std::string(16, '\0'));
  weights.tensor("b.scales", "F32", {1, 1}, std::string(4, '\0'));
  weights.tensor("c.weight", "U32", {1, 4}, std::string(16, '\0'));
  weights.tensor("c.scales", "F32", {1, 1}, std::string(4, '\0'));
  weights.tensor("c.biases", "F16", {1, 1}, std::string(2, '\0'));
  weights.tensor("d.weight", "F32", {1, 4}, std::string(16, '\0'));
  weights.tensor("d.scales", "F32", {1, 1}, std::string(4, '\0'));
  weights.tensor("e.weight", "I32", {1, 4}, std::string(16, '\0'));
  const auto checkpoint = folder.open();
  const auto error = [&](const std::string& name, int rows, int cols) {
    return error_of([&] { (void)checkpoint->matrix(name, rows, cols); });
  };
  EXPECT_MENTIONS(error("a.weight", 1, 32), "\"a.scales\": expected shape [1, 1], found no such tensor");
  EXPECT_MENTIONS(error("b.weight", 1, 32), "\"b.biases\": expected shape [1, 1], found no such tensor");
  EXPECT_MENTIONS(error("b.weight", 1, 512), "\"b.weight\": expected shape [1, 64], found [1, 4]");
  EXPECT_MENTIONS(error("c.weight", 1, 32), "\"c.biases\" is F16, expected F32");
  EXPECT_MENTIONS(error("d.weight", 1, 4), "\"d.weight\" is F32, expected U32");
  EXPECT_MENTIONS(error("e.weight", 1, 4), "\"e.weight\" is I32, supported are F32, F16, BF16");
  EXPECT_MENTIONS(error("f.weight", 1, 4), "\"f.weight\": expected shape [1, 4], found no such tensor");
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->vector("model.norm.weight", 3); }), "expected shape [3], found [2]");
}

TEST(CheckpointFolder, PackedWeightsNeedAQuantizationInTheConfig) {
  Folder folder;
  add_quantized(folder.weights(), "a", 1, 32, 4, 32);
  const auto checkpoint = folder.open();
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->matrix("a.weight", 1, 32); }),
                  "config.json says that it is not quantized");
}

TEST(CheckpointFolder, Shards) {
  Folder folder;
  SafeTensorsWriter one;
  SafeTensorsWriter two;
  one.tensor("a", "F32", {1}, test::bytes_of({1}));
  two.tensor("b", "F32", {1}, test::bytes_of({2}));
  folder.write("model-1.safetensors", one.bytes());
  folder.write("model-2.safetensors", two.bytes());
  folder.write("model.safetensors.index.json",
               R"({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})");
  const auto checkpoint = folder.open_as_is();
  EXPECT_EQ(checkpoint->vector("a", 1).values.front(), 1.0F);
  EXPECT_EQ(checkpoint->vector("b", 1).values.front(), 2.0F);
  EXPECT_EQ(checkpoint->file_bytes(), one.bytes().size() + two.bytes().size());

  folder.write("model.safetensors.index.json",
               R"({"weight_map": {"a": "model-2.safetensors", "b": "model-2.safetensors"}})");
  EXPECT_MENTIONS(error_of([&] { (void)folder.open_as_is(); }), "\"a\": expected here by model.safetensors.index.json");
  folder.write("model.safetensors.index.json", R"({"weight_map": {"a": "../model-1.safetensors"}})");
  EXPECT_MENTIONS(error_of([&] { (void)folder.open_as_is(); }), "a file in the same folder");
  folder.write("model.safetensors.index.json", R"({"weight_map": {"a": "model-3.safetensors"}})");
  EXPECT_MENTIONS(error_of([&] { (void)folder.open_as_is(); }), "model-3.safetensors");
}

TEST(CheckpointFolder, RefusesDamagedSafetensors) {
  Folder folder;
  const auto error = [&](const std::string& bytes) {
    folder.write("model.safetensors", bytes);
    return error_of([&] { (void)folder.open_as_is(); });
  };
  const std::string good = folder.weights().bytes();
  EXPECT_MENTIONS(error("1234567"), "at least 8 bytes");
  EXPECT_MENTIONS(error(good.substr(0, 20)), "truncated");
  EXPECT_MENTIONS(error(good.substr(0, good.size() - 1)), "\"model.norm.weight\": expected its data up to byte 8");
  const auto header = [&](const std::string& text) { return error(folder.weights().with_header(text)); };
  EXPECT_MENTIONS(header("[]"), "not a JSON object");
  EXPECT_MENTIONS(header("{"), "not valid JSON");
  EXPECT_MENTIONS(header(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})"),
                  "needs 12 bytes, found 8");
  EXPECT_MENTIONS(header(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}})"), "[begin, end]");
  EXPECT_MENTIONS(header(R"({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}})"), "\"F4\" is not known");
  EXPECT_MENTIONS(header(R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 8]}})"),
                  "no tensor can have shape");
  EXPECT_MENTIONS(header(R"({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}})"), "non-negative");
  EXPECT_MENTIONS(header(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                             "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})"),
                  "\"a\" occurs twice");
}

}  // namespace
}  // namespace galley::models
