// What the loaders read for each family beside llama: configs of folders, and GGUF architectures with their tensor
// names.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "checkpoint_files.h"
#include "models/checkpoint.h"
#include "models/stacked_matrix.h"
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

std::unique_ptr<Checkpoint> open_folder(const TempFolder& folder, const std::string& keys) {
  folder.write("config.json", R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 8, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, )" +
                                  keys + "}");
  folder.write("tokenizer.json", R"({"version": "1.0", "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  SafeTensorsWriter weights;
  weights.tensor("model.norm.weight", "F32", {2}, test::bytes_of({1, 2}));
  folder.write("model.safetensors", weights.bytes());
  return open_checkpoint(folder.path());
}

Config config_of(const std::string& keys) {
  const TempFolder folder;
  return open_folder(folder, keys)->config();
}

std::string config_error(const std::string& keys) {
  return error_of([&] { (void)config_of(keys); });
}

TEST(FamilyConfig, Qwen2) {
  const Config config = config_of(R"("model_type": "qwen2", "use_sliding_window": false, "sliding_window": 131072,
    "max_window_layers": 21, "tie_word_embeddings": true)");
  EXPECT_EQ(config.family, "qwen2");
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rope_base, 1e6F);  // where the file names none
  EXPECT_TRUE(config.tied_head);
  EXPECT_EQ(config_of(R"("model_type": "qwen2", "rope_theta": 5e5)").rope_base, 5e5F);
  EXPECT_MENTIONS(config_error(R"("model_type": "qwen2", "use_sliding_window": true)"), "use_sliding_window");
}

TEST(FamilyConfig, Qwen3) {
  const Config config =
      config_of(R"("model_type": "qwen3", "head_dim": 128, "attention_bias": false, "rope_theta": 1000000)");
  EXPECT_EQ(config.family, "qwen3");
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.rope_base, 1e6F);
  EXPECT_EQ(config.experts.count, 0);
  EXPECT_EQ(
      config_of(R"("model_type": "qwen3", "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"})").rope_base,
      7.0F);
  EXPECT_MENTIONS(config_error(R"("model_type": "qwen3")"), "\"rope_theta\" is missing");
  EXPECT_MENTIONS(config_error(R"("model_type": "qwen3", "rope_theta": 1, "attention_bias": true)"), "attention_bias");
  EXPECT_MENTIONS(
      config_error(R"("model_type": "qwen3", "rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4})"),
      "\"yarn\" is not supported");
}

TEST(FamilyConfig, Qwen3Moe) {
  const std::string moe = R"("model_type": "qwen3_moe", "rope_theta": 1e6, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true, "decoder_sparse_step": 2)";
  const Config config = config_of(moe + R"(, "mlp_only_layers": [1])");
  EXPECT_EQ(config.family, "qwen3_moe");
  EXPECT_EQ(config.experts.count, 8);
  EXPECT_EQ(config.experts.per_token, 2);
  EXPECT_EQ(config.experts.intermediate, 32);
  EXPECT_EQ(config.experts.step, 2);
  EXPECT_TRUE(config.experts.normalized);
  EXPECT_EQ(config.experts.dense_layers, std::vector<int>{1});
  EXPECT_MENTIONS(config_error(moe + R"(, "mlp_only_layers": [2])"), "mlp_only_layers");
  EXPECT_MENTIONS(config_error(moe + R"(, "num_experts_per_tok": 9)"), "9 experts a token are more than the 8");
  EXPECT_MENTIONS(config_error(moe + R"(, "decoder_sparse_step": 0)"), "must be positive");
  EXPECT_MENTIONS(config_error(moe + R"(, "rope_scaling": {"type": "linear", "factor": 4})"), "with experts");
  EXPECT_MENTIONS(config_error(R"("model_type": "qwen3_moe", "rope_theta": 1e6)"), "\"num_experts\" is missing");
}

// ---- experts

/// The numbers from `first` on.
std::string counted(float first, int n) {
  std::vector<float> values;
  for (int i = 0; i < n; ++i) values.push_back(first + static_cast<float>(i));
  return test::bytes_of(values);
}

