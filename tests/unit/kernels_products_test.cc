// Matrix products and their epilogues against references in double, and bit-invariance across rows, tiles and threads.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "kernels_support.h"
#include "ops/error.h"

namespace galley::kernels::test {
namespace {

// Input rows of `rows` x `k` in the form w reads, with a norm (weight 1 + noise) or without.
void fill(Context& context, Activations& a, const PackedMatrix& w, int rows, bool normed, unsigned seed) {
  const auto k = static_cast<std::size_t>(w.depth());
  const Floats x = random_floats(static_cast<std::size_t>(rows) * k, seed);
  Floats norm = random_floats(k, 99, 0.2F);
  for (float& v : norm) v += 1.0F;
  context.reshape(a, rows, w, normed);
  norm_quantize(context, x.data(), k, nullptr, normed ? norm.data() : nullptr, a);
}

std::vector<MatrixSpec> specs(int rows, int cols) {
  std::vector<MatrixSpec> all;
  for (const int bits : {4, 5, 6, 8}) {
    for (const int group : {16, 32, 64, 128}) {
      for (const auto type : {ops::ElementType::f16, ops::ElementType::f32})
        all.push_back({rows, cols, bits, group, type});
    }
    for (const int group : {16, 32}) all.push_back({rows, cols, bits, group, ops::ElementType::f16, true});
  }
  for (const int bits : {2, 3, 5, 6}) all.push_back({rows, cols, bits, 64, ops::ElementType::bf16});
  for (const auto type : {ops::ElementType::f32, ops::ElementType::f16, ops::ElementType::bf16}) {
    all.push_back({rows, cols, 0, 0, type});
  }
  return all;
}

std::string text(const MatrixSpec& s) {
  return "bits " + std::to_string(s.bits) + " group " + std::to_string(s.group) + " type " +
         std::to_string(static_cast<int>(s.type)) + (s.symmetric ? " symmetric" : "");
}

class Products : public testing::TestWithParam<std::string> {
 protected:
  Isa isa() const { return select_isa(GetParam()); }
};

TEST_P(Products, LinearMatchesReference) {
  Context context(isa(), 2);
  for (const MatrixSpec& spec : specs(100, 256)) {  // 100: not a multiple of 32
    const TestMatrix m(spec);
    const PackedMatrix w = packed(context, m);
    EXPECT_EQ(w.symmetric(), spec.symmetric) << text(spec);
    for (const int rows : {1, 2, 3, 5, 13, 33}) {
      for (const bool normed : {false, true}) {
        Activations a;
        fill(context, a, w, rows, normed, 3);
        const auto expected = reference_product(a, m, 1e-5F);
        Floats y(expected.size(), -7.0F);
        linear(context, {&w, &a, 1e-5F}, y.data(), 100);
        for (std::size_t i = 0; i < y.size(); ++i)
          ASSERT_NEAR(y[i], expected[i], 2e-5 * (10 + std::fabs(expected[i])))
              << text(spec) << " rows " << rows << " at " << i;
      }
    }
  }
}

TEST_P(Products, RowsAreInvariant) {
  for (const MatrixSpec& spec : specs(96, 128)) {
    const TestMatrix m(spec);
    Context one(isa(), 1);
    const PackedMatrix w = packed(one, m);
    Activations all;
    fill(one, all, w, 33, true, 5);
    Floats reference(33 * 96);
    linear(one, {&w, &all}, reference.data(), 96);
    const Floats x = random_floats(33 * 128, 5);
    Floats norm = random_floats(128, 99, 0.2F);
    for (float& v : norm) v += 1.0F;
    for (const int threads : {1, 2, 3}) {
      Context context(isa(), threads);
      if (GetParam() == "scalar" && threads != 2) continue;
      for (int tile = 1; tile <= context.isa().max_tile; ++tile) {
        context.set_max_tile(tile);
        for (int rows = 1; rows <= 33; rows += tile == context.isa().max_tile && GetParam() != "scalar" ? 1 : 4) {
          const int first = (rows * 7) % (34 - rows);  // another neighbourhood for each
          Activations a;
          context.reshape(a, rows, w, true);
          norm_quantize(context, x.data() + static_cast<std::size_t>(first) * 128, 128, nullptr, norm.data(), a);
          Floats y(static_cast<std::size_t>(rows) * 96);
          linear(context, {&w, &a}, y.data(), 96);
          ASSERT_EQ(0, std::memcmp(y.data(), reference.data() + first * 96, y.size() * sizeof(float)))
              << text(spec) << " threads " << threads << " tile " << tile << " rows " << rows;
          for (int r = 0; r < rows; ++r) ASSERT_EQ(row_bits(a, r), row_bits(all, first + r));
        }
      }
    }
  }
}

// Integer sums are exact and the float part is the same, so how the dot products are made leaves no trace. Deep rows,
// so that every buffer on the way wraps around.
TEST(Isas, SameLanesGiveTheSameBits) {
  for (const MatrixSpec& spec : specs(64, 1536)) {
    const TestMatrix m(spec);
    std::map<int, std::pair<std::string, Floats>> first;  // by lanes
    for (const std::string& name : supported_isas()) {
      if (name == "scalar") continue;  // slow, and compared with the others in every other test
      Context context(select_isa(name), 1);
      const PackedMatrix w = packed(context, m);
      Activations a;
      fill(context, a, w, 29, true, 5);  // two tiles of 15 and 14, or smaller ones
      Floats y(std::size_t{29} * 64);
      linear(context, {&w, &a}, y.data(), 64);
      const auto [it, inserted] = first.try_emplace(context.isa().lanes, name, y);
      EXPECT_EQ(0, std::memcmp(y.data(), it->second.second.data(), y.size() * sizeof(float)))
          << text(spec) << ": " << name << " and " << it->second.first;
    }
  }
}

TEST_P(Products, BiasAndConcatenation) {
  Context context(isa(), 1);
  const TestMatrix a({48, 64, 4, 32, ops::ElementType::f16, false, 1}),
      b({16, 64, 8, 32, ops::ElementType::f16, false, 2});
  const ops::MatrixSource* const both[] = {&a, &b};
  ops::VectorSource bias{"b.bias", random_floats(16, 4)};
  const ops::VectorSource* const biases[] = {nullptr, &bias};
  const PackedMatrix w = PackedMatrix::concatenate(context.isa(), both, biases, &context.pool());
  EXPECT_EQ(w.kind(), WeightKind::affine8);  // 4-bit codes beside 8-bit ones are widened
  EXPECT_EQ(w.columns(), 64);
  Activations x;
  fill(context, x, w, 3, true, 8);
  const auto ya = reference_product(x, a, 1e-5F), yb = reference_product(x, b, 1e-5F);
  Floats y(3 * 64);
  linear(context, {&w, &x}, y.data(), 64);
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t c = 0; c < 48; ++c) EXPECT_NEAR(y[r * 64 + c], ya[r * 48 + c], 1e-3);
    for (std::size_t c = 0; c < 16; ++c)
      EXPECT_NEAR(y[r * 64 + 48 + c], yb[r * 16 + c] + static_cast<double>(bias.values[c]), 1e-3);
  }
}

