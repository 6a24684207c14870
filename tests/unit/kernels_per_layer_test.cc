// Per-layer inputs: the mixed vectors and the gated rows against references in double, and the same bits in every
// tiling.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels_support.h"

namespace galley::kernels::test {
namespace {

class PerLayer : public testing::TestWithParam<std::string> {};

TEST_P(PerLayer, SumMatchesTheReferenceWhoeverIsBeside) {
  constexpr int kLayers = 3, kWidth = 40, kRows = 7;
  constexpr std::size_t kAll = kLayers * kWidth;
  const Floats projected = random_floats(kRows * kAll, 1, 4.0F), own = random_floats(kRows * kAll, 2);
  const Floats norm = random_floats(kWidth, 3);
  const PerLayerSum sum{kLayers, kWidth, norm.data(), 1e-3F, 0.125F, 0.7F};
  Context context(select_isa(GetParam()), 3);
  Floats y = own;
  per_layer_sum(context, sum, projected.data(), kRows, y.data());
  for (std::size_t part = 0; part < kRows * kLayers; ++part) {
    double square = 0;
    for (std::size_t c = 0; c < kWidth; ++c)
      square += std::pow(0.125 * static_cast<double>(projected[part * kWidth + c]), 2);
    const double factor = 0.125 / std::sqrt(square / kWidth + 1e-3);
    for (std::size_t c = 0; c < kWidth; ++c) {
      const std::size_t at = part * kWidth + c;
      const double normed = static_cast<double>(projected[at]) * factor * static_cast<double>(norm[c]);
      ASSERT_NEAR(y[at], 0.7 * (normed + static_cast<double>(own[at])), 1e-5);
    }
  }
  Context single(select_isa(GetParam()), 1);
  for (std::size_t r = 0; r < kRows; ++r) {
    Floats alone(own.begin() + static_cast<std::ptrdiff_t>(r * kAll),
                 own.begin() + static_cast<std::ptrdiff_t>((r + 1) * kAll));
    per_layer_sum(single, sum, projected.data() + r * kAll, 1, alone.data());
    ASSERT_EQ(0, std::memcmp(alone.data(), y.data() + r * kAll, kAll * sizeof(float)));
  }
}

TEST_P(PerLayer, GatedRowsMatchTheReferenceInEveryTiling) {
  constexpr int kRows = 15;
  constexpr std::size_t kStride = 300, kFirst = 64;
  for (const int columns : {32, 64, 128}) {
    for (const int group : {0, 32, 64, 128}) {
      if (group > columns) continue;
      const auto n = static_cast<std::size_t>(columns);
      const TestMatrix consumer({32, columns, group == 0 ? 0 : 4, group});
      const Floats x = random_floats(kRows * n, 5, 2.0F), by = random_floats(kRows * kStride, 6);
      std::vector<std::vector<std::uint32_t>> reference;
      for (const int tile : {12, 5, 1}) {
        Context context(select_isa(GetParam()), 2);
        context.set_max_tile(std::min(tile, context.isa().max_tile));
        const PackedMatrix next = packed(context, consumer);
        Activations out;
        context.reshape(out, kRows, next, false);
        gate_rows(context, x.data(), n, by.data() + kFirst, kStride, Gate::gelu_tanh, out);
        for (int r = 0; r < kRows; ++r) {
          if (reference.size() < kRows) reference.push_back(row_bits(out, r));
          ASSERT_EQ(row_bits(out, r), reference[static_cast<std::size_t>(r)]) << columns << ' ' << group << ' ' << tile;
        }
        const Floats left = decoded(out);
        for (std::size_t r = 0; r < kRows; ++r) {
          double top = 0;
          std::vector<double> exact;
          for (std::size_t c = 0; c < n; ++c) {
            const double v = static_cast<double>(x[r * n + c]);
            const double gelu = 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
            exact.push_back(gelu * static_cast<double>(by[r * kStride + kFirst + c]));
            top = std::max(top, std::fabs(exact.back()));
          }
          for (std::size_t c = 0; c < n; ++c)
            ASSERT_NEAR(left[r * n + c], exact[c], group == 0 ? 1e-5 : top / 127 * 0.51 + 1e-5);
        }
      }
    }
  }
}

TEST_P(PerLayer, WhatDoesNotFitThrows) {
  Context context(select_isa(GetParam()), 1);
  const TestMatrix consumer({32, 64, 4, 32});
  const PackedMatrix next = packed(context, consumer);
  Activations out;
  context.reshape(out, 1, next, false);
  const Floats x(64);
  EXPECT_THROW(gate_rows(context, x.data(), 32, x.data(), 64, Gate::gelu_tanh, out), std::invalid_argument);
  Floats y(64);
  EXPECT_THROW(per_layer_sum(context, {1, 64, nullptr}, x.data(), 1, y.data()), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, PerLayer, testing::ValuesIn(supported_isas()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace galley::kernels::test
