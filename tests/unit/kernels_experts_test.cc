// Mixtures of experts against a reference in double, and bit-invariance across rows, tiles and threads.
#include <gtest/gtest.h>

#include <limits>

#include "kernels_support.h"

namespace galley::kernels::test {
namespace {

constexpr int kHidden = 64, kInner = 96, kExperts = 7, kPicks = 3;
constexpr float kEps = 1e-5F;

/// A layer of experts in one format.
struct Mixture {
  Mixture(const Context& context, int bits, int group) : norm(random_floats(kHidden, 5, 0.2F)) {
    for (float& v : norm) v += 1.0F;
    for (int e = 0; e < kExperts; ++e) {
      const auto seed = static_cast<unsigned>(100 + 3 * e);
      gate.emplace_back(MatrixSpec{kInner, kHidden, bits, group, ops::ElementType::f32, false, seed});
      up.emplace_back(MatrixSpec{kInner, kHidden, bits, group, ops::ElementType::f32, false, seed + 1});
      down.emplace_back(MatrixSpec{kHidden, kInner, bits, group, ops::ElementType::f32, false, seed + 2});
      gate_up_packed.push_back(PackedMatrix::interleave(context.isa(), gate.back(), up.back()));
      down_packed.push_back(packed(context, down.back()));
    }
  }
  [[nodiscard]] MoeLayer layer(bool normalized) const {
    MoeLayer moe;
    moe.gate_up = gate_up_packed;
    moe.down = down_packed;
    moe.picks = kPicks;
    moe.normalized = normalized;
    moe.norm = norm.data();
    moe.eps = kEps;
    return moe;
  }

  Floats norm;
  std::vector<TestMatrix> gate, up, down;
  std::vector<PackedMatrix> gate_up_packed, down_packed;
};

Floats run(Context& context, const MoeLayer& moe, const Floats& scores, const Floats& x) {
  const int rows = static_cast<int>(x.size()) / kHidden;
  Floats y(x.size(), -7.0F);
  experts(context, moe, scores.data(), x.data(), rows, y.data());
  return y;
}

std::vector<double> times(const TestMatrix& m, const std::vector<double>& x) {
  std::vector<double> y;
  for (int r = 0; r < m.rows(); ++r) {
    double sum = 0;
    const Floats row = m.row(r);
    for (std::size_t k = 0; k < x.size(); ++k) sum += static_cast<double>(row[k]) * x[k];
    y.push_back(sum);
  }
  return y;
}

/// One row, in double; `picks` says which experts in which order.
std::vector<double> reference(const Mixture& m, const float* scores, const float* x, const std::vector<int>& picks,
                              bool normalized) {
  double all = 0, chosen = 0, square = 0;
  for (int e = 0; e < kExperts; ++e) all += std::exp(static_cast<double>(scores[e]));
  for (const int e : picks) chosen += std::exp(static_cast<double>(scores[e]));
  for (int k = 0; k < kHidden; ++k) square += static_cast<double>(x[k]) * static_cast<double>(x[k]);
  const double factor = 1 / std::sqrt(square / kHidden + static_cast<double>(kEps));
  std::vector<double> in(kHidden), out(x, x + kHidden);
  for (std::size_t k = 0; k < in.size(); ++k)
    in[k] = static_cast<double>(x[k]) * factor * static_cast<double>(m.norm[k]);
  for (const int e : picks) {
    const auto at = static_cast<std::size_t>(e);
    const auto gate = times(m.gate[at], in), up = times(m.up[at], in);
    std::vector<double> inner;
    for (std::size_t i = 0; i < gate.size(); ++i) inner.push_back(gate[i] / (1 + std::exp(-gate[i])) * up[i]);
    const auto down = times(m.down[at], inner);
    const double weight = std::exp(static_cast<double>(scores[e])) / (normalized ? chosen : all);
    for (std::size_t k = 0; k < out.size(); ++k) out[k] += weight * down[k];
  }
  return out;
}

class ExpertMixtures : public testing::TestWithParam<std::string> {
 protected:
  Isa isa() const { return select_isa(GetParam()); }
};

TEST_P(ExpertMixtures, MatchesTheReference) {
  Context context(isa(), 2);
  const Mixture plain(context, 0, 0);
  const Mixture quantized(context, 8, 32);
  constexpr int kRows = 9;
  const Floats x = random_floats(static_cast<std::size_t>(kRows * kHidden), 1);
  const Floats scores = random_floats(static_cast<std::size_t>(kRows * kExperts), 2, 2.0F);
  for (const bool normalized : {false, true}) {
    const Floats y = run(context, plain.layer(normalized), scores, x);
    const Floats rough = run(context, quantized.layer(normalized), scores, x);
    for (int r = 0; r < kRows; ++r) {
      const float* s = scores.data() + r * kExperts;
      std::vector<int> order(kExperts);
      for (int e = 0; e < kExperts; ++e) order[static_cast<std::size_t>(e)] = e;
      std::ranges::sort(order, [&](int a, int b) { return s[a] > s[b]; });
      order.resize(kPicks);
      const auto exact = reference(plain, s, x.data() + r * kHidden, order, normalized);
      const auto coarse = reference(quantized, s, x.data() + r * kHidden, order, normalized);
      double error = 0, size = 0;
      for (int k = 0; k < kHidden; ++k) {
        const auto at = static_cast<std::size_t>(r * kHidden + k);
        const auto i = static_cast<std::size_t>(k);
        EXPECT_NEAR(y[at], exact[i], 1e-4 * (1 + std::fabs(exact[i])));
        error += std::pow(static_cast<double>(rough[at]) - coarse[i], 2);
        size += coarse[i] * coarse[i];
      }
      EXPECT_LT(std::sqrt(error / size), 0.03);  // int8 activations
    }
  }
}

TEST_P(ExpertMixtures, FactorsMultiplyTheWeightsAndTheResidualCanStayOut) {
  Context context(isa(), 2);
  const Mixture m(context, 0, 0);
  const Floats x = random_floats(kHidden, 1), scores{0.5F, 3, -1, 2, 0, 1, -2};
  MoeLayer moe = m.layer(true);
  const Floats with = run(context, moe, scores, x);
  moe.residual = false;
  const Floats without = run(context, moe, scores, x);
  for (std::size_t k = 0; k < kHidden; ++k) EXPECT_EQ(without[k] + x[k], with[k]);
  const Floats halves(kExperts, 0.5F);
  moe.factors = halves.data();
  const Floats halved = run(context, moe, scores, x);
  for (std::size_t k = 0; k < kHidden; ++k) EXPECT_FLOAT_EQ(halved[k], 0.5F * without[k]);
  const Floats second{1, 0, 1, 1, 1, 1, 1};  // of the picks 1, 3, 5 the first does not count
  moe.factors = second.data();
  const Floats partial = run(context, moe, scores, x);
  const auto all = reference(m, scores.data(), x.data(), {1, 3, 5}, false);
  const auto first = reference(m, scores.data(), x.data(), {1}, false);
  double every = 0, chosen = 0;
  for (const float s : scores) every += std::exp(static_cast<double>(s));
  for (const int e : {1, 3, 5}) chosen += std::exp(static_cast<double>(scores[static_cast<std::size_t>(e)]));
  for (std::size_t k = 0; k < kHidden; ++k)
    EXPECT_NEAR(partial[k], (all[k] - first[k]) * every / chosen, 1e-4 * (1 + std::fabs(all[k])));
}

TEST_P(ExpertMixtures, ARowsBitsAreItsOwn) {
  constexpr int kRows = 40;
  const Floats x = random_floats(static_cast<std::size_t>(kRows * kHidden), 3);
  const Floats scores = random_floats(static_cast<std::size_t>(kRows * kExperts), 4, 2.0F);
  for (const int bits : {0, 4, 8}) {
    Context one(isa(), 1), three(isa(), 3);
    const Mixture m(one, bits, 32);
    const Floats together = run(three, m.layer(true), scores, x);
    three.set_max_tile(1);
    EXPECT_EQ(run(three, m.layer(true), scores, x), together);
    for (int r = 0; r < kRows; ++r) {
      const Floats row(x.begin() + r * kHidden, x.begin() + (r + 1) * kHidden);
      const Floats score(scores.begin() + r * kExperts, scores.begin() + (r + 1) * kExperts);
      const Floats alone = run(one, m.layer(true), score, row);
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + r * kHidden)) << "row " << r;
    }
  }
}