class ExpertFolder {
 public:
  SafeTensorsWriter weights;
  std::unique_ptr<Checkpoint> open(const std::string& more = {}) {
    auto checkpoint = open_folder(folder_, R"("model_type": "llama")" + more);  // writes the files
    folder_.write("model.safetensors", weights.bytes());
    return open_checkpoint(folder_.path());
  }

 private:
  TempFolder folder_;
};

TEST(FolderExperts, AStackIsOneMatrix) {
  ExpertFolder folder;
  folder.weights.tensor("w.weight", "F32", {3, 2, 4}, counted(0, 24));
  const auto checkpoint = folder.open();
  const auto matrix = checkpoint->stacked("w.weight", 3, 2, 4);
  EXPECT_EQ(matrix->rows(), 6);
  EXPECT_EQ(matrix->cols(), 4);
  std::vector<float> row(4);
  matrix->values(5, row);
  EXPECT_EQ(row, (std::vector<float>{20, 21, 22, 23}));
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->stacked("w.weight", 2, 3, 4); }),
                  "\"w.weight\": expected shape [2, 3, 4], found [3, 2, 4]");
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->matrix("w.weight", 6, 4); }), "expected shape [6, 4]");
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->stacked("v.weight", 3, 2, 4); }), "no such tensor");
}

TEST(FolderExperts, AQuantizedStackIsOneMatrix) {
  ExpertFolder folder;
  // Codes of 8 bits, 32 a row: expert e, row r begins with 16 e + 4 r.
  std::string codes;
  for (int e = 0; e < 2; ++e) {
    for (int r = 0; r < 3; ++r) {
      for (int c = 0; c < 32; ++c) codes += static_cast<char>(16 * e + 4 * r + c);
    }
  }
  folder.weights.tensor("w.weight", "U32", {2, 3, 8}, codes);
  folder.weights.tensor("w.scales", "F32", {2, 3, 1}, counted(1, 6));
  folder.weights.tensor("w.biases", "F32", {2, 3, 1}, counted(-6, 6));
  const auto checkpoint = folder.open(R"(, "quantization": {"bits": 8, "group_size": 32})");
  const auto matrix = checkpoint->stacked("w.weight", 2, 3, 32);
  EXPECT_EQ(matrix->affine().bits, 8);
  std::vector<float> row(32);
  matrix->values(4, row);  // expert 1, row 1: scale 5, bias -2
  EXPECT_EQ(row[0], 5.0F * 20 - 2);
  EXPECT_EQ(row[31], 5.0F * 51 - 2);
  EXPECT_MENTIONS(error_of([&] { (void)checkpoint->stacked("w.weight", 2, 4, 32); }), "expected shape [2, 4, 8]");
}

TEST(FolderExperts, OneByOneTheyAreTheSameMatrix) {
  ExpertFolder folder;
  folder.weights.tensor("a.weight", "F32", {2, 4}, counted(0, 8));
  folder.weights.tensor("b.weight", "F32", {2, 4}, counted(8, 8));
  folder.weights.tensor("c.weight", "BF16", {2, 4}, std::string(16, '\0'));
  const auto checkpoint = folder.open();
  const auto stack = [&](const char* second) {
    std::vector<std::unique_ptr<ops::MatrixSource>> parts;
    parts.push_back(checkpoint->matrix("a.weight", 2, 4));
    parts.push_back(checkpoint->matrix(second, 2, 4));
    return stack_matrices("file", std::move(parts));
  };
  const auto matrix = stack("b.weight");
  EXPECT_EQ(matrix->rows(), 4);
  std::vector<float> row(4);
  matrix->values(2, row);
  EXPECT_EQ(row, (std::vector<float>{8, 9, 10, 11}));
  EXPECT_MENTIONS(error_of([&] { (void)stack("c.weight"); }),
                  "\"c.weight\" is stored in another way than \"a.weight\"");
}

// ---- GGUF

