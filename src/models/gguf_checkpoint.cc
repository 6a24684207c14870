#include "models/gguf_checkpoint.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "models/checkpoint_numbers.h"
#include "models/checkpoint_shapes.h"
#include "models/gguf.h"
#include "models/gguf_metadata.h"
#include "ops/error.h"

namespace galley::models {
namespace {

/// Where a row of a query or key projection lies in the file. Hugging Face pairs element i of a head with element
/// i + head_dim/2 for rotation; GGUF files of the llama architecture have such pairs side by side.
int stored_row(int row, int head_dim) {
  if (head_dim == 0) return row;
  const int within = row % head_dim;
  const int half = head_dim / 2;
  return row - within + 2 * (within % half) + within / half;
}

class GgufMatrix final : public ops::MatrixSource {
 public:
  /// `head_dim`: of a projection whose rows are permuted, else 0.
  GgufMatrix(const GgufTensor& tensor, std::string name, int head_dim)
      : tensor_(tensor),
        name_(std::move(name)),
        rows_(static_cast<int>(tensor.shape[0])),
        cols_(static_cast<int>(tensor.shape[1])),
        head_dim_(head_dim),
        blocks_(tensor.shape[1] / tensor.type->block) {}

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] int rows() const override { return rows_; }
  [[nodiscard]] int cols() const override { return cols_; }
  [[nodiscard]] bool quantized() const override { return tensor_.type->quantized(); }
  [[nodiscard]] ops::AffineFormat affine() const override { return tensor_.type->affine; }
  [[nodiscard]] ops::ElementType type() const override { return tensor_.type->type; }

  void codes(int row, std::span<std::uint8_t> out) const override {
    require(quantized() && out.size() == tensor_.shape[1], "codes");
    tensor_.type->codes(row_bytes(row), blocks_, out.data());
  }

  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    require(quantized() && scale.size() == groups() && bias.size() == groups(), "scales");
    tensor_.type->scales(row_bytes(row), blocks_, scale.data(), bias.data());
  }

  void values(int row, std::span<float> out) const override {
    require(out.size() == tensor_.shape[1], "values");
    if (!quantized()) {
      widen(tensor_.type->type, row_bytes(row), out);
      return;
    }
    std::vector<std::uint8_t> code(out.size());
    std::vector<float> scale(groups());
    std::vector<float> bias(groups());
    codes(row, code);
    scales(row, scale, bias);
    expand_affine(code, scale, bias, out);
  }

 private:
  void require(bool holds, const char* what) const {
    if (!holds) throw Error(500, "tensor \"" + name_ + "\": " + what + "() asked with the wrong sizes or type");
  }
  [[nodiscard]] std::size_t groups() const {
    return tensor_.shape[1] / static_cast<std::size_t>(tensor_.type->affine.group);
  }
  [[nodiscard]] const std::byte* row_bytes(int row) const {
    require(row >= 0 && row < rows_, "a row");
    return tensor_.data + static_cast<std::size_t>(stored_row(row, head_dim_)) * blocks_ * tensor_.type->block_bytes;
  }

  const GgufTensor& tensor_;
  std::string name_;
  int rows_, cols_, head_dim_;
  std::size_t blocks_;  // in a row
};

struct Entry {
  const GgufTensor* tensor;
  bool permuted;
};

struct LayerName {
  const char* gguf;
  const char* canonical;
  bool permuted;
};
constexpr std::array layer_names{
    LayerName{"attn_norm", "input_layernorm", false},    LayerName{"attn_q", "self_attn.q_proj", true},
    LayerName{"attn_k", "self_attn.k_proj", true},       LayerName{"attn_v", "self_attn.v_proj", false},
    LayerName{"attn_output", "self_attn.o_proj", false}, LayerName{"ffn_norm", "post_attention_layernorm", false},
    LayerName{"ffn_gate", "mlp.gate_proj", false},       LayerName{"ffn_up", "mlp.up_proj", false},
    LayerName{"ffn_down", "mlp.down_proj", false},
};

class GgufCheckpoint final : public Checkpoint {
 public:
  explicit GgufCheckpoint(const std::filesystem::path& path)
      : file_(path), config_(gguf_config(file_)), assets_(gguf_assets(file_, config_.vocab)) {
    name_tensors();
  }

