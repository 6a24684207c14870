// How quantized weights are stored: two-level scales, mixed bits and groups, and that none of it changes a bit.
#include <gtest/gtest.h>

#include "kernels_support.h"

namespace galley::kernels::test {
namespace {

/// A K-quant: in runs of 256 columns, scales are a half times a small integer, biases likewise or none of their own.
class KMatrix final : public ops::MatrixSource {
 public:
  KMatrix(int rows, int cols, int bits, int group, bool biases, bool two_level = true, unsigned seed = 1)
      : rows_(rows), cols_(cols), format_{bits, group}, biases_(biases), two_level_(two_level) {
    std::mt19937 rng(seed);
    const auto n = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
    for (std::size_t i = 0; i < n; ++i) codes_.push_back(static_cast<std::uint8_t>(rng() % (1U << bits)));
    for (std::size_t i = 0; i < n / 256; ++i) {
      run_scale_.push_back(float_to_half(0.0005F * static_cast<float>(1 + rng() % 7)));
      run_bias_.push_back(float_to_half(-0.0004F * static_cast<float>(1 + rng() % 7)));
    }
    for (std::size_t i = 0; i < n / static_cast<std::size_t>(group); ++i) {
      scale_.push_back(static_cast<std::int8_t>(biases ? rng() % 64 : rng() % 256));
      bias_.push_back(static_cast<std::int8_t>(rng() % 64));
    }
  }
  const std::string& name() const override { return name_; }
  int rows() const override { return rows_; }
  int cols() const override { return cols_; }
  bool quantized() const override { return true; }
  ops::AffineFormat affine() const override { return format_; }
  ops::ElementType type() const override { return ops::ElementType::f32; }
  void codes(int row, std::span<std::uint8_t> out) const override { copy_row(codes_, row, out); }
  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    for (std::size_t g = 0; g < scale.size(); ++g) {
      const std::size_t at = static_cast<std::size_t>(row) * scale.size() + g;
      const std::size_t run = at * static_cast<std::size_t>(format_.group) / 256;
      scale[g] = half_to_float(run_scale_[run]) * static_cast<float>(scale_[at]);
      bias[g] = biases_ ? half_to_float(run_bias_[run]) * static_cast<float>(bias_[at])
                        : -static_cast<float>(1 << (format_.bits - 1)) * scale[g];
    }
  }
  ops::ScaleRuns runs() const override { return two_level_ ? ops::ScaleRuns{256, biases_} : ops::ScaleRuns{}; }
  void levels(int row, const ops::ScaleLevels& out) const override {
    copy_row(run_scale_, row, out.run_scale);
    copy_row(scale_, row, out.scale);
    if (!biases_) return;
    copy_row(run_bias_, row, out.run_bias);
    copy_row(bias_, row, out.bias);
  }
  void values(int row, std::span<float> out) const override {
    std::vector<std::uint8_t> code(out.size());
    Floats scale(out.size() / static_cast<std::size_t>(format_.group)), bias(scale.size());
    codes(row, code);
    scales(row, scale, bias);
    for (std::size_t k = 0; k < out.size(); ++k) {
      const std::size_t g = k / static_cast<std::size_t>(format_.group);
      out[k] = scale[g] * static_cast<float>(code[k]) + bias[g];
    }
  }

 private:
  template <typename T>
  static void copy_row(const std::vector<T>& from, int row, std::span<T> out) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * out.size()), out.size(),
                out.begin());
  }
  int rows_, cols_;
  ops::AffineFormat format_;
  bool biases_, two_level_;
  std::string name_ = "test.k.weight";
  std::vector<std::uint8_t> codes_;
  std::vector<std::uint16_t> run_scale_, run_bias_;
  std::vector<std::int8_t> scale_, bias_;
};

PackedMatrix pack_one(const Context& context, const ops::MatrixSource& m) {
  const ops::MatrixSource* const one[] = {&m};
  return PackedMatrix::concatenate(context.isa(), one);
}

Floats product(Context& context, const PackedMatrix& w, int rows, unsigned seed = 3) {
  const auto k = static_cast<std::size_t>(w.depth());
  const Floats x = random_floats(static_cast<std::size_t>(rows) * k, seed);
  Activations a;
  context.reshape(a, rows, w, false);
  norm_quantize(context, x.data(), k, nullptr, nullptr, a);
  Floats y(static_cast<std::size_t>(rows) * static_cast<std::size_t>(w.columns()));
  linear(context, {&w, &a}, y.data(), static_cast<std::size_t>(w.columns()));
  return y;
}