/// One layer, hidden 32, two heads of `head_dim`, one key/value head, intermediate 64, vocabulary 4, tied head. Plain
/// f32: element (row, column) of every matrix is 100 * row + column, of a vector its index.
GgufWriter gguf_of(const std::string& architecture, std::uint64_t head_dim) {
  GgufWriter out;
  const auto key = [&](const char* name) { return architecture + "." + name; };
  out.string("general.architecture", architecture);
  out.integer(key("block_count"), 1);
  out.integer(key("context_length"), 64);
  out.integer(key("embedding_length"), 32);
  out.integer(key("feed_forward_length"), 64);
  out.integer(key("attention.head_count"), 2);
  out.integer(key("attention.head_count_kv"), 1);
  out.integer(key("attention.key_length"), static_cast<std::uint32_t>(head_dim));
  out.integer(key("attention.value_length"), static_cast<std::uint32_t>(head_dim));
  out.number(key("attention.layer_norm_rms_epsilon"), 1e-6F);
  out.number(key("rope.freq_base"), 1e6F);
  out.string("tokenizer.ggml.model", "gpt2");
  out.string("tokenizer.ggml.pre", "qwen2");
  out.strings("tokenizer.ggml.tokens", {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"});
  out.integers("tokenizer.ggml.token_type", {3, 3, 3, 1});
  out.strings("tokenizer.ggml.merges", {});
  out.integer("tokenizer.ggml.eos_token_id", 2);
  const auto matrix = [&](const std::string& name, std::uint64_t rows, std::uint64_t cols) {
    std::vector<float> values;
    for (std::uint64_t row = 0; row < rows; ++row) {
      for (std::uint64_t col = 0; col < cols; ++col) values.push_back(static_cast<float>(100 * row + col));
    }
    out.tensor(name, {rows, cols}, 0, test::bytes_of(values));
  };
  const auto vector = [&](const std::string& name, std::uint64_t size) {
    std::vector<float> values;
    for (std::uint64_t i = 0; i < size; ++i) values.push_back(static_cast<float>(i));
    out.tensor(name, {size}, 0, test::bytes_of(values));
  };
  matrix("token_embd.weight", 4, 32);
  vector("output_norm.weight", 32);
  vector("blk.0.attn_norm.weight", 32);
  matrix("blk.0.attn_q.weight", 2 * head_dim, 32);
  matrix("blk.0.attn_k.weight", head_dim, 32);
  matrix("blk.0.attn_v.weight", head_dim, 32);
  matrix("blk.0.attn_output.weight", 32, 2 * head_dim);
  vector("blk.0.ffn_norm.weight", 32);
  matrix("blk.0.ffn_gate.weight", 64, 32);
  matrix("blk.0.ffn_up.weight", 64, 32);
  matrix("blk.0.ffn_down.weight", 32, 64);
  if (architecture == "qwen2") {
    vector("blk.0.attn_q.bias", 2 * head_dim);
    vector("blk.0.attn_k.bias", head_dim);
    vector("blk.0.attn_v.bias", head_dim);
  } else if (architecture == "qwen3") {
    vector("blk.0.attn_q_norm.weight", head_dim);
    vector("blk.0.attn_k_norm.weight", head_dim);
  }
  return out;
}

std::string gguf_error(const GgufWriter& file) {
  const TempFolder folder;
  return error_of([&] { (void)open_checkpoint(folder.write("model.gguf", file.bytes())); });
}

/// First element of every row.
std::vector<float> first_column(const ops::MatrixSource& matrix) {
  std::vector<float> row(static_cast<std::size_t>(matrix.cols()));
  std::vector<float> out;
  for (int r = 0; r < matrix.rows(); ++r) {
    matrix.values(r, row);
    out.push_back(row.front());
  }
  return out;
}

std::vector<float> counting(int n, float step) {
  std::vector<float> out;
  for (int i = 0; i < n; ++i) out.push_back(static_cast<float>(i) * step);
  return out;
}

TEST(FamilyGguf, Qwen2HasBiasesAndRowsInTheirPlace) {
  const TempFolder folder;
  const auto checkpoint = open_checkpoint(folder.write("model.gguf", gguf_of("qwen2", 16).bytes()));
  const Config& config = checkpoint->config();
  EXPECT_EQ(config.family, "qwen2");
  EXPECT_EQ(config.hidden, 32);
  EXPECT_EQ(config.intermediate, 64);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.norm_eps, 1e-6F);
  EXPECT_EQ(config.rope_base, 1e6F);
  EXPECT_TRUE(config.tied_head);
  EXPECT_FALSE(checkpoint->assets().add_bos);
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_EQ(first_column(*checkpoint->matrix(attention + "q_proj.weight", 32, 32)), counting(32, 100));
  EXPECT_EQ(first_column(*checkpoint->matrix(attention + "k_proj.weight", 16, 32)), counting(16, 100));
  EXPECT_EQ(checkpoint->vector(attention + "q_proj.bias", 32).values, counting(32, 1));
  EXPECT_EQ(checkpoint->vector(attention + "k_proj.bias", 16).values, counting(16, 1));
  EXPECT_EQ(checkpoint->vector(attention + "v_proj.bias", 16).values, counting(16, 1));
  EXPECT_FALSE(checkpoint->has(attention + "o_proj.bias"));
}

TEST(FamilyGguf, Qwen3HasHeadNormsAndRowsInTheirPlace) {
  const TempFolder folder;
  const auto checkpoint = open_checkpoint(folder.write("model.gguf", gguf_of("qwen3", 48).bytes()));
  EXPECT_EQ(checkpoint->config().family, "qwen3");
  EXPECT_EQ(checkpoint->config().head_dim, 48);
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_EQ(first_column(*checkpoint->matrix(attention + "q_proj.weight", 96, 32)), counting(96, 100));
  EXPECT_EQ(checkpoint->vector(attention + "q_norm.weight", 48).values, counting(48, 1));
  EXPECT_EQ(checkpoint->vector(attention + "k_norm.weight", 48).values, counting(48, 1));
  EXPECT_EQ(checkpoint->matrix(attention + "o_proj.weight", 32, 96)->cols(), 96);
}

TEST(FamilyGguf, RefusesWhatTheFamilyDoesNotHave) {
  const std::string zeros(128, '\0');
  auto file = gguf_of("qwen2", 16);
  file.tensor("blk.0.attn_output.bias", {32}, 0, zeros);
  EXPECT_MENTIONS(gguf_error(file),
                  "\"blk.0.attn_output.bias\" of shape [32] is not part of a qwen2 model of 1 layers");
  file = gguf_of("qwen3", 16);
  file.tensor("blk.0.attn_q.bias", {32}, 0, zeros);
  EXPECT_MENTIONS(gguf_error(file), "not part of a qwen3 model");
  file = gguf_of("qwen2", 16);
  file.tensor("blk.0.attn_q_norm.weight", {16}, 0, zeros.substr(64));
  EXPECT_MENTIONS(gguf_error(file), "not part of a qwen2 model");
  file = gguf_of("qwen2", 16);
  file.integer("qwen2.attention.sliding_window", 4096);
  EXPECT_MENTIONS(gguf_error(file), "\"qwen2.attention.sliding_window\" is 4096");
  file = gguf_of("qwen3", 16);
  file.integer("qwen3.expert_count", 8);
  EXPECT_MENTIONS(gguf_error(file), "\"qwen3.expert_count\" is 8");
  EXPECT_MENTIONS(gguf_error(gguf_of("qwen3moe", 16)), "\"qwen3moe.expert_count\" is missing");
  file = gguf_of("qwen3", 16);
  file.string("qwen3.rope.scaling.type", "yarn");
  EXPECT_MENTIONS(gguf_error(file), "\"qwen3.rope.scaling.type\" is \"yarn\"");
  EXPECT_MENTIONS(gguf_error(gguf_of("bert", 16)), "architecture \"bert\" is not supported; supported are ");
}

}  // namespace
}  // namespace galley::models
