// Stock weights: packed the way MLX packs, expanded where MLX has no kernel, and the exact widening of stored types.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <cmath>
#include <random>
#include <vector>

#include "memory_checkpoint.h"
#include "ops/stock/stock_ops.h"

namespace galley::ops {
namespace {

namespace mx = mlx::core;
using galley::testing::MemoryMatrix;

constexpr int kRows = 6;
constexpr int kCols = 128;

MemoryMatrix random_affine(AffineFormat format) {
  std::mt19937 engine(static_cast<std::uint32_t>(format.bits * 1000 + format.group));
  std::vector<std::uint8_t> codes(kRows * kCols);
  for (auto& code : codes) code = static_cast<std::uint8_t>(engine() % (1U << static_cast<unsigned>(format.bits)));
  std::vector<float> scales(static_cast<std::size_t>(kRows * kCols / format.group));
  std::vector<float> biases(scales.size());
  for (auto& scale : scales) scale = static_cast<float>(1 + engine() % 7) / 8;  // exact products
  for (auto& bias : biases) bias = -static_cast<float>(engine() % 5);
  return MemoryMatrix::affine("w", kRows, kCols, format, codes, scales, biases);
}

std::vector<float> expanded(const MatrixSource& source) {
  std::vector<float> all;
  for (int row = 0; row < kRows; ++row) {
    std::vector<float> values(kCols);
    source.values(row, values);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

std::vector<float> numbers(mx::array a) {
  a = mx::contiguous(a);
  a.eval();
  return {a.data<float>(), a.data<float>() + a.size()};
}

TEST(StockLinear, CodesOfEveryWidthArePackedAsMlxReadsThem) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group : {32, 64, 128}) {
      const MemoryMatrix source = random_affine({bits, group});
      const StockLinear linear(source, nullptr, {});
      EXPECT_EQ(numbers(linear.look_up(mx::arange(kRows))), expanded(source)) << bits << " bits, groups of " << group;
    }
  }
}

TEST(StockLinear, GroupsThatMlxLacksAreExpanded) {
  const MemoryMatrix source = random_affine({6, 16});
  const StockLinear linear(source, nullptr, {});
  EXPECT_EQ(numbers(linear.look_up(mx::arange(kRows))), expanded(source));
}

TEST(StockLinear, PackedAndDenseGiveTheSameProduct) {
  std::vector<float> ones(kCols, 0.5F);
  const mx::array x(ones.data(), {1, 1, kCols});
  const VectorSource bias{"b", {1, 2, 3, 4, 5, 6}, ElementType::f32};
  for (const AffineFormat format : {AffineFormat{4, 32}, {5, 32}, {6, 32}, {8, 32}, {6, 16}}) {
    const MemoryMatrix source = random_affine(format);
    const auto packed = numbers(StockLinear(source, &bias, {}).apply(x));
    const auto dense = numbers(StockLinear(source, &bias, {.dense = true}).apply(x));
    const auto values = expanded(source);
    for (int row = 0; row < kRows; ++row) {
      double sum = row + 1;
      for (int col = 0; col < kCols; ++col)
        sum += 0.5 * static_cast<double>(values[static_cast<std::size_t>(row * kCols + col)]);
      EXPECT_NEAR(packed[static_cast<std::size_t>(row)], sum, 1e-3) << format.bits;
      EXPECT_NEAR(dense[static_cast<std::size_t>(row)], sum, 1e-3) << format.bits;
    }
  }
}

TEST(StockNorm, KeepsTheStoredTypeUnlessAskedForFloat32) {
  const VectorSource weight{"n", {1.5F, 0.25F, -2.0F, 1.0F}, ElementType::bf16};
  const mx::array x = mx::astype(mx::array({1.0F, 2.0F, 3.0F, 4.0F}), mx::bfloat16);
  EXPECT_EQ(StockNorm(weight, 1e-6F, {}).apply(x).dtype(), mx::bfloat16);
  const auto wide = StockNorm(weight, 0.0F, {.float32 = true}).apply(mx::astype(x, mx::float32));
  EXPECT_EQ(wide.dtype(), mx::float32);
  const auto out = numbers(wide);
  EXPECT_NEAR(out[2], -2.0 * 3.0 / std::sqrt(30.0 / 4), 1e-5);
}

TEST(StockOps, GatedMlpByBothActivations) {
  const int hidden = 32;
  std::mt19937 engine(3);
  std::normal_distribution<float> normal(0.0F, 0.4F);
  const auto matrix = [&] {
    std::vector<float> values(static_cast<std::size_t>(hidden * hidden));
    for (float& value : values) value = normal(engine);
    return MemoryMatrix::plain("w", hidden, hidden, values);
  };
  const MemoryMatrix gate = matrix();
  const MemoryMatrix up = matrix();
  std::vector<float> identity(static_cast<std::size_t>(hidden * hidden));
  for (int i = 0; i < hidden; ++i) identity[static_cast<std::size_t>(i * hidden + i)] = 1.0F;
  const MemoryMatrix down = MemoryMatrix::plain("d", hidden, hidden, identity);
  const VectorSource ones{"n", std::vector<float>(hidden, 1.0F), ElementType::f32};

  StockOps ops;
  const MemoryMatrix table = matrix();
  ops.begin(mx::array({3}, {1, 1}));
  const Value x = ops.embed(ops.load_embedding(table));
  const auto in = numbers(StockOps::array_of(x));
  double square = 0;
  for (const float value : in) square += static_cast<double>(value) * static_cast<double>(value);
  const double scale = 1 / std::sqrt(square / hidden);
  for (const Activation activation : {Activation::silu, Activation::gelu_tanh}) {
    const auto out = numbers(
        StockOps::array_of(ops.gated_mlp(x, ops.load_norm(ones, 0.0F), ops.load_mlp(gate, up, down, activation))));
    for (int row = 0; row < hidden; ++row) {
      std::vector<float> g(hidden);
      std::vector<float> u(hidden);
      gate.values(row, g);
      up.values(row, u);
      double a = 0;
      double b = 0;
      for (std::size_t i = 0; i < in.size(); ++i) {
        a += static_cast<double>(g[i]) * static_cast<double>(in[i]) * scale;
        b += static_cast<double>(u[i]) * static_cast<double>(in[i]) * scale;
      }
      const double activated = activation == Activation::silu
                                   ? a / (1 + std::exp(-a))
                                   : 0.5 * a * (1 + std::tanh(0.7978845608 * (a + 0.044715 * a * a * a)));
      EXPECT_NEAR(out[static_cast<std::size_t>(row)],
                  static_cast<double>(in[static_cast<std::size_t>(row)]) + activated * b, 1e-4);
    }
  }
}

TEST(StockOps, EmbeddingsAreScaledInTheirOwnType) {
  const MemoryMatrix table = MemoryMatrix::plain("e", 2, 2, {1.0F, -2.0F, 3.0F, 0.5F});
  StockOps ops;
  ops.begin(mx::array({1, 0}, {1, 2}));
  const LinearPtr embedding = ops.load_embedding(table);
  EXPECT_EQ(numbers(StockOps::array_of(ops.embed(embedding, 8.0F))), (std::vector<float>{24, 4, 8, -16}));
  EXPECT_EQ(numbers(StockOps::array_of(ops.embed(embedding))), (std::vector<float>{3, 0.5F, 1, -2}));
}

TEST(StockOps, PostNormsStandBeforeTheSum) {
  constexpr int kSize = 4;
  const MemoryMatrix twice = MemoryMatrix::plain("w", kSize, kSize, {2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2});
  const VectorSource weight{"n", {1, 2, 3, 4}, ElementType::f32};
  StockOps ops;
  ops.begin(mx::array({0}, {1, 1}));
  const NormPtr norm = ops.load_norm(weight, 0.0F);
  const Value x = StockOps::value_of(mx::array({3.0F, -3.0F, 3.0F, -3.0F}, {1, 1, kSize}));
  const Value residual = StockOps::value_of(mx::array({10.0F, 20.0F, 30.0F, 40.0F}, {1, 1, kSize}));
  const auto linear = ops.load_linears({&twice}, {}).front();
  // 2 x has a root mean square of 6, so the normed product is the sign of x times the weight.
  EXPECT_EQ(numbers(StockOps::array_of(ops.linear_norm_residual(x, linear, norm, residual))),
            (std::vector<float>{11, 18, 33, 36}));

  GatedMlp mlp = ops.load_mlp(twice, twice, twice, Activation::gelu_tanh);
  const NormPtr plain = ops.load_norm({"p", {1, 1, 1, 1}, ElementType::f32}, 0.0F);
  const auto branch = numbers(StockOps::array_of(ops.gated_mlp(residual, plain, mlp)));
  mlp.post_norm = norm;
  const auto normed = numbers(StockOps::array_of(ops.gated_mlp(residual, plain, mlp)));
  const auto base = numbers(StockOps::array_of(residual));
  double square = 0;
  for (std::size_t i = 0; i < kSize; ++i) square += std::pow(static_cast<double>(branch[i] - base[i]), 2) / kSize;
  for (std::size_t i = 0; i < kSize; ++i) {
    EXPECT_NEAR(normed[i], base[i] + (branch[i] - base[i]) / static_cast<float>(std::sqrt(square)) * weight.values[i],
                1e-4);
  }
}

TEST(StockOps, HalfPrecisionSumsAfterAPostNormSaturate) {
  const MemoryMatrix identity = MemoryMatrix::plain("w", 2, 2, {1, 0, 0, 1});
  StockOps ops;
  ops.begin(mx::array({0}, {1, 1}));
  const NormPtr norm = ops.load_norm({"n", {60000, 1}, ElementType::f16}, 0.0F);
  const mx::array x = mx::astype(mx::array({1.0F, 1.0F}, {1, 1, 2}), mx::float16);
  const mx::array residual = mx::astype(mx::array({60000.0F, 2.0F}, {1, 1, 2}), mx::float16);
  const Value sum = ops.linear_norm_residual(StockOps::value_of(x), ops.load_linears({&identity}, {}).front(), norm,
                                             StockOps::value_of(residual));
  EXPECT_EQ(StockOps::array_of(sum).dtype(), mx::float16);
  EXPECT_EQ(numbers(mx::astype(StockOps::array_of(sum), mx::float32)), (std::vector<float>{65504, 3}));
}

}  // namespace
}  // namespace galley::ops