class Formats : public testing::TestWithParam<std::string> {
 protected:
  Context context_{select_isa(GetParam()), 2};
};

struct KFormat {
  int bits, group;
  bool biases;
  WeightKind stored;
};
constexpr KFormat k_formats[] = {{4, 32, true, WeightKind::affine4},
                                 {5, 32, true, WeightKind::affine5},
                                 {6, 16, false, WeightKind::affine6},
                                 {4, 32, false, WeightKind::affine4},
                                 {6, 16, true, WeightKind::affine6}};

TEST_P(Formats, TwoLevelScalesGiveTheBitsOfSingleOnesInLessRoom) {
  for (const KFormat& f : k_formats) {
    const KMatrix two(72, 512, f.bits, f.group, f.biases), one(72, 512, f.bits, f.group, f.biases, false);
    const PackedMatrix a = pack_one(context_, two), b = pack_one(context_, one);
    EXPECT_EQ(a.scale_kind(), ScaleKind::two_level);
    EXPECT_EQ(b.scale_kind(), ScaleKind::single);
    EXPECT_EQ(a.kind(), f.stored);
    EXPECT_EQ(a.symmetric(), !f.biases);
    EXPECT_EQ(a.input_form().group, 32);
    EXPECT_LT(a.block_bytes(), b.block_bytes());
    for (const int rows : {1, 3, 7, 14}) ASSERT_EQ(product(context_, a, rows), product(context_, b, rows)) << f.bits;
    Floats row(512), expected(512);
    for (const int r : {0, 31, 71}) {
      a.decode(r, row);
      two.values(r, expected);
      ASSERT_EQ(row, expected) << f.bits;
      b.decode(r, row);
      ASSERT_EQ(row, expected) << f.bits;
    }
  }
}

TEST_P(Formats, KQuantsMatchAReferenceInDouble) {
  for (const KFormat& f : k_formats) {
    const KMatrix m(40, 768, f.bits, f.group, f.biases);
    const PackedMatrix w = pack_one(context_, m);
    const Floats x = random_floats(5 * 768, 9);
    Activations a;
    context_.reshape(a, 5, w, false);
    norm_quantize(context_, x.data(), 768, nullptr, nullptr, a);
    const Floats in = decoded(a);
    Floats y(5 * 40), row(768);
    linear(context_, {&w, &a}, y.data(), 40);
    for (std::size_t n = 0; n < 40; ++n) {
      m.values(static_cast<int>(n), row);
      for (std::size_t r = 0; r < 5; ++r) {
        double sum = 0, size = 0;
        for (std::size_t k = 0; k < 768; ++k) {
          const double term = static_cast<double>(in[r * 768 + k]) * static_cast<double>(row[k]);
          sum += term;
          size += std::fabs(term);
        }
        ASSERT_NEAR(y[r * 40 + n], sum, 3e-6 * size) << f.bits << " row " << r << " column " << n;
      }
    }
  }
}

// The extremes of codes and activations: no sum of the integer part may saturate.
TEST_P(Formats, LargestCodesTimesLargestActivationsAreExact) {
  class Extreme final : public ops::MatrixSource {
   public:
    Extreme(int bits, int group) : format_{bits, group} {}
    const std::string& name() const override { return name_; }
    int rows() const override { return 32; }
    int cols() const override { return 256; }
    bool quantized() const override { return true; }
    ops::AffineFormat affine() const override { return format_; }
    ops::ElementType type() const override { return ops::ElementType::f16; }
    void codes(int row, std::span<std::uint8_t> out) const override {
      const int top = (1 << format_.bits) - 1;  // row 1: all zeros; the others: all ones
      std::fill(out.begin(), out.end(), static_cast<std::uint8_t>(row == 1 ? 0 : top));
    }
    void scales(int, std::span<float> scale, std::span<float> bias) const override {
      std::fill(scale.begin(), scale.end(), 1.0F);
      std::fill(bias.begin(), bias.end(), 0.0F);
    }
    void values(int, std::span<float>) const override {}

   private:
    ops::AffineFormat format_;
    std::string name_ = "extreme";
  };
  for (const int bits : {4, 5, 6, 8}) {
    for (const int group : {16, 32, 64}) {
      const PackedMatrix w = pack_one(context_, Extreme(bits, group));
      for (const float sign : {1.0F, -1.0F}) {
        const Floats x(7 * 256, sign);  // every activation code is 127 or -127
        Activations a;
        context_.reshape(a, 7, w, false);
        norm_quantize(context_, x.data(), 256, nullptr, nullptr, a);
        Floats y(7 * 32);
        linear(context_, {&w, &a}, y.data(), 32);
        const float expected = sign * 256.0F * static_cast<float>((1 << bits) - 1);
        for (std::size_t i = 0; i < y.size(); ++i) {
          ASSERT_NEAR(y[i], i % 32 == 1 ? 0.0F : expected, 1e-5F * std::fabs(expected)) << bits << " bits, " << group;
        }
      }
    }
  }
}

