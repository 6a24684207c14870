#include "ops/stock/stock_weights.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/error.h"

namespace galley::ops {
namespace {

namespace mx = mlx::core;

// Numbers that were widened to float32 exactly go back to their stored type exactly.
template <typename T>
mx::array narrowed(const std::vector<float>& values, mx::Shape shape) {
  const std::vector<T> stored(values.begin(), values.end());
  return mx::array(stored.data(), std::move(shape));
}

mx::array as_type(const std::vector<float>& values, mx::Shape shape, ElementType type) {
  switch (type) {
    case ElementType::f32:
      return mx::array(values.data(), std::move(shape));
    case ElementType::f16:
      return narrowed<mx::float16_t>(values, std::move(shape));
    case ElementType::bf16:
      return narrowed<mx::bfloat16_t>(values, std::move(shape));
  }
  throw Error(500, "unknown element type");
}

mx::array dense(const MatrixSource& source, ElementType type) {
  const auto cols = static_cast<std::size_t>(source.cols());
  std::vector<float> values(static_cast<std::size_t>(source.rows()) * cols);
  for (int row = 0; row < source.rows(); ++row) {
    source.values(row, std::span(values).subspan(static_cast<std::size_t>(row) * cols, cols));
  }
  return as_type(values, {source.rows(), source.cols()}, type);
}

// MLX packs a row as one little-endian stream of `bits`-wide codes, whatever the width.
void pack_row(std::span<const std::uint8_t> codes, int bits, std::span<std::uint32_t> words) {
  std::uint64_t pending = 0;
  int held = 0;
  std::size_t next = 0;
  for (const std::uint8_t code : codes) {
    pending |= static_cast<std::uint64_t>(code) << held;
    held += bits;
    if (held >= 32) {
      words[next++] = static_cast<std::uint32_t>(pending);
      pending >>= 32;
      held -= 32;
    }
  }
}

mx::array packed_codes(const MatrixSource& source) {
  const int bits = source.affine().bits;
  const auto cols = static_cast<std::size_t>(source.cols());
  const std::size_t words_per_row = cols * static_cast<std::size_t>(bits) / 32;
  std::vector<std::uint8_t> codes(cols);
  std::vector<std::uint32_t> words(static_cast<std::size_t>(source.rows()) * words_per_row);
  for (int row = 0; row < source.rows(); ++row) {
    source.codes(row, codes);
    pack_row(codes, bits, std::span(words).subspan(static_cast<std::size_t>(row) * words_per_row, words_per_row));
  }
  return mx::array(words.data(), {source.rows(), static_cast<int>(words_per_row)});
}

std::pair<mx::array, mx::array> scales_and_biases(const MatrixSource& source) {
  const int groups = source.cols() / source.affine().group;
  const auto width = static_cast<std::size_t>(groups);
  std::vector<float> scales(static_cast<std::size_t>(source.rows()) * width);
  std::vector<float> biases(scales.size());
  for (int row = 0; row < source.rows(); ++row) {
    const std::size_t at = static_cast<std::size_t>(row) * width;
    source.scales(row, std::span(scales).subspan(at, width), std::span(biases).subspan(at, width));
  }
  const mx::Shape shape{source.rows(), groups};
  return {as_type(scales, shape, source.type()), as_type(biases, shape, source.type())};
}

bool mlx_has(const AffineFormat& format) { return format.group == 32 || format.group == 64 || format.group == 128; }

}  // namespace

StockMatrix::StockMatrix(const MatrixSource& source, const StockNumerics& numerics) : weight(mx::array(0.0F)) {
  const bool keep_packed = source.quantized() && !numerics.dense && mlx_has(source.affine());
  if (keep_packed) {
    weight = packed_codes(source);
    auto [scales, biases] = scales_and_biases(source);
    packed = Packed{std::move(scales), std::move(biases), source.affine()};
  } else {
    weight = dense(source, numerics.float32 ? ElementType::f32 : source.type());
  }
}

StockLinear::StockLinear(const MatrixSource& source, const VectorSource* bias, const StockNumerics& numerics)
    : matrix_(source, numerics) {
  rows = source.rows();
  cols = source.cols();
  if (bias != nullptr) {
    bias_ = stock_vector(*bias, numerics);
  }
}

mx::array StockLinear::apply(const mx::array& x) const {
  if (const auto& packed = matrix_.packed) {
    const mx::array product = mx::quantized_matmul(x, matrix_.weight, packed->scales, packed->biases,
                                                   /*transpose=*/true, packed->format.group, packed->format.bits);
    return bias_ ? mx::add(product, *bias_) : product;
  }
  const mx::array transposed = mx::transpose(matrix_.weight);
  return bias_ ? mx::addmm(*bias_, x, transposed) : mx::matmul(x, transposed);
}

mx::array StockLinear::look_up(const mx::array& tokens) const {
  const auto& packed = matrix_.packed;
  if (!packed) return mx::take(matrix_.weight, tokens, 0);
  return mx::dequantize(mx::take(matrix_.weight, tokens, 0), mx::take(packed->scales, tokens, 0),
                        mx::take(packed->biases, tokens, 0), packed->format.group, packed->format.bits);
}

StockNorm::StockNorm(const VectorSource& weight, float epsilon, const StockNumerics& numerics)
    : weight_(stock_vector(weight, numerics)) {
  eps = epsilon;
}

mx::array StockNorm::apply(const mx::array& x) const { return mx::fast::rms_norm(x, weight_, eps); }

StockFactor::StockFactor(const VectorSource& one_number, const StockNumerics& numerics)
    : number(stock_vector(one_number, numerics)) {}

mx::array stock_vector(const VectorSource& source, const StockNumerics& numerics) {
  return as_type(source.values, {static_cast<int>(source.values.size())},
                 numerics.float32 ? ElementType::f32 : source.type);
}

}  // namespace galley::ops
