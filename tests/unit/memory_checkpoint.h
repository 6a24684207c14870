// A checkpoint made up in memory, of any family, for tests of what sits above the loaders.
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "models/checkpoint.h"

namespace galley::testing {

/// Any matrix whose values, or codes with scale and bias per group, a test can compute.
class MemoryMatrix final : public ops::MatrixSource {
 public:
  /// `type`: what the values claim to be stored as.
  static MemoryMatrix plain(std::string name, int rows, int cols, std::vector<float> values,
                            ops::ElementType type = ops::ElementType::f32) {
    MemoryMatrix m(std::move(name), rows, cols);
    m.values_ = std::move(values);
    m.type_ = type;
    return m;
  }
  static MemoryMatrix affine(std::string name, int rows, int cols, ops::AffineFormat format,
                             std::vector<std::uint8_t> codes, std::vector<float> scales, std::vector<float> biases) {
    MemoryMatrix m(std::move(name), rows, cols);
    m.format_ = format;
    m.codes_ = std::move(codes);
    m.scales_ = std::move(scales);
    m.biases_ = std::move(biases);
    return m;
  }

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] int rows() const override { return rows_; }
  [[nodiscard]] int cols() const override { return cols_; }
  [[nodiscard]] bool quantized() const override { return !codes_.empty(); }
  [[nodiscard]] ops::AffineFormat affine() const override { return format_; }
  [[nodiscard]] ops::ElementType type() const override { return type_; }
  void codes(int row, std::span<std::uint8_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = codes_[at(row, cols_) + i];
  }
  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    for (std::size_t i = 0; i < scale.size(); ++i) {
      scale[i] = scales_[at(row, cols_ / format_.group) + i];
      bias[i] = biases_[at(row, cols_ / format_.group) + i];
    }
  }
  void values(int row, std::span<float> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t group = at(row, cols_ / format_.group) + i / static_cast<std::size_t>(format_.group);
      const std::size_t index = at(row, cols_) + i;
      out[i] = quantized() ? scales_[group] * static_cast<float>(codes_[index]) + biases_[group] : values_[index];
    }
  }

 private:
  MemoryMatrix(std::string name, int rows, int cols) : name_(std::move(name)), rows_(rows), cols_(cols) {}
  static std::size_t at(int row, int width) { return static_cast<std::size_t>(row) * static_cast<std::size_t>(width); }

  std::string name_;
  int rows_;
  int cols_;
  ops::AffineFormat format_;
  std::vector<float> values_, scales_, biases_;
  std::vector<std::uint8_t> codes_;
  ops::ElementType type_ = ops::ElementType::f32;
};

/// Random float32 weights, the same for every object with the same config.
class MemoryCheckpoint final : public models::Checkpoint {
 public:
  explicit MemoryCheckpoint(models::Config config) : config_(std::move(config)) {}

  static models::Config tiny_llama() {
    models::Config config;
    config.family = "llama";
    config.hidden = 32;
    config.layers = 2;
    config.heads = 4;
    config.kv_heads = 2;
    config.head_dim = 8;
    config.intermediate = 64;
    config.vocab = 96;
    config.context = 512;
    config.tied_head = true;
    return config;
  }

  /// Gemma 4 in its three shapes, of two sliding layers to a full one; heads of full layers are larger.
  enum class Gemma4 { dense, per_layer, experts };
  static models::Config tiny_gemma4(Gemma4 shape) {
    models::Config config;
    config.family = "gemma4";
    config.hidden = 128;
    config.layers = 3;
    config.heads = 4;
    config.kv_heads = 2;
    config.head_dim = 48;
    config.intermediate = 192;
    config.vocab = 160;
    config.context = 512;
    config.norm_eps = 1e-6F;
    config.rope_base = 1e5F;
    config.rope_scaling.type = "proportional";
    config.rope_scaling.rotated = 0.25;
    config.tied_head = true;
    config.sliding = {.window = 24, .pattern = 3, .rope_base = 1e4F};
    config.full = {.head_dim = 64, .kv_heads = 1, .keys_are_values = true};
    config.logit_softcap = 8.0F;
    if (shape == Gemma4::per_layer) {
      config.layers = 6;  // the last three read the keys and values of the first three
      config.full = {.head_dim = 64, .kv_heads = 2, .keys_are_values = false};
      config.shared_kv = {.layers = 3, .double_wide_mlp = true};
      config.per_layer = {.width = 64, .vocab = config.vocab};
    }
    if (shape == Gemma4::experts) {
      config.experts.count = 12;
      config.experts.per_token = 3;
      config.experts.intermediate = 64;
      config.experts.beside_mlp = true;
    }
    return config;
  }