TEST_P(Formats, RowsAreInvariantInEveryKFormat) {
  for (const KFormat& f : k_formats) {
    const KMatrix m(64, 512, f.bits, f.group, f.biases);
    const PackedMatrix w = pack_one(context_, m);
    const Floats x = random_floats(29 * 512, 5);
    Floats all(29 * 64), part(29 * 64);
    for (const int threads : {1, 3}) {
      Context context(select_isa(GetParam()), threads);
      for (const int rows : {29, 1, 2, 3, 5, 12, 13}) {
        for (int tile = 1; tile <= context.isa().max_tile; tile += GetParam() == "scalar" ? 3 : 1) {
          context.set_max_tile(tile);
          const int first = rows == 29 ? 0 : (rows * 7) % (30 - rows);
          Activations a;
          context.reshape(a, rows, w, false);
          norm_quantize(context, x.data() + static_cast<std::size_t>(first) * 512, 512, nullptr, nullptr, a);
          const bool reference = rows == 29 && threads == 1 && tile == 1;
          Floats& y = reference ? all : part;
          linear(context, {&w, &a}, y.data(), 64);
          ASSERT_EQ(0, std::memcmp(y.data(), all.data() + first * 64, static_cast<std::size_t>(rows) * 64 * 4))
              << f.bits << " bits, tile " << tile << " rows " << rows << " threads " << threads;
        }
      }
    }
  }
}

TEST_P(Formats, NarrowCodesBesideWideOnesKeepTheirZeroPoint) {
  const auto f16 = ops::ElementType::f16;
  const TestMatrix five({32, 128, 5, 32, f16, true, 1}), eight({32, 128, 8, 32, f16, true, 2});
  const ops::MatrixSource* const both[] = {&five, &eight};
  const PackedMatrix w = PackedMatrix::concatenate(context_.isa(), both);
  EXPECT_EQ(w.kind(), WeightKind::affine8);
  EXPECT_TRUE(w.symmetric());
  // The same columns as alone, bit for bit.
  const Floats together = product(context_, w, 3);
  const Floats a = product(context_, packed(context_, five), 3), b = product(context_, packed(context_, eight), 3);
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t c = 0; c < 32; ++c) {
      ASSERT_EQ(together[r * 64 + c], a[r * 32 + c]);
      ASSERT_EQ(together[r * 64 + 32 + c], b[r * 32 + c]);
    }
  }
  Floats row(128);
  w.decode(5, row);
  EXPECT_EQ(row, five.row(5));
  w.decode(32 + 5, row);
  EXPECT_EQ(row, eight.row(5));
}

TEST_P(Formats, CoarseGroupsBesideFineOnesAreSplit) {
  const KMatrix coarse(64, 256, 4, 32, true), fine(64, 256, 6, 16, false);
  const PackedMatrix w = PackedMatrix::interleave(context_.isa(), coarse, fine);
  EXPECT_EQ(w.group(), 16);
  EXPECT_EQ(w.kind(), WeightKind::affine6);
  EXPECT_EQ(w.input_form(), pack_one(context_, coarse).input_form());
  const ops::MatrixSource* const both[] = {&coarse, &fine};
  const PackedMatrix joined = PackedMatrix::concatenate(context_.isa(), both);
  Floats row(256), expected(256);
  for (const int r : {0, 63}) {
    joined.decode(r, row);
    coarse.values(r, expected);
    EXPECT_EQ(row, expected);
    joined.decode(64 + r, row);
    fine.values(r, expected);
    EXPECT_EQ(row, expected);
  }
  const Floats together = product(context_, joined, 2), alone = product(context_, pack_one(context_, coarse), 2);
  for (std::size_t r = 0; r < 2; ++r) {
    for (std::size_t c = 0; c < 64; ++c) ASSERT_NEAR(together[r * 128 + c], alone[r * 64 + c], 2e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Formats, testing::ValuesIn(supported_isas()), [](const auto& p) { return p.param; });

}  // namespace
}  // namespace galley::kernels::test