TEST_P(ExpertMixtures, OfEqualScoresTheLowerIndexAndFaultyRowsStayAlone) {
  Context context(isa(), 2);
  const Mixture m(context, 0, 0);
  Floats x = random_floats(static_cast<std::size_t>(2 * kHidden), 6);
  const Floats good(x.begin() + kHidden, x.end());
  const Floats tied{0, 1, 1, 1, 1, 1, 0};
  const auto expected = reference(m, tied.data(), good.data(), {1, 2, 3}, false);
  // The row before it is all NaN, its scores too.
  Floats scores(kExperts, std::numeric_limits<float>::quiet_NaN());
  scores.insert(scores.end(), tied.begin(), tied.end());
  std::fill(x.begin(), x.begin() + kHidden, std::numeric_limits<float>::quiet_NaN());
  const Floats y = run(context, m.layer(false), scores, x);
  EXPECT_TRUE(std::isnan(y[0]));
  for (std::size_t k = 0; k < kHidden; ++k)
    EXPECT_NEAR(y[kHidden + k], expected[k], 1e-4 * (1 + std::fabs(expected[k])));
  EXPECT_EQ(run(context, m.layer(false), tied, good), Floats(y.begin() + kHidden, y.end()));
}

TEST_P(ExpertMixtures, MismatchesThrow) {
  Context context(isa(), 1);
  const Mixture m(context, 0, 0);
  const Floats x(kHidden), scores(kExperts);
  MoeLayer moe = m.layer(true);
  moe.picks = kExperts + 1;
  EXPECT_THROW(run(context, moe, scores, x), std::invalid_argument);
  moe = m.layer(true);
  moe.down = moe.down.first(2);
  EXPECT_THROW(run(context, moe, scores, x), std::invalid_argument);
  moe = m.layer(true);
  moe.down = moe.gate_up;
  EXPECT_THROW(run(context, moe, scores, x), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, ExpertMixtures, testing::ValuesIn(supported_isas()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace galley::kernels::test