TEST_P(Products, ResidualLeavesTheNextInput) {
  Context context(isa(), 2);
  for (const int next_group : {0, 32, 64, 128}) {
    const int columns = next_group == 0 ? 72 : 256;  // 72: a ragged last unit
    const TestMatrix m({columns, 64, 4, 32}), next({32, columns, next_group == 0 ? 0 : 4, next_group});
    const PackedMatrix w = packed(context, m), consumer = packed(context, next);
    for (const int rows : {1, 3, 6, 17}) {
      Activations x, out, again;
      fill(context, x, w, rows, false, 11);
      const auto product = reference_product(x, m, 0);
      const auto n = static_cast<std::size_t>(columns);
      const Floats residual = random_floats(product.size(), 12), norm = random_floats(n, 13);
      Floats y(product.size());
      context.reshape(out, rows, consumer, true);
      linear_residual(context, {&w, &x}, {residual.data(), y.data(), n, 0.5F, norm.data(), &out});
      for (std::size_t i = 0; i < y.size(); ++i)
        ASSERT_NEAR(y[i], static_cast<double>(residual[i]) + 0.5 * product[i], 1e-4) << i;
      // The stand-alone norm gives the very same bits, also through a gather.
      context.reshape(again, rows, consumer, true);
      std::vector<std::int32_t> order(static_cast<std::size_t>(rows));
      for (int r = 0; r < rows; ++r) order[static_cast<std::size_t>(r)] = rows - 1 - r;
      norm_quantize(context, y.data(), n, order.data(), norm.data(), again);
      for (int r = 0; r < rows; ++r) ASSERT_EQ(row_bits(out, r), row_bits(again, rows - 1 - r));
      // And what it left is y * norm to within half a code.
      const Floats left = decoded(out);
      for (std::size_t i = 0; i < left.size(); ++i) {
        const float exact = y[i] * norm[i % n];
        ASSERT_NEAR(left[i], exact, next_group == 0 ? 1e-6F * std::fabs(exact) : 0.06F) << i;
      }
      const auto factor = rms_of(out, 1e-5F);
      for (std::size_t r = 0; r < factor.size(); ++r) {
        double sum = 0;
        for (std::size_t c = 0; c < n; ++c)
          sum += static_cast<double>(y[r * n + c]) * static_cast<double>(y[r * n + c]);
        ASSERT_NEAR(factor[r], 1 / std::sqrt(sum / columns + 1e-5), 1e-5);
      }
      Floats alone(y.size());
      linear_residual(context, {&w, &x}, {residual.data(), alone.data(), n, 0.5F, nullptr, nullptr});
      ASSERT_EQ(alone, y);
    }
  }
}