  /// Changes a tensor's values as they are read.
  std::function<void(const std::string& tensor, std::vector<float>& values)> edit;
  /// Matrices are affine with random codes instead of plain (`edit` doesn't see them).
  std::optional<ops::AffineFormat> quantized;
  /// Where set, decides in place of `quantized`, tensor by tensor.
  std::function<std::optional<ops::AffineFormat>(const std::string& tensor)> format_of;
  /// Of plain matrices and vectors; the stock backend rounds to it.
  ops::ElementType type = ops::ElementType::f32;
  /// Where it claims to be.
  std::filesystem::path place = "memory";

  [[nodiscard]] const models::Config& config() const override { return config_; }
  [[nodiscard]] const text::Assets& assets() const override { return assets_; }
  [[nodiscard]] std::filesystem::path path() const override { return place; }
  [[nodiscard]] std::size_t file_bytes() const override { return 0; }
  [[nodiscard]] std::string format() const override { return "memory"; }
  [[nodiscard]] bool has(const std::string&) const override { return true; }
  [[nodiscard]] std::unique_ptr<ops::MatrixSource> matrix(const std::string& tensor, int rows,
                                                          int cols) const override {
    const auto format = format_of ? format_of(tensor) : quantized;
    if (format) return std::make_unique<MemoryMatrix>(affine(tensor, rows, cols, *format));
    auto values = random(tensor, rows * cols, 0.0F, 1.5F / std::sqrt(static_cast<float>(cols)));
    return std::make_unique<MemoryMatrix>(MemoryMatrix::plain(tensor, rows, cols, std::move(values), type));
  }
  [[nodiscard]] std::unique_ptr<ops::MatrixSource> stacked(const std::string& tensor, int count, int rows,
                                                           int cols) const override {
    return matrix(tensor, count * rows, cols);
  }
  [[nodiscard]] ops::VectorSource vector(const std::string& tensor, int size) const override {
    return {tensor, random(tensor, size, 1.0F, 0.2F), type};
  }
  void release_pages() const override {}

 private:
  /// Codes spread evenly, so that the values have the spread of the plain matrices.
  static MemoryMatrix affine(const std::string& tensor, int rows, int cols, ops::AffineFormat format) {
    std::mt19937 engine(static_cast<std::uint32_t>(std::hash<std::string>{}(tensor)));
    const auto levels = static_cast<std::uint32_t>(1) << static_cast<unsigned>(format.bits);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
    for (auto& code : codes) code = static_cast<std::uint8_t>(engine() % levels);
    std::vector<float> scales(codes.size() / static_cast<std::size_t>(format.group));
    std::vector<float> biases(scales.size());
    std::uniform_real_distribution<float> stretch(0.5F, 1.5F);
    const float unit = 1.5F * std::sqrt(12.0F / static_cast<float>(cols)) / static_cast<float>(levels);
    for (std::size_t g = 0; g < scales.size(); ++g) {
      scales[g] = unit * stretch(engine);
      biases[g] = -scales[g] * 0.5F * static_cast<float>(levels) * stretch(engine);
    }
    return MemoryMatrix::affine(tensor, rows, cols, format, std::move(codes), std::move(scales), std::move(biases));
  }
  [[nodiscard]] std::vector<float> random(const std::string& tensor, int count, float mean, float spread) const {
    std::mt19937 engine(static_cast<std::uint32_t>(std::hash<std::string>{}(tensor)));
    std::normal_distribution<float> normal(mean, spread);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(engine);
    if (edit) edit(tensor, values);
    return values;
  }

  models::Config config_;
  text::Assets assets_;
};

}  // namespace galley::testing
