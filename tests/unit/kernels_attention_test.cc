// QKV with RoPE and KV write, and attention over paged KV, against references in double; bit-invariance across chunks,
// threads and neighbours; garbage in unused slots.
#include <gtest/gtest.h>

#include "kernels_support.h"
#include "ops/kernels/kernel_table.h"

namespace galley::kernels::test {
namespace {

struct Shape {
  int heads, kv_heads, dim;
  KvElement element = KvElement::f16;
  int window = 0;
  float softcap = 0;
  int block_tokens = 32;
  int group = 0;  ///< of codes; 0: 64 where it divides dim, else 32
};

std::string text(const Shape& s) {
  return std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + "/" + std::to_string(s.dim) + " element " +
         std::to_string(static_cast<int>(s.element)) + " window " + std::to_string(s.window) + " cap " +
         std::to_string(s.softcap) + " block " + std::to_string(s.block_tokens) + " group " + std::to_string(s.group);
}

// One sequence fed through linear_qkv and attention in chunks; keeps each row's output bits and values.
struct Sequence {
  static constexpr int kHidden = 64;
  const Shape shape;
  TestMatrix qkv, consumer;
  Floats hidden, rope;

  Sequence(const Shape& s, int tokens, int out_group)
      : shape(s),
        qkv({(s.heads + 2 * s.kv_heads) * s.dim, kHidden, 4, 32}),
        consumer({32, s.heads * s.dim, out_group == 0 ? 0 : 4, out_group}),
        hidden(random_floats(static_cast<std::size_t>(tokens) * kHidden, 5)),
        rope(rope_table(tokens, s.dim)) {}

  struct Result {
    std::vector<std::vector<std::uint32_t>> bits;
    Floats q, out;
  };

