#include "models/folder_checkpoint.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "models/checkpoint_shapes.h"
#include "models/checkpoint_text.h"
#include "models/config_json.h"
#include "models/folder_assets.h"
#include "models/folder_matrix.h"
#include "models/safetensors.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using nlohmann::json;

std::optional<ops::ElementType> float_type(const std::string& dtype) {
  if (dtype == "F32") return ops::ElementType::f32;
  if (dtype == "F16") return ops::ElementType::f16;
  if (dtype == "BF16") return ops::ElementType::bf16;
  return std::nullopt;
}

/// A tensor and the shard it lies in.
struct Entry {
  const SafeTensor* tensor;
  const SafeTensorsFile* file;
};

/// The safetensors files of a folder as one set of names.
class Shards {
 public:
  explicit Shards(const std::filesystem::path& folder) {
    const auto index = folder / "model.safetensors.index.json";
    if (std::filesystem::exists(index)) {
      open_indexed(folder, index);
      return;
    }
    const auto single = folder / "model.safetensors";
    if (!std::filesystem::exists(single)) {
      throw ModelError(single.string() + ": the file is missing, and so is model.safetensors.index.json");
    }
    files_.reserve(1);
    const SafeTensorsFile& file = files_.emplace_back(single);
    for (const auto& [name, tensor] : file.tensors()) entries_.emplace(name, Entry{&tensor, &file});
  }

  [[nodiscard]] const Entry* find(const std::string& name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : &found->second;
  }
  [[nodiscard]] const std::vector<SafeTensorsFile>& files() const { return files_; }
  [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }

 private:
  void open_indexed(const std::filesystem::path& folder, const std::filesystem::path& index) {
    const json object = read_json_object(index);
    const auto map = object.find("weight_map");
    if (map == object.end() || !map->is_object()) {
      throw ModelError(index.string() + ": \"weight_map\" is missing or not an object");
    }
    std::set<std::string> names;
    for (const auto& [tensor, shard] : map->items()) {
      if (!shard.is_string() ||
          std::filesystem::path(shard.get<std::string>()).filename() != shard.get<std::string>()) {
        throw ModelError(index.string() + ": tensor \"" + tensor +
                         "\": expected the name of a file in the same folder");
      }
      names.insert(shard.get<std::string>());
    }
    std::map<std::string, const SafeTensorsFile*> by_name;
    files_.reserve(names.size());  // entries point into it
    for (const std::string& name : names) by_name[name] = &files_.emplace_back(folder / name);
    for (const auto& [tensor, shard] : map->items()) {
      const SafeTensorsFile& file = *by_name.at(shard.get<std::string>());
      const auto found = file.tensors().find(tensor);
      if (found == file.tensors().end()) {
        throw ModelError(file.path().string() + ": tensor \"" + tensor + "\": expected here by " +
                         index.filename().string() + ", found no such tensor");
      }
      entries_.emplace(tensor, Entry{&found->second, &file});
    }
  }

  std::vector<SafeTensorsFile> files_;
  std::map<std::string, Entry> entries_;
};

class FolderCheckpoint final : public Checkpoint {
 public:
  explicit FolderCheckpoint(const std::filesystem::path& folder)
      : FolderCheckpoint(folder, read_json_object(folder / "config.json")) {}

  [[nodiscard]] const Config& config() const override { return config_; }
  [[nodiscard]] const text::Assets& assets() const override { return assets_; }
  [[nodiscard]] GenerationConfig generation_config() const override {
    return read_generation_config(folder_ / "generation_config.json");
  }
  [[nodiscard]] std::filesystem::path path() const override { return folder_; }
  [[nodiscard]] bool has(const std::string& tensor) const override { return shards_.find(stored(tensor)) != nullptr; }

  [[nodiscard]] std::size_t file_bytes() const override {
    std::size_t bytes = 0;
    for (const SafeTensorsFile& file : shards_.files()) bytes += file.size();
    return bytes;
  }

  void release_pages() const override {
    for (const SafeTensorsFile& file : shards_.files()) file.release_pages();
  }

