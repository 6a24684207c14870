// Small checkpoints, written byte by byte so that tests can also write wrong ones.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "temporary_folder.h"

namespace galley::models::test {

/// In memory where the system offers that: damaged files are written by the thousand.
class TempFolder : public galley::testing::TemporaryFolder {
 public:
  TempFolder()
      : TemporaryFolder(std::filesystem::is_directory("/dev/shm") ? "/dev/shm"
                                                                  : std::filesystem::temp_directory_path()) {}

  std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    const auto file = path() / name;
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }
};

template <typename T>
void append(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

inline std::string bytes_of(const std::vector<float>& values) {
  std::string out;
  for (const float value : values) append(out, value);
  return out;
}

inline std::string halves_of(const std::vector<std::uint16_t>& values) {
  std::string out;
  for (const std::uint16_t value : values) append(out, value);
  return out;
}

/// GGUF v3; values are added in the order of calls.
class GgufWriter {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;

  void integer(const std::string& key, std::uint32_t value) {
    begin(key, 4);
    append(values_, value);
  }
  void number(const std::string& key, float value) {
    begin(key, 6);
    append(values_, value);
  }
  void boolean(const std::string& key, bool value) {
    begin(key, 7);
    append(values_, static_cast<std::uint8_t>(value));
  }
  void string(const std::string& key, const std::string& value) {
    begin(key, 8);
    text(values_, value);
  }
  void strings(const std::string& key, const std::vector<std::string>& list) {
    begin(key, 9);
    append(values_, std::uint32_t{8});
    append(values_, static_cast<std::uint64_t>(list.size()));
    for (const auto& value : list) text(values_, value);
  }
  void integers(const std::string& key, const std::vector<std::int32_t>& list) {
    begin(key, 9);
    append(values_, std::uint32_t{5});
    append(values_, static_cast<std::uint64_t>(list.size()));
    for (const auto value : list) append(values_, value);
  }
  void booleans(const std::string& key, const std::vector<bool>& list) {
    begin(key, 9);
    append(values_, std::uint32_t{7});
    append(values_, static_cast<std::uint64_t>(list.size()));
    for (const bool value : list) append(values_, static_cast<std::uint8_t>(value));
  }
  /// `shape`: outermost dimension first.
  void tensor(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
              const std::string& data) {
    tensor_at(name, shape, type, data_.size());
    data_ += data;
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
  }
  void tensor_at(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
                 std::uint64_t offset) {
    text(tensors_, name);
    append(tensors_, static_cast<std::uint32_t>(shape.size()));
    for (auto size = shape.rbegin(); size != shape.rend(); ++size) append(tensors_, *size);
    append(tensors_, type);
    append(tensors_, offset);
    ++tensor_count_;
  }
  [[nodiscard]] std::string bytes() const {
    std::string out = "GGUF";
    append(out, version);
    append(out, tensor_count_);
    append(out, value_count_);
    out += values_ + tensors_;
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data_;
  }

 private:
  static void text(std::string& out, const std::string& value) {
    append(out, static_cast<std::uint64_t>(value.size()));
    out += value;
  }
  void begin(const std::string& key, std::uint32_t type) {
    text(values_, key);
    append(values_, type);
    ++value_count_;
  }

  std::string values_, tensors_, data_;
  std::uint64_t value_count_ = 0, tensor_count_ = 0;
};

/// What a test changes of the small llama below.
struct SmallGguf {
  std::string architecture = "llama";
  std::string skip;          ///< a metadata key or tensor to leave out
  std::uint32_t q_type = 0;  ///< type and data of blk.0.attn_q.weight [32, 32]
  std::string q_data;        ///< empty: element (row, column) of a plain f32 matrix is 100 * row + column
  std::uint32_t intermediate = 32;
  std::uint32_t down_type = 0;  ///< the same for blk.0.ffn_down.weight [32, intermediate]
  std::string down_data;
  std::string chat_template = "{{ messages }}<|im_end|>";
  bool tensors = true;  ///< false: metadata alone
};

/// One layer, hidden 32, two heads of 16, one key/value head, vocabulary 4, tied head. Plain f32:
/// element (row, column) of every matrix is 100 * row + column, of a vector its index.
inline GgufWriter small_gguf(const SmallGguf& options = {}) {
  GgufWriter out;
  const auto wanted = [&](const std::string& key) { return key != options.skip; };
  const auto integer = [&](const std::string& key, std::uint32_t value) {
    if (wanted(key)) out.integer(key, value);
  };
  out.string("general.architecture", options.architecture);
  out.string("general.name", "small");
  integer("llama.block_count", 1);
  integer("llama.context_length", 64);
  integer("llama.embedding_length", 32);
  integer("llama.feed_forward_length", options.intermediate);
  integer("llama.attention.head_count", 2);
  integer("llama.attention.head_count_kv", 1);
  if (wanted("llama.attention.layer_norm_rms_epsilon")) out.number("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  out.string("tokenizer.ggml.model", "gpt2");
  out.string("tokenizer.ggml.pre", "smollm");
  if (wanted("tokenizer.ggml.tokens")) {
    out.strings("tokenizer.ggml.tokens", {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"});
  }
  out.integers("tokenizer.ggml.token_type", {3, 3, 3, 1});
  out.strings("tokenizer.ggml.merges", {});
  integer("tokenizer.ggml.bos_token_id", 1);
  integer("tokenizer.ggml.eos_token_id", 0);
  if (!options.chat_template.empty()) out.string("tokenizer.chat_template", options.chat_template);

  const auto matrix = [&](const std::string& name, std::uint64_t rows, std::uint64_t cols) {
    if (!wanted(name) || !options.tensors) return;
    std::vector<float> values;
    for (std::uint64_t row = 0; row < rows; ++row) {
      for (std::uint64_t col = 0; col < cols; ++col) values.push_back(static_cast<float>(100 * row + col));
    }
    out.tensor(name, {rows, cols}, 0, bytes_of(values));
  };
  const auto vector = [&](const std::string& name, std::uint64_t size) {
    std::vector<float> values;
    for (std::uint64_t i = 0; i < size; ++i) values.push_back(static_cast<float>(i));
    if (wanted(name) && options.tensors) out.tensor(name, {size}, 0, bytes_of(values));
  };
  matrix("token_embd.weight", 4, 32);
  vector("output_norm.weight", 32);
  vector("blk.0.attn_norm.weight", 32);
  if (options.q_data.empty()) {
    matrix("blk.0.attn_q.weight", 32, 32);
  } else {
    out.tensor("blk.0.attn_q.weight", {32, 32}, options.q_type, options.q_data);
  }
  matrix("blk.0.attn_k.weight", 16, 32);
  matrix("blk.0.attn_v.weight", 16, 32);
  matrix("blk.0.attn_output.weight", 32, 32);
  vector("blk.0.ffn_norm.weight", 32);
  matrix("blk.0.ffn_gate.weight", options.intermediate, 32);
  matrix("blk.0.ffn_up.weight", options.intermediate, 32);
  if (options.down_data.empty()) {
    matrix("blk.0.ffn_down.weight", 32, options.intermediate);
  } else {
    out.tensor("blk.0.ffn_down.weight", {32, options.intermediate}, options.down_type, options.down_data);
  }
  return out;
}

/// One safetensors file.
class SafeTensorsWriter {
 public:
  void tensor(const std::string& name, const std::string& dtype, const std::vector<std::uint64_t>& shape,
              const std::string& data) {
    std::string sizes;
    for (const auto size : shape) {
      if (!sizes.empty()) sizes += ',';
      sizes += std::to_string(size);
    }
    header_ += (header_.empty() ? "{\"" : ",\"") + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + sizes +
               R"(],"data_offsets":[)" + std::to_string(data_.size()) + "," +
               std::to_string(data_.size() + data.size()) + "]}";
    data_ += data;
  }
  [[nodiscard]] std::string bytes() const { return with_header(header_.empty() ? "{}" : header_ + "}"); }
  /// The same data under another header.
  [[nodiscard]] std::string with_header(const std::string& header) const {
    std::string out;
    append(out, static_cast<std::uint64_t>(header.size()));
    return out + header + data_;
  }

 private:
  std::string header_, data_;
};

}  // namespace galley::models::test
