#include "models/gguf_matrix.h"

#include <span>
#include <utility>
#include <vector>

#include "models/checkpoint_numbers.h"
#include "models/mapped_file.h"
#include "ops/error.h"

namespace galley::models {
namespace {

class GgufMatrix final : public ops::MatrixSource {
 public:
  GgufMatrix(const GgufTensor& tensor, std::string name, int head_dim)
      : tensor_(tensor),
        name_(std::move(name)),
        rows_(static_cast<int>(tensor.shape.at(0))),
        cols_(static_cast<int>(tensor.shape.at(1))),
        head_dim_(head_dim),
        blocks_(tensor.shape.at(1) / tensor.type->block) {}

  ~GgufMatrix() override { release_pages({tensor_.data, tensor_.shape[0] * blocks_ * tensor_.type->block_bytes}); }
  GgufMatrix(const GgufMatrix&) = delete;
  GgufMatrix& operator=(const GgufMatrix&) = delete;

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

  [[nodiscard]] ops::ScaleRuns runs() const override {
    if (tensor_.type->levels == nullptr) return {};
    return {static_cast<int>(tensor_.type->block), tensor_.type->level_biases};
  }

  void levels(int row, const ops::ScaleLevels& out) const override {
    const bool biases = tensor_.type->level_biases;
    require(tensor_.type->levels != nullptr && out.run_scale.size() == blocks_ && out.scale.size() == groups() &&
                (!biases || (out.run_bias.size() == blocks_ && out.bias.size() == groups())),
            "levels");
    tensor_.type->levels(row_bytes(row), blocks_, out);
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
    return tensor_.data +
           static_cast<std::size_t>(gguf_stored_row(row, head_dim_)) * blocks_ * tensor_.type->block_bytes;
  }

  const GgufTensor& tensor_;
  std::string name_;
  int rows_, cols_, head_dim_;
  std::size_t blocks_;  // in a row
};

}  // namespace

int gguf_stored_row(int row, int head_dim) {
  if (head_dim == 0) return row;
  const int within = row % head_dim;
  const int half = head_dim / 2;
  return row - within + 2 * (within % half) + within / half;
}

std::unique_ptr<ops::MatrixSource> make_gguf_matrix(const GgufTensor& tensor, std::string name, int head_dim) {
  return std::make_unique<GgufMatrix>(tensor, std::move(name), head_dim);
}

}  // namespace galley::models