  // `others`: rows of another sequence that share each step.
  Result feed(Context& context, TestPool& pool, const std::vector<std::int32_t>& table, const std::vector<int>& chunks,
              int others = 0) const {
    const PackedMatrix w = packed(context, qkv), next = packed(context, consumer);
    const int tokens = static_cast<int>(hidden.size()) / kHidden;
    std::vector<std::vector<std::int32_t>> other_tables;
    for (int i = 0; i < others; ++i) other_tables.push_back(pool.table(tokens));
    Result result;
    for (int at = 0, c = 0; at < tokens; ++c) {
      const int n = std::min(tokens - at, chunks[static_cast<std::size_t>(c) % chunks.size()]);
      const int rows = n + others;
      Floats x;
      std::vector<std::int32_t> position;
      std::vector<const std::int32_t*> tables;
      const int before = others / 2;
      for (int r = 0; r < rows; ++r) {
        const bool mine = r >= before && r < before + n;
        // Another sequence decodes position c; its tokens are this one's in another order.
        const int token = mine ? at + r - before : (c * 5 + r) % tokens;
        x.insert(x.end(), hidden.begin() + token * kHidden, hidden.begin() + (token + 1) * kHidden);
        position.push_back(mine ? token : c % tokens);
        tables.push_back(mine ? table.data() : other_tables[static_cast<std::size_t>(r < before ? r : r - n)].data());
      }
      Activations in, out;
      context.reshape(in, rows, w, false);
      norm_quantize(context, x.data(), kHidden, nullptr, nullptr, in);
      Floats q(static_cast<std::size_t>(rows * shape.heads * shape.dim));
      const RowPlaces places{rows, position.data(), tables.data()};
      QkvOutput to;
      to.places = places;
      to.kv = pool.kv;
      to.heads = shape.heads;
      to.q = q.data();
      to.q_scale = query_scale(1.0F / std::sqrt(static_cast<float>(shape.dim)));
      to.rope = {rope.data(), shape.dim, false};
      linear_qkv(context, {&w, &in}, to);
      context.reshape(out, rows, next, false);
      attention(context, {places, pool.kv, shape.heads, q.data(), shape.window, shape.softcap}, out);
      const Floats values = decoded(out);
      const std::ptrdiff_t width = shape.heads * shape.dim;
      result.q.insert(result.q.end(), q.begin() + before * width, q.begin() + (before + n) * width);
      result.out.insert(result.out.end(), values.begin() + before * width, values.begin() + (before + n) * width);
      for (int r = before; r < before + n; ++r) result.bits.push_back(row_bits(out, r));
      at += n;
    }
    return result;
  }
};

// Attention in double from the stored keys and values.
std::vector<double> reference(const Shape& s, const TestPool& pool, const std::int32_t* table, const Floats& q,
                              int row) {
  std::vector<double> out;
  for (int h = 0; h < s.heads; ++h) {
    const int kv = h / (s.heads / s.kv_heads);
    const int first = s.window > 0 ? std::max(0, row - s.window + 1) : 0;
    std::vector<double> score;
    double top = -1e300;
    for (int p = first; p <= row; ++p) {
      double dot = 0;
      for (int d = 0; d < s.dim; ++d) {
        dot += static_cast<double>(q[static_cast<std::size_t>((row * s.heads + h) * s.dim + d)]) *
               static_cast<double>(pool.key(table, p, kv, d));
      }
      dot *= 0.6931471805599453;  // q carries log2(e)
      if (s.softcap > 0) dot = static_cast<double>(s.softcap) * std::tanh(dot / static_cast<double>(s.softcap));
      score.push_back(dot);
      top = std::max(top, dot);
    }
    double sum = 0;
    for (double& v : score) sum += v = std::exp(v - top);
    for (int d = 0; d < s.dim; ++d) {
      double v = 0;
      for (int p = first; p <= row; ++p)
        v += score[static_cast<std::size_t>(p - first)] * static_cast<double>(pool.value(table, p, kv, d));
      out.push_back(v / sum);
    }
  }
  return out;
}

class AttentionTest : public testing::TestWithParam<std::string> {
 protected:
  Isa isa() const { return select_isa(GetParam()); }
};

TEST_P(AttentionTest, QkvMatchesReference) {
  Context context(isa(), 2);
  for (const KvElement element :
       {KvElement::f32, KvElement::f16, KvElement::bf16, KvElement::code8, KvElement::code4}) {
    for (const bool traditional : {false, true}) {
      for (const bool norms : {false, true}) {
        const int heads = 3, kv_heads = 1, dim = kv_quantized(element) ? (norms ? 64 : 96) : 48;
        const int dims = traditional ? 32 : dim, rows = 5, first_position = 29;
        const TestMatrix m({(heads + 2 * kv_heads) * dim, 64, 4, 32});
        const PackedMatrix w = packed(context, m);
        TestPool pool(element, kv_heads, dim, 32, 4);
        const auto table = pool.table(64);
        Activations in;
        const Floats x = random_floats(rows * 64, 3), ones(64, 1.0F), rope = rope_table(64, dims);
        const Floats q_norm = random_floats(96, 8), k_norm = random_floats(96, 9);
        context.reshape(in, rows, w, true);
        norm_quantize(context, x.data(), 64, nullptr, ones.data(), in);
        std::vector<std::int32_t> position;
        std::vector<const std::int32_t*> tables(rows, table.data());
        for (int r = 0; r < rows; ++r) position.push_back(first_position + r);
        Floats q(static_cast<std::size_t>(rows * heads * dim));
        QkvOutput to;
        to.places = {rows, position.data(), tables.data()};
        to.kv = pool.kv;
        to.heads = heads;
        to.q = q.data();
        to.q_scale = 0.25F;
        to.rope = {rope.data(), dims, traditional};
        to.q_norm = norms ? q_norm.data() : nullptr;
        to.k_norm = norms ? k_norm.data() : nullptr;
        linear_qkv(context, {&w, &in}, to);
        const auto y = reference_product(in, m, 1e-5F);
        for (int r = 0; r < rows; ++r) {
          const int p = position[static_cast<std::size_t>(r)];
          for (int h = 0; h < heads + 2 * kv_heads; ++h) {
            const double* v = y.data() + (r * (heads + 2 * kv_heads) + h) * dim;
            std::vector<double> t(v, v + dim);
            const Floats* weight = !norms || h > heads ? nullptr : h < heads ? &q_norm : &k_norm;
            if (weight != nullptr) {
              double sum = 0;
              for (const double e : t) sum += e * e;
              for (int d = 0; d < dim; ++d)
                t[static_cast<std::size_t>(d)] *=
                    static_cast<double>((*weight)[static_cast<std::size_t>(d)]) / std::sqrt(sum / dim + 1e-5);
            }
            if (h < heads) {
              for (double& e : t) e *= 0.25;
            }
            if (h <= heads) {
              const auto u = t;
              for (int i = 0; i < dims / 2; ++i) {
                const auto a = static_cast<std::size_t>(traditional ? 2 * i : i),
                           b = static_cast<std::size_t>(traditional ? 2 * i + 1 : dims / 2 + i);
                const double c = static_cast<double>(rope[static_cast<std::size_t>(p * dims + i)]),
                             s = static_cast<double>(rope[static_cast<std::size_t>(p * dims + dims / 2 + i)]);
                t[a] = u[a] * c - u[b] * s;
                t[b] = u[b] * c + u[a] * s;
              }
            }
            const double relative = h < heads || element == KvElement::f32 ? 0
                                    : element == KvElement::bf16           ? 4e-3
                                                                           : 5e-4;
            // Codes: half a step of the group's range, and the rounding of its scale and bias to fp16.
            const auto half_step = [&](int d) {
              if (h < heads || !kv_quantized(element)) return 0.0;
              const int g = d / pool.kv.group * pool.kv.group;
              const auto [low, high] = std::minmax_element(t.begin() + g, t.begin() + g + pool.kv.group);
              return (*high - *low) / (element == KvElement::code8 ? 255 : 15) * 0.502 + 1e-3 * std::fabs(*low);
            };
            for (int d = 0; d < dim; ++d) {
              const float got = h < heads    ? q[static_cast<std::size_t>((r * heads + h) * dim + d)]
                                : h == heads ? pool.key(table.data(), p, 0, d)
                                             : pool.value(table.data(), p, 0, d);
              const double want = t[static_cast<std::size_t>(d)];
              ASSERT_NEAR(got, want, relative * std::fabs(want) + 2e-4 + half_step(d))
                  << "head " << h << " row " << r << " dim " << d << " element " << static_cast<int>(element);
            }
          }
        }
        // Unwritten slots are untouched: still NaN bits.
        EXPECT_TRUE(std::isnan(pool.key(table.data(), first_position - 1, 0, 0)));
        EXPECT_TRUE(std::isnan(pool.value(table.data(), first_position + rows, 0, 0)));
      }
    }
  }
}

TEST_P(AttentionTest, ValuesCanBeTheKeysBeforeTheirNorm) {
  // q and k, the keys taken for values too: the same bits as q, k and once more k.
  Context context(isa(), 2);
  constexpr int kRows = 14, kHeads = 2, kKvHeads = 2;
  for (const int dim : {48, 512}) {
    for (const KvElement element : {KvElement::f32, KvElement::f16}) {
      const TestMatrix q_matrix({kHeads * dim, 64, 4, 32}), k_matrix({kKvHeads * dim, 64, 4, 32});
      const Floats x = random_floats(kRows * 64, 3), rope = rope_table(64, dim);
      const Floats k_norm = random_floats(static_cast<std::size_t>(dim), 9);
      const Floats v_norm(static_cast<std::size_t>(dim), 1.0F);
      std::vector<Floats> found;
      for (const bool taken : {true, false}) {
        std::vector<const ops::MatrixSource*> parts{&q_matrix, &k_matrix};
        if (!taken) parts.push_back(&k_matrix);
        const PackedMatrix w = PackedMatrix::concatenate(context.isa(), parts);
        TestPool pool(element, kKvHeads, dim, 32, 4);
        const auto table = pool.table(64);
        const std::vector<const std::int32_t*> tables(kRows, table.data());
        std::vector<std::int32_t> position;
        for (int r = 0; r < kRows; ++r) position.push_back(25 + r);
        Activations in;
        context.reshape(in, kRows, w, false);
        norm_quantize(context, x.data(), 64, nullptr, nullptr, in);
        Floats all(static_cast<std::size_t>(kRows * kHeads * dim));
        QkvOutput to;
        to.places = {kRows, position.data(), tables.data()};
        to.kv = pool.kv;
        to.heads = kHeads;
        to.q = all.data();
        to.rope = {rope.data(), dim, false};
        to.k_norm = k_norm.data();
        to.v_norm = v_norm.data();
        to.values_are_keys = taken;
        linear_qkv(context, {&w, &in}, to);
        const std::size_t queries = all.size();
        for (const int p : position) {
          for (int h = 0; h < kKvHeads; ++h) {
            for (int d = 0; d < dim; ++d) all.push_back(pool.key(table.data(), p, h, d));
            for (int d = 0; d < dim; ++d) all.push_back(pool.value(table.data(), p, h, d));
            double square = 0;
            for (auto v = all.end() - dim; v != all.end(); ++v)
              square += static_cast<double>(*v) * static_cast<double>(*v);
            EXPECT_NEAR(square / dim, 1.0, 2e-3);  // normed
          }
        }
        EXPECT_TRUE(std::ranges::none_of(all, [](float v) { return std::isnan(v); }));
        EXPECT_GT(all.size(), queries);
        found.push_back(std::move(all));
      }
      EXPECT_EQ(found[0], found[1]) << dim;
    }
  }
}

TEST_P(AttentionTest, MatchesReference) {
  const std::vector<Shape> shapes = {
      {4, 2, 16},
      {9, 3, 64},
      {16, 2, 128},
      {4, 4, 48, KvElement::bf16},
      {8, 1, 256, KvElement::f32},
      {4, 2, 512, KvElement::f16, 40},
      {9, 3, 64, KvElement::f32, 20},
      {4, 2, 16, KvElement::bf16, 7, 0, 16},
      {9, 3, 64, KvElement::f16, 0, 5.0F},
      {2, 2, 80, KvElement::f16, 33, 3.0F, 64},
      {9, 3, 64, KvElement::code8},
      {9, 3, 64, KvElement::code4},
      {16, 2, 128, KvElement::code4, 0, 0, 32, 32},
      {4, 1, 256, KvElement::code4, 20, 0, 16, 128},
      {4, 4, 96, KvElement::code4, 7, 5.0F},
      {5, 1, 32, KvElement::code8, 33, 0, 64},
  };
  for (const Shape& s : shapes) {
    const int tokens = 70;
    Context context(isa(), 2);
    TestPool pool(s.element, s.kv_heads, s.dim, s.block_tokens, 8, s.group);
    const auto table = pool.table(tokens);
    const Sequence sequence(s, tokens, 0);  // f32 output: nothing rounded on the way
    const auto result = sequence.feed(context, pool, table, {33, 1, 8, 3});
    for (int row = 0; row < tokens; ++row) {
      const auto expected = reference(s, pool, table.data(), result.q, row);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(result.out[static_cast<std::size_t>(row) * expected.size() + i], expected[i],
                    2e-5 * (1 + std::fabs(expected[i])))
            << text(s) << " row " << row << " at " << i;
      }
    }
  }
}

TEST_P(AttentionTest, BitsDoNotDependOnChunksThreadsOrNeighbours) {
  const bool slow = GetParam() == "scalar";
  for (const Shape& s : {Shape{4, 2, 16}, Shape{9, 3, 64, KvElement::f16, 24},
                         Shape{16, 2, 128, KvElement::bf16, 0, 4.0F}, Shape{9, 3, 64, KvElement::code4},
                         Shape{4, 2, 96, KvElement::code4, 24, 4.0F}, Shape{4, 2, 32, KvElement::code8}}) {
    const int tokens = 50;
    for (const int out_group : {32, 64}) {
      Context one(isa(), 1);
      const Sequence sequence(s, tokens, out_group);
      TestPool first(s.element, s.kv_heads, s.dim, 32, 2);
      const auto expected = sequence.feed(one, first, first.table(tokens), {1}).bits;
      for (const auto& bits : expected) {  // no garbage leaked into the scales
        const auto begin = static_cast<std::size_t>(s.heads * s.dim / 4);
        const auto end = begin + static_cast<std::size_t>(3 * s.heads * s.dim / out_group);
        for (std::size_t i = begin; i < end; i += 3) {
          ASSERT_LT(bits[i] & 0x7fffffffU, 0x7f800000U);
        }
      }
      for (const int threads : {1, 2, 3}) {
        if (slow && threads != 2) continue;
        Context context(isa(), threads);
        for (const auto& chunks : std::vector<std::vector<int>>{{1}, {2}, {7}, {16, 3}, {33}, {50}}) {
          for (const int others : {0, 1, 4}) {
            if (slow && (s.dim > 64 || others == 1 || chunks[0] == 2)) continue;
            context.set_max_tile(1 + (threads + others) % 4);
            TestPool pool(s.element, s.kv_heads, s.dim, 32, 10);
            const auto table = pool.table(tokens);
            ASSERT_EQ(sequence.feed(context, pool, table, chunks, others).bits, expected)
                << text(s) << " threads " << threads << " chunk " << chunks[0] << " others " << others;
          }
        }
      }
    }
  }
}

TEST_P(AttentionTest, LongContextsSplitWithoutAChange) {
  // Contexts over several segments of 512 keys, one decode row: spread over threads or not, same bits, right values.
  const bool slow = GetParam() == "scalar";
  for (const Shape& s :
       {Shape{4, 2, 16}, Shape{9, 3, 64, KvElement::f16, 700}, Shape{4, 2, 32, KvElement::bf16, 0, 3.0F},
        Shape{9, 3, 64, KvElement::code8, 700}, Shape{4, 2, 32, KvElement::code4, 0, 3.0F}}) {
    if (slow && s.dim == 64) continue;
    const int tokens = slow ? 1100 : 2000, dim = s.dim;
    TestPool pool(s.element, s.kv_heads, dim, 32, 64);
    const auto table = pool.table(tokens);
    {  // fill the cache
      Context context(isa(), 2);
      Sequence(s, tokens, 0).feed(context, pool, table, {tokens});
    }
    const TestMatrix consumer({32, s.heads * dim, 0, 0});
    for (const int position : {511, 512, 1023, tokens - 1}) {
      const Floats q = random_floats(static_cast<std::size_t>((position + 1) * s.heads * dim), 77, 0.3F);
      const std::int32_t at = position;
      const std::int32_t* t = table.data();
      const float* row = q.data() + static_cast<std::ptrdiff_t>(position) * s.heads * dim;
      std::vector<std::uint32_t> bits;
      for (const int threads : {1, 2, 4}) {
        Context context(isa(), threads);
        const PackedMatrix next = packed(context, consumer);
        Activations out;
        context.reshape(out, 1, next, false);
        attention(context, {{1, &at, &t}, pool.kv, s.heads, row, s.window, s.softcap}, out);
        if (threads == 1) {
          bits = row_bits(out, 0);
          const auto expected = reference(s, pool, table.data(), q, position);
          for (std::size_t i = 0; i < expected.size(); ++i)
            ASSERT_NEAR(out.x()[i], expected[i], 3e-5 * (1 + std::fabs(expected[i]))) << text(s);
        }
        ASSERT_EQ(row_bits(out, 0), bits) << text(s) << " threads " << threads << " position " << position;
      }
    }
  }
}

TEST_P(AttentionTest, EveryInstructionSetStoresTheSameCodes) {
  Context vector(isa(), 1), plain(select_isa("scalar"), 1);
  for (const KvElement element : {KvElement::code8, KvElement::code4}) {
    PagedKv kv;
    kv.element = element;
    kv.group = 32;
    kv.kv_heads = 1;
    kv.head_dim = 128;
    for (int trial = 0; trial < 200; ++trial) {
      alignas(64) float x[kMaxHeadDim];
      const Floats numbers =
          random_floats(128, static_cast<unsigned>(trial), std::exp2(static_cast<float>(trial % 40 - 20)));
      std::copy(numbers.begin(), numbers.end(), x);
      if (trial % 5 == 0) std::fill(x, x + 32, 0.25F);  // no range
      if (trial % 7 == 0) x[40] = 1e20F;                // beyond fp16
      if (trial % 11 == 0) x[70] = std::nanf("");
      for (const KvPart part : {KvPart::keys, KvPart::values}) {
        std::vector<std::byte> a(kv.run_bytes()), b = a;
        HeadTask task;
        task.dim = 128;
        task.kv = &kv;
        task.part = part;
        task.slot = trial % 16;
        task.run = a.data();
        vector.isa().kernels->head(task, x);
        task.run = b.data();
        plain.isa().kernels->head(task, x);
        if (trial % 11 == 0) {  // of the faulty group the scale alone counts
          EXPECT_TRUE(std::isnan(kv_number(kv, a.data(), part, task.slot, 64)));
          EXPECT_TRUE(std::isnan(kv_number(kv, b.data(), part, task.slot, 95)));
          EXPECT_FALSE(std::isnan(kv_number(kv, a.data(), part, task.slot, 96)));
        } else {
          ASSERT_EQ(a, b) << trial;
          if (trial % 5 == 0) {
            EXPECT_EQ(kv_number(kv, a.data(), part, task.slot, 3), 0.25F);
          }
        }
      }
    }
  }
}

TEST(PagedKvBytes, FourBitsHoldMoreThanThreeAndAHalfTimesTheRows) {
  PagedKv kv;
  kv.kv_heads = 3;
  kv.head_dim = 64;
  kv.group = 64;
  kv.element = KvElement::bf16;
  const std::size_t plain = kv.block_bytes();
  EXPECT_EQ(plain, 2U * 3U * 32U * 64U * 2U);
  kv.element = KvElement::code4;
  EXPECT_GE(static_cast<double>(plain) / static_cast<double>(kv.block_bytes()), 3.5);
  kv.element = KvElement::code8;
  EXPECT_GE(static_cast<double>(plain) / static_cast<double>(kv.block_bytes()), 1.8);
}

TEST_P(AttentionTest, BlocksBeforeAWindowAreNotRead) {
  const Shape s{4, 2, 16, KvElement::f16, 20};
  Context context(isa(), 1);
  TestPool pool(s.element, s.kv_heads, s.dim, 32, 8);
  auto table = pool.table(100);
  const Sequence sequence(s, 100, 0);
  sequence.feed(context, pool, table, {100});
  const TestMatrix consumer({32, s.heads * s.dim, 0, 0});
  const PackedMatrix next = packed(context, consumer);
  const Floats q = random_floats(static_cast<std::size_t>(s.heads * s.dim), 1);
  const std::int32_t position = 99;
  const std::int32_t* t = table.data();
  Activations before, after;
  context.reshape(before, 1, next, false);
  attention(context, {{1, &position, &t}, pool.kv, s.heads, q.data(), s.window, 0}, before);
  table[0] = table[1] = -1000000000;  // would fault if read
  context.reshape(after, 1, next, false);
  attention(context, {{1, &position, &t}, pool.kv, s.heads, q.data(), s.window, 0}, after);
  EXPECT_EQ(row_bits(before, 0), row_bits(after, 0));
}

INSTANTIATE_TEST_SUITE_P(Isa, AttentionTest, testing::ValuesIn(supported_isas()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace galley::kernels::test