  [[nodiscard]] const Config& config() const override { return config_; }
  [[nodiscard]] const text::Assets& assets() const override { return assets_; }
  [[nodiscard]] std::filesystem::path path() const override { return file_.path(); }
  [[nodiscard]] std::size_t file_bytes() const override { return file_.size(); }
  [[nodiscard]] bool has(const std::string& tensor) const override { return entries_.contains(tensor); }
  void release_pages() const override { file_.release_pages(); }

  [[nodiscard]] std::string format() const override {
    std::map<std::string, std::size_t> bytes;  // of the matrices, by type
    for (const GgufTensor& tensor : file_.tensors()) {
      if (tensor.shape.size() != 2) continue;
      bytes[tensor.type->name] += tensor.shape[0] * (tensor.shape[1] / tensor.type->block) * tensor.type->block_bytes;
    }
    std::vector<std::pair<std::string, std::size_t>> types(bytes.begin(), bytes.end());
    std::ranges::sort(types, std::ranges::greater{}, &std::pair<std::string, std::size_t>::second);
    std::string text = "GGUF v" + std::to_string(file_.version());
    for (std::size_t i = 0; i < types.size(); ++i) text += (i == 0 ? ", " : " + ") + types[i].first;
    return text;
  }

  [[nodiscard]] std::unique_ptr<ops::MatrixSource> matrix(const std::string& name, int rows, int cols) const override {
    const std::array<std::uint64_t, 2> shape{static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols)};
    const Entry& entry = find(name, shape);
    return std::make_unique<GgufMatrix>(*entry.tensor, name, entry.permuted ? config_.head_dim : 0);
  }

  [[nodiscard]] ops::VectorSource vector(const std::string& name, int size) const override {
    const std::array<std::uint64_t, 1> shape{static_cast<std::uint64_t>(size)};
    const Entry& entry = find(name, shape);
    const GgufType& type = *entry.tensor->type;
    if (type.quantized()) {
      throw ModelError(path().string() + ": tensor \"" + entry.tensor->name + "\" is " + type.name +
                       ", expected plain numbers");
    }
    std::vector<float> stored(shape[0]);
    widen(type.type, entry.tensor->data, stored);
    if (!entry.permuted) return {name, std::move(stored), type.type};
    std::vector<float> values(shape[0]);
    for (int row = 0; row < size; ++row) {
      values[static_cast<std::size_t>(row)] = stored[static_cast<std::size_t>(stored_row(row, config_.head_dim))];
    }
    return {name, std::move(values), type.type};
  }

 private:
  /// Gives every tensor its canonical name. One that the family does not know would be silently ignored: refused.
  void name_tensors() {
    std::map<std::string, std::pair<std::string, bool>> canonical{
        {"token_embd.weight", {"model.embed_tokens.weight", false}},
        {"output_norm.weight", {"model.norm.weight", false}},
        {"output.weight", {"lm_head.weight", false}},
    };
    for (int layer = 0; layer < config_.layers; ++layer) {
      const std::string block = "blk." + std::to_string(layer) + ".";
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      for (const LayerName& name : layer_names) {
        for (const char* part : {".weight", ".bias"}) {
          canonical[block + name.gguf + part] = {prefix + name.canonical + part, name.permuted};
        }
      }
    }
    for (const GgufTensor& tensor : file_.tensors()) {
      if (tensor.name == "rope_freqs.weight") continue;  // gguf_config has read it
      const auto known = canonical.find(tensor.name);
      if (known == canonical.end()) {
        throw ModelError(path().string() + ": tensor \"" + tensor.name + "\" of shape " + shape_text(tensor.shape) +
                         " is not part of a llama model of " + std::to_string(config_.layers) + " layers");
      }
      entries_.emplace(known->second.first, Entry{&tensor, known->second.second});
    }
  }

  [[nodiscard]] const Entry& find(const std::string& name, std::span<const std::uint64_t> shape) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) throw_missing_tensor(path(), name, shape);
    const GgufTensor& tensor = *found->second.tensor;
    require_shape(path(), tensor.name, shape, tensor.shape);
    if (found->second.permuted && shape[0] % static_cast<std::uint64_t>(config_.head_dim) != 0) {
      throw ModelError(path().string() + ": tensor \"" + tensor.name + "\" has " + std::to_string(shape[0]) +
                       " rows, expected a multiple of the head size, " + std::to_string(config_.head_dim));
    }
    return found->second;
  }

  GgufFile file_;
  Config config_;
  text::Assets assets_;
  std::map<std::string, Entry> entries_;  // by canonical name
};

}  // namespace

std::unique_ptr<Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path) {
  return std::make_unique<GgufCheckpoint>(path);
}

}  // namespace galley::models