  [[nodiscard]] std::string format() const override {
    if (quantization_.standard) {
      const bool mixed = std::ranges::any_of(quantization_.overrides, [&](const auto& entry) {
        return !entry.second || entry.second->bits != quantization_.standard->bits ||
               entry.second->group != quantization_.standard->group;
      });
      return "MLX " + std::to_string(quantization_.standard->bits) + "-bit, groups of " +
             std::to_string(quantization_.standard->group) + (mixed ? ", mixed" : "");
    }
    const Entry* const embedding = shards_.find(stored("model.embed_tokens.weight"));
    return "safetensors" + (embedding == nullptr ? std::string() : ", " + embedding->tensor->dtype);
  }

  [[nodiscard]] std::unique_ptr<ops::MatrixSource> matrix(const std::string& tensor, int rows,
                                                          int cols) const override {
    const std::array shape{static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols)};
    return matrix_of(stored(tensor), shape);
  }

  [[nodiscard]] std::unique_ptr<ops::MatrixSource> stacked(const std::string& tensor, int count, int rows,
                                                           int cols) const override {
    const std::array shape{static_cast<std::uint64_t>(count), static_cast<std::uint64_t>(rows),
                           static_cast<std::uint64_t>(cols)};
    return matrix_of(stored(tensor), shape);
  }

  [[nodiscard]] ops::VectorSource vector(const std::string& tensor, int size) const override {
    const std::string name = stored(tensor);
    const std::array<std::uint64_t, 1> shape{static_cast<std::uint64_t>(size)};
    const Entry& entry = find(name, shape);
    require_shape(entry.file->path(), name, shape, entry.tensor->shape);
    const ops::ElementType type = plain_type(entry, name);
    std::vector<float> values(shape[0]);
    widen(type, entry.tensor->data, values);
    return {name, std::move(values), type};
  }

 private:
  FolderCheckpoint(const std::filesystem::path& folder, const json& object)
      : folder_(folder),
        quantization_(folder_quantization(folder / "config.json", object)),
        shards_(folder),
        assets_(folder_assets(folder, object)) {
    const FolderConfig found = folder_config(folder / "config.json", object);
    config_ = found.config;
    prefix_ = found.tensor_prefix;
    inside_ =
        !prefix_.empty() && !has("model.norm.weight") && shards_.find("model.language_model.norm.weight") != nullptr;
    config_.tied_head = found.tied_head.value_or(!has("lm_head.weight"));
    check_config(folder / "config.json", config_);
  }

  [[nodiscard]] std::string stored(const std::string& canonical) const {
    if (!inside_) return prefix_ + canonical;
    return canonical.starts_with("model.") ? "model.language_model." + canonical.substr(6) : canonical;
  }

  /// "model.layers.0.mlp.up_proj" of "model.layers.0.mlp.up_proj.weight".
  static std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

  [[noreturn]] static void fail(const Entry& entry, const std::string& name, const std::string& what) {
    throw ModelError(entry.file->path().string() + ": tensor \"" + name + "\" " + what);
  }

  [[nodiscard]] const Entry& find(const std::string& name, std::span<const std::uint64_t> shape) const {
    const Entry* const entry = shards_.find(name);
    if (entry == nullptr) throw_missing_tensor(shards_.files().front().path(), name, shape);
    return *entry;
  }

  static ops::ElementType plain_type(const Entry& entry, const std::string& name) {
    const auto type = float_type(entry.tensor->dtype);
    if (!type) fail(entry, name, "is " + entry.tensor->dtype + ", supported are F32, F16, BF16");
    return *type;
  }

  /// The product of all dimensions but the last.
  static int rows_of(std::span<const std::uint64_t> shape) {
    std::uint64_t rows = 1;
    for (const std::uint64_t size : shape.first(shape.size() - 1)) rows *= size;
    return static_cast<int>(rows);
  }
  static std::vector<std::uint64_t> with_last(std::span<const std::uint64_t> shape, std::uint64_t last) {
    std::vector<std::uint64_t> out(shape.begin(), shape.end());
    out.back() = last;
    return out;
  }

  /// All dimensions but the last count as rows.
  [[nodiscard]] std::unique_ptr<ops::MatrixSource> matrix_of(const std::string& name,
                                                             std::span<const std::uint64_t> shape) const {
    const Entry& weight = find(name, shape);
    if (weight.tensor->dtype == "U32") return quantized_matrix(name, weight, shape);
    const std::string module = module_of(name);
    const auto listed = quantization_.overrides.find(module);
    if (shards_.find(module + ".scales") != nullptr ||
        (listed != quantization_.overrides.end() && listed->second.has_value())) {
      fail(weight, name,
           "is " + weight.tensor->dtype +
               ", expected U32, as config.json or its scales say that it is "
               "quantized");
    }
    require_shape(weight.file->path(), name, shape, weight.tensor->shape);
    return make_plain_matrix(name, rows_of(shape), static_cast<int>(shape.back()), plain_type(weight, name),
                             weight.tensor->data);
  }

  /// The shapes tell bits and group, as in mlx-lm: the config's values for the whole model need not hold for a module
  /// it doesn't list. For one that it lists they must.
  [[nodiscard]] ops::AffineFormat format_of(const std::string& name, const Entry& weight, const Entry& scales,
                                            std::span<const std::uint64_t> shape) const {
    const std::string module = module_of(name);
    const auto listed = quantization_.overrides.find(module);
    const bool by_name = listed != quantization_.overrides.end();
    if (!quantization_.standard || (by_name && !listed->second)) {
      fail(weight, name, "is packed U32, but config.json says that it is not quantized");
    }
    const ops::AffineFormat announced = by_name ? *listed->second : *quantization_.standard;
    const std::uint64_t c = shape.back();
    const auto fits = [&](const ops::AffineFormat& format) {
      const auto bits = static_cast<std::uint64_t>(format.bits);
      const auto group = static_cast<std::uint64_t>(format.group);
      return c % group == 0 && std::ranges::equal(weight.tensor->shape, with_last(shape, c * bits / 32)) &&
             std::ranges::equal(scales.tensor->shape, with_last(shape, c / group));
    };
    if (fits(announced)) return announced;
    if (!by_name) {
      for (const int bits : {2, 3, 4, 5, 6, 8}) {
        for (const int group : {32, 64, 128}) {
          if (fits({bits, group})) return {bits, group};
        }
      }
    }
    const auto bits = static_cast<std::uint64_t>(announced.bits);
    const auto group = static_cast<std::uint64_t>(announced.group);
    if (c % group != 0) {
      fail(weight, name,
           "has " + std::to_string(c) + " columns, expected a multiple of the group, " + std::to_string(group));
    }
    require_shape(weight.file->path(), name, with_last(shape, c * bits / 32), weight.tensor->shape);
    throw_shape_mismatch(scales.file->path(), module + ".scales", with_last(shape, c / group), scales.tensor->shape);
  }

  [[nodiscard]] std::unique_ptr<ops::MatrixSource> quantized_matrix(const std::string& name, const Entry& weight,
                                                                    std::span<const std::uint64_t> shape) const {
    const std::string module = module_of(name);
    const std::uint64_t c = shape.back();
    const std::uint64_t likely_group =
        quantization_.standard ? static_cast<std::uint64_t>(quantization_.standard->group) : 64;
    const Entry& scales = find(module + ".scales", with_last(shape, c / likely_group));
    const ops::AffineFormat format = format_of(name, weight, scales, shape);
    const auto groups = with_last(shape, c / static_cast<std::uint64_t>(format.group));
    const Entry& biases = find(module + ".biases", groups);
    require_shape(biases.file->path(), module + ".biases", groups, biases.tensor->shape);
    const ops::ElementType type = plain_type(scales, module + ".scales");
    if (biases.tensor->dtype != scales.tensor->dtype) {
      fail(biases, module + ".biases",
           "is " + biases.tensor->dtype + ", expected " + scales.tensor->dtype + " like its scales");
    }
    return make_affine_matrix(name, rows_of(shape), static_cast<int>(c), format, type, weight.tensor->data,
                              scales.tensor->data, biases.tensor->data);
  }

  std::filesystem::path folder_;
  Quantization quantization_;
  Shards shards_;
  text::Assets assets_;
  Config config_;
  std::string prefix_;   // of every canonical name
  bool inside_ = false;  // "model.language_model.layers" in place of prefix_ + "model.layers", as makers publish them
};

}  // namespace

std::unique_ptr<Checkpoint> open_folder_checkpoint(const std::filesystem::path& path) {
  return std::make_unique<FolderCheckpoint>(path);
}

}  // namespace galley::models
