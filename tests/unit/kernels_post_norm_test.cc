// The norm at the end of a residual branch: right numbers, the very activations that norm_quantize makes of them, and
// the same bits in every tiling.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels_support.h"

namespace galley::kernels {
namespace {

using test::decoded;
using test::Floats;
using test::packed;
using test::random_floats;
using test::row_bits;
using test::TestMatrix;

constexpr float kEps = 1e-6F;

class PostNorm : public testing::TestWithParam<std::string> {};

TEST_P(PostNorm, AddsTheNormedRowAndLeavesTheNextInput) {
  for (const int columns : {64, 96, 640}) {
    for (const int bits : {0, 4}) {
      const auto n = static_cast<std::size_t>(columns);
      const int rows = 9;
      Context context(select_isa(GetParam()), 2);
      const TestMatrix next({32, columns, bits, 32, ops::ElementType::f32});
      const PackedMatrix consumer = packed(context, next);
      const Floats x = random_floats(rows * n, 1, 3.0F), residual = random_floats(rows * n, 2);
      const Floats weight = random_floats(n, 3), norm = random_floats(n, 4);
      Floats y(rows * n);
      Activations out;
      context.reshape(out, rows, consumer, true);
      norm_residual(context, x.data(), rows, columns, weight.data(), kEps,
                    {residual.data(), y.data(), n, 0.5F, norm.data(), &out});
      for (std::size_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (std::size_t c = 0; c < n; ++c)
          sum += static_cast<double>(x[r * n + c]) * static_cast<double>(x[r * n + c]);
        const double factor = 0.5 / std::sqrt(sum / columns + static_cast<double>(kEps));
        for (std::size_t c = 0; c < n; ++c) {
          const double branch = static_cast<double>(x[r * n + c]) * factor * static_cast<double>(weight[c]);
          ASSERT_NEAR(y[r * n + c], static_cast<double>(residual[r * n + c]) + branch, 1e-5) << r << ' ' << c;
        }
      }
      Activations again;
      context.reshape(again, rows, consumer, true);
      norm_quantize(context, y.data(), n, nullptr, norm.data(), again);
      for (int r = 0; r < rows; ++r) ASSERT_EQ(row_bits(out, r), row_bits(again, r));

      Floats alone(rows * n);
      norm_residual(context, x.data(), rows, columns, weight.data(), kEps,
                    {residual.data(), alone.data(), n, 0.5F, nullptr, nullptr});
      EXPECT_EQ(alone, y);
    }
  }
}

TEST_P(PostNorm, ARowsBitsDontDependOnItsNeighbours) {
  constexpr std::size_t n = 160;
  const Floats x = random_floats(30 * n, 1), residual = random_floats(30 * n, 2);
  const Floats weight = random_floats(n, 3), norm = random_floats(n, 4);
  const TestMatrix next({32, n, 4, 32, ops::ElementType::f16});
  std::vector<std::vector<std::uint32_t>> reference;
  Floats all(x.size());
  for (const int threads : {1, 2}) {
    Context context(select_isa(GetParam()), threads);
    const PackedMatrix consumer = packed(context, next);
    for (const int rows : {30, 7, 1}) {
      for (int first = 0; first + rows <= 30; first += rows) {
        Floats y(static_cast<std::size_t>(rows) * n);
        Activations out;
        context.reshape(out, rows, consumer, true);
        const std::size_t at = static_cast<std::size_t>(first) * n;
        norm_residual(context, x.data() + at, rows, n, weight.data(), kEps,
                      {residual.data() + at, y.data(), n, 1.0F, norm.data(), &out});
        if (reference.empty()) {
          all = y;
          for (int r = 0; r < rows; ++r) reference.push_back(row_bits(out, r));
        }
        ASSERT_EQ(0, std::memcmp(y.data(), all.data() + at, y.size() * sizeof(float)));
        for (int r = 0; r < rows; ++r) ASSERT_EQ(row_bits(out, r), reference[static_cast<std::size_t>(first + r)]);
      }
    }
  }
}

TEST_P(PostNorm, TheSumCanBeScaledAndStartFromNothingInPlace) {
  constexpr std::size_t n = 96;
  Context context(select_isa(GetParam()), 2);
  const Floats x = random_floats(5 * n, 1), weight = random_floats(n, 3), nothing(5 * n, 0.0F);
  Floats plain(5 * n), y = x;
  norm_residual(context, x.data(), 5, n, weight.data(), kEps, {nothing.data(), plain.data(), n});
  Residual to;
  to.y = y.data();
  to.ld = n;
  to.whole = 2.0F;
  norm_residual(context, y.data(), 5, n, weight.data(), kEps, to);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], 2.0F * plain[i]);
  to.residual = to.y;
  to.whole = 0.25F;
  norm_residual(context, x.data(), 5, n, weight.data(), kEps, to);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], 0.25F * (2.0F * plain[i] + plain[i]));
}

TEST_P(PostNorm, AFaultyRowStaysAlone) {
  constexpr std::size_t n = 64;
  Context context(select_isa(GetParam()), 1);
  Floats x = random_floats(2 * n, 1);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  const Floats residual = random_floats(2 * n, 2), weight = random_floats(n, 3);
  Floats y(2 * n);
  norm_residual(context, x.data(), 2, n, weight.data(), kEps, {residual.data(), y.data(), n, 1.0F, nullptr, nullptr});
  for (std::size_t c = 0; c < n; ++c) {
    EXPECT_TRUE(std::isnan(y[c]));
    EXPECT_TRUE(std::isfinite(y[n + c]));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, PostNorm, testing::ValuesIn(supported_isas()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace galley::kernels
