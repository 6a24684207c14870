#include "models/gguf_checkpoint.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "models/checkpoint_numbers.h"
#include "models/checkpoint_shapes.h"
#include "models/gguf.h"
#include "models/gguf_matrix.h"
#include "models/gguf_metadata.h"
#include "models/gguf_names.h"
#include "ops/error.h"

namespace galley::models {
namespace {

struct Entry {
  const GgufTensor* tensor;
  bool permuted;
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
      if (tensor.shape.size() < 2) continue;
      std::size_t blocks = tensor.shape.back() / tensor.type->block;
      for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) blocks *= tensor.shape[i];
      bytes[tensor.type->name] += blocks * tensor.type->block_bytes;
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
    return make_gguf_matrix(*entry.tensor, name, entry.permuted ? config_.head_dim : 0);
  }

  [[nodiscard]] std::unique_ptr<ops::MatrixSource> stacked(const std::string& name, int count, int rows,
                                                           int cols) const override {
    const std::array shape{static_cast<std::uint64_t>(count), static_cast<std::uint64_t>(rows),
                           static_cast<std::uint64_t>(cols)};
    (void)find(name, shape);
    return make_gguf_matrix(flat_.at(name), name, 0);
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
      values[static_cast<std::size_t>(row)] = stored[static_cast<std::size_t>(gguf_stored_row(row, config_.head_dim))];
    }
    return {name, std::move(values), type.type};
  }

 private:
  /// Gives every tensor its canonical name. One that the family does not know would be silently ignored: refused.
  void name_tensors() {
    const auto canonical = gguf_tensor_names(config_);
    for (const GgufTensor& tensor : file_.tensors()) {
      if (tensor.name == "rope_freqs.weight") continue;  // gguf_config has read it
      const auto known = canonical.find(tensor.name);
      if (known == canonical.end()) {
        throw ModelError(path().string() + ": tensor \"" + tensor.name + "\" of shape " + shape_text(tensor.shape) +
                         " is not part of a " + config_.family + " model of " + std::to_string(config_.layers) +
                         " layers");
      }
      entries_.emplace(known->second.canonical, Entry{&tensor, known->second.permuted});
      if (tensor.shape.size() == 3) {
        GgufTensor& flat = flat_.emplace(known->second.canonical, tensor).first->second;
        flat.shape = {tensor.shape[0] * tensor.shape[1], tensor.shape[2]};
      }
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
  std::map<std::string, Entry> entries_;    // by canonical name
  std::map<std::string, GgufTensor> flat_;  // those of three dimensions as matrices, by canonical name
};

}  // namespace

std::unique_ptr<Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path) {
  return std::make_unique<GgufCheckpoint>(path);
}

}  // namespace galley::models