TEST_P(Products, GatedMatchesReference) {
  Context context(isa(), 2);
  for (const int bits : {0, 4, 8}) {
    for (const int next_group : {0, 32, 128}) {
      const int inter = next_group == 0 ? 40 : 256;
      const MatrixSpec spec{inter, 64, bits, bits == 0 ? 0 : 64, ops::ElementType::f32};
      MatrixSpec up_spec = spec;
      up_spec.seed = 2;
      const TestMatrix gate(spec), up(up_spec), next({32, inter, next_group == 0 ? 0 : 4, next_group});
      const PackedMatrix w = PackedMatrix::interleave(context.isa(), gate, up), consumer = packed(context, next);
      EXPECT_EQ(w.columns(), inter);
      for (const Gate kind : {Gate::silu, Gate::gelu_tanh}) {
        Activations x, out;
        fill(context, x, w, 5, true, 21);
        context.reshape(out, 5, consumer, false);
        linear_gated(context, {&w, &x}, kind, out);
        const auto g = reference_product(x, gate, 1e-5F), u = reference_product(x, up, 1e-5F);
        const Floats left = decoded(out);
        std::vector<double> exact;
        for (std::size_t i = 0; i < g.size(); ++i) {
          const double a =
              kind == Gate::silu
                  ? g[i] / (1 + std::exp(-g[i]))
                  : 0.5 * g[i] * (1 + std::tanh(0.7978845608028654 * (g[i] + 0.044715 * g[i] * g[i] * g[i])));
          exact.push_back(a * u[i]);
        }
        const std::size_t group = next_group == 0 ? 1 : static_cast<std::size_t>(next_group);
        for (std::size_t i = 0; i < exact.size(); ++i) {
          double top = 0;
          for (std::size_t j = i / group * group; j < (i / group + 1) * group; ++j)
            top = std::max(top, std::fabs(exact[j]));
          ASSERT_NEAR(left[i], exact[i], next_group == 0 ? 2e-5 * (1 + top) : top / 127 * 0.51 + 1e-4) << i;
        }
      }
    }
  }
}

TEST_P(Products, ArgMaxIsTheFirstLargest) {
  Context context(isa(), 3);
  const TestMatrix m({1000, 64, 8, 32});
  const PackedMatrix w = packed(context, m);
  for (const int rows : {1, 4, 9, 33}) {
    Activations x;
    fill(context, x, w, rows, true, 31);
    Floats y(static_cast<std::size_t>(rows) * 1000), value(static_cast<std::size_t>(rows));
    std::vector<std::int32_t> token(static_cast<std::size_t>(rows));
    linear(context, {&w, &x}, y.data(), 1000);
    linear_argmax(context, {&w, &x}, token.data(), value.data());
    for (std::size_t r = 0; r < token.size(); ++r) {
      const auto first = y.begin() + static_cast<std::ptrdiff_t>(r * 1000);
      ASSERT_EQ(token[r], std::max_element(first, first + 1000) - first);
      ASSERT_EQ(value[r], *std::max_element(first, first + 1000));
    }
  }
  // A matrix of equal rows: everything ties, the first wins; a NaN row has no winner.
  const TestMatrix one({1, 64, 0, 0, ops::ElementType::f32});
  std::vector<const ops::MatrixSource*> many(70, &one);
  const PackedMatrix same = PackedMatrix::concatenate(context.isa(), many);
  Activations x;
  context.reshape(x, 2, same, false);
  Floats in = random_floats(128, 1);
  in[64] = std::nanf("");
  norm_quantize(context, in.data(), 64, nullptr, nullptr, x);
  std::int32_t token[2];
  linear_argmax(context, {&same, &x}, token);
  EXPECT_EQ(token[0], 0);
  EXPECT_EQ(token[1], -1);
}

TEST_P(Products, ASoftCapBendsLogitsAndTheirArgMaxAlike) {
  Context context(isa(), 3);
  const TestMatrix m({1000, 64, 8, 32});
  const PackedMatrix w = packed(context, m);
  constexpr std::size_t kRows = 9;
  Activations x;
  fill(context, x, w, kRows, true, 31);
  Floats plain(kRows * 1000), y(kRows * 1000), value(kRows);
  linear(context, {&w, &x}, plain.data(), 1000);
  for (const float cap : {30.0F, 0.01F}) {  // the small one makes many of them equal
    linear(context, {&w, &x}, y.data(), 1000, cap);
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double exact =
          static_cast<double>(cap) * std::tanh(static_cast<double>(plain[i]) / static_cast<double>(cap));
      ASSERT_NEAR(y[i], exact, 1e-6 * static_cast<double>(cap)) << i;
    }
    std::vector<std::int32_t> token(kRows);
    linear_argmax(context, {&w, &x}, token.data(), value.data(), cap);
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto first = y.begin() + static_cast<std::ptrdiff_t>(r * 1000);
      ASSERT_EQ(token[r], std::max_element(first, first + 1000) - first);
      ASSERT_EQ(value[r], *std::max_element(first, first + 1000));
    }
  }
  const TestMatrix one({1, 64, 0, 0, ops::ElementType::f32});
  const PackedMatrix single = packed(context, one);
  context.reshape(x, 1, single, false);
  const Floats nan(64, std::nanf(""));
  norm_quantize(context, nan.data(), 64, nullptr, nullptr, x);
  linear(context, {&single, &x}, y.data(), 1, 30.0F);
  EXPECT_TRUE(std::isnan(y[0]));
}

TEST_P(Products, AFaultyRowStaysFaultyAndAlone) {
  Context context(isa(), 1);
  const TestMatrix m({64, 64, 4, 32});
  const PackedMatrix w = packed(context, m);
  Floats in = random_floats(3 * 64, 1);
  Activations good, bad;
  context.reshape(good, 3, w, false);
  norm_quantize(context, in.data(), 64, nullptr, nullptr, good);
  in[70] = std::nanf("");
  context.reshape(bad, 3, w, false);
  norm_quantize(context, in.data(), 64, nullptr, nullptr, bad);
  Floats y(3 * 64), z(3 * 64);
  linear(context, {&w, &good}, y.data(), 64);
  linear(context, {&w, &bad}, z.data(), 64);
  EXPECT_TRUE(std::isnan(z[64]));
  EXPECT_EQ(0, std::memcmp(y.data(), z.data(), 64 * 4));
  EXPECT_EQ(0, std::memcmp(y.data() + 128, z.data() + 128, 64 * 4));
}

TEST_P(Products, EmbeddingRowsAreExact) {
  Context context(isa(), 2);
  for (const MatrixSpec& spec : specs(100, 128)) {
    const TestMatrix m(spec);
    const PackedMatrix w = packed(context, m);
    const std::vector<std::int32_t> tokens = {0, 99, 31, 32, 7, 7, 64};
    Floats y(tokens.size() * 128), norm = random_floats(128, 3);
    Activations out, again;
    context.reshape(out, 7, w, true);
    embed(context, w, tokens, 1.0F, y.data(), 128, norm.data(), &out);
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      const Floats row = m.row(tokens[r]);
      for (std::size_t k = 0; k < 128; ++k) ASSERT_EQ(y[r * 128 + k], row[k]) << text(spec);
    }
    context.reshape(again, 7, w, true);
    norm_quantize(context, y.data(), 128, nullptr, norm.data(), again);
    for (int r = 0; r < 7; ++r) ASSERT_EQ(row_bits(out, r), row_bits(again, r));
    const std::int32_t wrong[] = {100};
    EXPECT_THROW(embed(context, w, wrong, 1.0F, y.data(), 128, nullptr, nullptr), std::invalid_argument);
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Products, testing::ValuesIn(supported_isas()), [](const auto& p) { return p.param; });

TEST(Packing, RefusesWhatItCannotRepresent) {
  const Isa isa = select_isa("scalar");
  const auto pack = [&](std::vector<MatrixSpec> specs) {
    std::vector<std::unique_ptr<TestMatrix>> own;
    std::vector<const ops::MatrixSource*> sources;
    for (const auto& s : specs) sources.push_back(own.emplace_back(std::make_unique<TestMatrix>(s)).get());
    return PackedMatrix::concatenate(isa, sources);
  };
  EXPECT_THROW(pack({{32, 96, 4, 64}}), ModelError);  // k not a multiple of the group
  EXPECT_THROW(pack({{32, 80, 4, 16}}), ModelError);
  EXPECT_THROW(pack({{32, 64, 4, 8}}), ModelError);
  EXPECT_THROW(pack({{32, 64, 4, 32}, {32, 128, 4, 32}}), ModelError);
  EXPECT_THROW(pack({{32, 64, 4, 32}, {32, 64, 0, 0}}), ModelError);
  EXPECT_THROW(pack({{32, 64, 0, 0, ops::ElementType::f16}, {32, 64, 0, 0, ops::ElementType::bf16}}), ModelError);
  EXPECT_THROW(pack({}), ModelError);
}

TEST(Packing, ScalesStayExact) {
  const Isa isa = select_isa("best");
  const TestMatrix half({32, 64, 4, 32, ops::ElementType::f16}), full({32, 64, 4, 32, ops::ElementType::f32});
  const ops::MatrixSource *const a[] = {&half}, *const b[] = {&full};
  EXPECT_EQ(PackedMatrix::concatenate(isa, a).scale_kind(), ScaleKind::half);
  EXPECT_EQ(PackedMatrix::concatenate(isa, b).scale_kind(), ScaleKind::single);
}

TEST(IsaChoice, Names) {
  EXPECT_NO_THROW(select_isa("best"));
  EXPECT_EQ(select_isa("scalar").name, "scalar");
  EXPECT_EQ(supported_isas().front(), select_isa("best").name);
  EXPECT_THROW(select_isa("mmx"), Error);
  EXPECT_NE(isa_report().find("scalar"), std::string::npos);
}

}  // namespace
}  // namespace galley::kernels::test
