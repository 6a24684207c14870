// Contiguous caches: whatever happens to a batch, each row must keep exactly the tokens it wrote, where mlx-lm would
// have them. Row r's key at position p is 100 r + p (+ 0.5 for values), so every misplaced token shows.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <vector>

#include "kv/batch_cache.h"
#include "kv/contiguous.h"

namespace galley::kv {
namespace {

namespace mx = mlx::core;

constexpr int kHeads = 2;
constexpr int kWidth = 4;

struct Piece {
  int row;
  int first;  // position
  int count;
  int padded;  // columns, right-padded with -1
};

KeysValues pieces(const std::vector<Piece>& rows) {
  const int columns = rows.front().padded;
  std::vector<float> keys;
  std::vector<float> values;
  for (const Piece& piece : rows) {
    for (int head = 0; head < kHeads; ++head) {
      for (int column = 0; column < columns; ++column) {
        const float key = column < piece.count ? static_cast<float>(100 * piece.row + piece.first + column) : -1.0F;
        keys.insert(keys.end(), kWidth, key);
        values.insert(values.end(), kWidth, key + 0.5F);
      }
    }
  }
  const mx::Shape shape{static_cast<int>(rows.size()), kHeads, columns, kWidth};
  return {mx::array(keys.data(), shape), mx::array(values.data(), shape)};
}

// The number at every column of one row, after checking that all heads and widths agree.
std::vector<float> columns_of(const mx::array& cache, int row) {
  mx::array dense = mx::contiguous(cache);
  dense.eval();
  const int columns = dense.shape(2);
  std::vector<float> out;
  const float* at = dense.data<float>() + static_cast<std::ptrdiff_t>(row) * kHeads * columns * kWidth;
  for (int column = 0; column < columns; ++column) out.push_back(at[column * kWidth]);
  for (int head = 0; head < kHeads; ++head) {
    for (int column = 0; column < columns; ++column) {
      for (int i = 0; i < kWidth; ++i) {
        EXPECT_EQ(at[(head * columns + column) * kWidth + i], out[static_cast<std::size_t>(column)]);
      }
    }
  }
  return out;
}

void expect_row(const BatchKvCache& cache, int index, int row, int tokens) {
  ASSERT_EQ(cache.offsets()[static_cast<std::size_t>(index)], tokens);
  ASSERT_EQ(cache.left_padding()[static_cast<std::size_t>(index)], cache.size() - tokens);
  const KvCache own = cache.extract(index);
  ASSERT_EQ(own.size(), tokens);
  const auto keys = columns_of(own.buffer()->keys, 0);
  const auto values = columns_of(own.buffer()->values, 0);
  for (int position = 0; position < tokens; ++position) {
    EXPECT_EQ(keys[static_cast<std::size_t>(position)], static_cast<float>(100 * row + position));
    EXPECT_EQ(values[static_cast<std::size_t>(position)], static_cast<float>(100 * row + position) + 0.5F);
  }
}

void write(BatchKvCache& cache, const std::vector<Piece>& rows) {
  const KeysValues fresh = pieces(rows);
  cache.update_and_fetch(fresh.keys, fresh.values);
}

// Rows 0, 1, 2 with 2, 5 and 3 tokens, written ragged.
BatchKvCache ragged() {
  BatchKvCache cache({0, 0, 0});
  cache.prepare({2, 5, 3}, {3, 0, 2});
  write(cache, {{0, 0, 2, 5}, {1, 0, 5, 5}, {2, 0, 3, 5}});
  cache.finalize();
  return cache;
}

TEST(KvCache, GrowsByStepsAndReturnsWhatWasWritten) {
  KvCache cache;
  int position = 0;
  for (const int count : {5, 1, 300, 1}) {
    const KeysValues fresh = pieces({{0, position, count, count}});
    const KeysValues all = cache.update_and_fetch(fresh.keys, fresh.values);
    position += count;
    ASSERT_EQ(all.keys.shape(2), position);
    const auto keys = columns_of(all.keys, 0);
    for (int i = 0; i < position; ++i) EXPECT_EQ(keys[static_cast<std::size_t>(i)], static_cast<float>(i));
    EXPECT_LT(cache.buffer()->capacity(), position + growth_tokens);
  }
  EXPECT_EQ(std::get<int>(cache.offset()), 307);
  EXPECT_EQ(cache.trim(7), 7);
  EXPECT_EQ(cache.size(), 300);
  EXPECT_EQ(cache.trim(1000), 300);
  EXPECT_EQ(cache.size(), 0);
}

TEST(KvCache, MaskIsCausalOnlyForSeveralTokens) {
  const KvCache cache;
  EXPECT_EQ(cache.mask(1, 0).mode, "");
  EXPECT_EQ(cache.mask(2, 0).mode, "causal");
  EXPECT_FALSE(cache.mask(2, 0).array.has_value());
}

TEST(BatchKvCache, FinalizeTurnsRightPaddingIntoLeftPadding) {
  const BatchKvCache cache = ragged();
  EXPECT_EQ(cache.size(), 5);
  expect_row(cache, 0, 0, 2);
  expect_row(cache, 1, 1, 5);
  expect_row(cache, 2, 2, 3);
}

TEST(BatchKvCache, DecodeWritesBehindEveryRow) {
  BatchKvCache cache = ragged();
  write(cache, {{0, 2, 1, 1}, {1, 5, 1, 1}, {2, 3, 1, 1}});
  expect_row(cache, 0, 0, 3);
  expect_row(cache, 1, 1, 6);
  expect_row(cache, 2, 2, 4);
}

TEST(BatchKvCache, OffsetsAreReadBeforeTheWrite) {
  BatchKvCache cache = ragged();
  mx::array before = std::get<mx::array>(cache.offset());
  write(cache, {{0, 2, 1, 1}, {1, 5, 1, 1}, {2, 3, 1, 1}});
  before.eval();
  EXPECT_EQ(std::vector<int>(before.data<int>(), before.data<int>() + 3), (std::vector<int>{2, 5, 3}));
}

TEST(BatchKvCache, FilterDropsRowsAndCommonPadding) {
  BatchKvCache cache = ragged();
  const std::vector<int> keep{0, 2};
  cache.filter(keep);
  EXPECT_EQ(cache.size(), 3);
  EXPECT_EQ(cache.left_padding()[1], 0);
  expect_row(cache, 0, 0, 2);
  expect_row(cache, 1, 2, 3);
}

TEST(BatchKvCache, CopiesAreIndependent) {
  BatchKvCache cache = ragged();
  BatchKvCache copy = cache;
  copy.filter(std::vector<int>{1});
  write(copy, {{1, 5, 1, 1}});
  expect_row(copy, 0, 1, 6);
  expect_row(cache, 1, 1, 5);
}

TEST(BatchKvCache, ExtendAlignsAtTheEndWhicheverIsLonger) {
  for (const bool longer_first : {true, false}) {
    BatchKvCache small({0});
    write(small, {{3, 0, 2, 2}});
    BatchKvCache big = ragged();
    BatchKvCache& joined = longer_first ? big : small;
    joined.extend(longer_first ? small : big);
    ASSERT_EQ(joined.rows(), 4);
    EXPECT_EQ(joined.size(), 5);
    const int first = longer_first ? 0 : 1;
    expect_row(joined, first, 0, 2);
    expect_row(joined, first + 1, 1, 5);
    expect_row(joined, first + 2, 2, 3);
    expect_row(joined, longer_first ? 3 : 0, 3, 2);
    // And they go on together.
    std::vector<Piece> next{{0, 2, 1, 1}, {1, 5, 1, 1}, {2, 3, 1, 1}};
    next.insert(longer_first ? next.end() : next.begin(), Piece{3, 2, 1, 1});
    write(joined, next);
    expect_row(joined, longer_first ? 3 : 0, 3, 3);
  }
}

TEST(BatchKvCache, ExtendWithUnequalCapacities) {
  BatchKvCache small({0});
  write(small, {{3, 0, 2, 2}});
  BatchKvCache big({0});
  write(big, {{1, 0, 90, 90}});
  for (int position = 90; position < 600; position += 10) write(big, {{1, position, 10, 10}});
  small.extend(big);
  EXPECT_EQ(small.size(), 600);
  expect_row(small, 0, 3, 2);
  expect_row(small, 1, 1, 600);
}

TEST(BatchKvCache, EmptyRowsJoinRowsWithTokens) {
  BatchKvCache cache = ragged();
  cache.extend(BatchKvCache({0, 0}));
  ASSERT_EQ(cache.rows(), 5);
  EXPECT_EQ(cache.offsets()[4], 0);
  EXPECT_EQ(cache.left_padding()[4], 5);
  write(cache, {{0, 2, 1, 1}, {1, 5, 1, 1}, {2, 3, 1, 1}, {3, 0, 1, 1}, {4, 0, 1, 1}});
  expect_row(cache, 4, 4, 1);
  expect_row(cache, 1, 1, 6);

  BatchKvCache both({0});
  both.extend(BatchKvCache({0}));
  EXPECT_EQ(both.rows(), 2);
  EXPECT_EQ(both.size(), 0);
}

TEST(BatchKvCache, MergeOfSingleRowsAndBack) {
  std::vector<KvCache> rows(3);
  for (int row = 0; row < 2; ++row) {
    const KeysValues fresh = pieces({{row, 0, 4 + 3 * row, 4 + 3 * row}});
    rows[static_cast<std::size_t>(row)].update_and_fetch(fresh.keys, fresh.values);
  }
  const std::vector<const KvCache*> pointers{rows.data(), &rows[1], &rows[2]};
  const BatchKvCache merged = BatchKvCache::merge(pointers);
  EXPECT_EQ(merged.size(), 7);
  expect_row(merged, 0, 0, 4);
  expect_row(merged, 1, 1, 7);
  EXPECT_EQ(merged.offsets()[2], 0);
  EXPECT_EQ(BatchKvCache::merge(std::vector<const KvCache*>{&rows[2]}).size(), 0);
}

TEST(BatchKvCache, TrimForgetsTheLastTokensOfEveryRow) {
  BatchKvCache cache = ragged();
  EXPECT_EQ(cache.trim(1), 1);
  EXPECT_EQ(cache.size(), 4);
  expect_row(cache, 0, 0, 1);
  expect_row(cache, 1, 1, 4);
  write(cache, {{0, 1, 1, 1}, {1, 4, 1, 1}, {2, 2, 1, 1}});
  expect_row(cache, 0, 0, 2);
}

TEST(BatchKvCache, MaskHidesPaddingAndTheFuture) {
  const BatchKvCache cache = ragged();
  for (const int window : {0, 3}) {
    const ops::AttentionMask mask = cache.mask(2, window);
    EXPECT_EQ(mask.mode, "array");
    mx::array seen = mx::contiguous(*mask.array);
    seen.eval();
    ASSERT_EQ(seen.shape(), (mx::Shape{3, 1, 2, 7}));
    for (int row = 0; row < 3; ++row) {
      for (int token = 0; token < 2; ++token) {
        for (int column = 0; column < 7; ++column) {
          const int at = 5 + token;
          const bool expected = column >= cache.left_padding()[static_cast<std::size_t>(row)] && column <= at &&
                                (window == 0 || at < column + window);
          EXPECT_EQ(seen.data<bool>()[(row * 2 + token) * 7 + column], expected)
              << row << ' ' << token << ' ' << column;
        }
      }
    }
  }
}

TEST(BatchKvCache, MaskIsAnArrayEvenForOneRowAndOneToken) {
  BatchKvCache cache({0});
  write(cache, {{0, 0, 3, 3}});
  EXPECT_EQ(cache.mask(1, 0).array->shape(), (mx::Shape{1, 1, 1, 4}));
}

KeysValues random_pieces(int rows, int columns) {
  const mx::Shape shape{rows, kHeads, columns, 64};
  return {mx::random::normal(shape), mx::random::normal(shape)};
}

bool same(const KeysValues& a, const KeysValues& b) {
  const auto x = a.arrays(), y = b.arrays();
  if (x.size() != y.size()) return false;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i].dtype() != y[i].dtype() || !mx::array_equal(x[i], y[i]).item<bool>()) return false;
  }
  return true;
}

TEST(QuantizedBatchKvCache, HoldsWhatAPlainOneHoldsQuantizedTokenByToken) {
  for (const ops::KvFormat format : {ops::KvFormat{8, 64}, ops::KvFormat{4, 64}, ops::KvFormat{4, 32}}) {
    BatchKvCache plain({0, 0, 0});
    BatchKvCache quantized({0, 0, 0}, format);
    const auto both = [&](const auto& f) {
      f(plain, ops::KvFormat{});
      f(quantized, format);
    };
    const auto write_both = [&](int columns) {
      const KeysValues fresh = random_pieces(plain.rows(), columns);
      plain.update_and_fetch(fresh.keys, fresh.values);
      quantized.update_and_fetch(fresh.keys, fresh.values);
      for (int row = 0; row < plain.rows(); ++row) {
        EXPECT_TRUE(same(*quantized.extract(row).buffer(), plain.extract(row).buffer()->quantized(format)));
      }
    };
    both([](BatchKvCache& cache, ops::KvFormat) { cache.prepare({2, 5, 3}, {3, 0, 2}); });
    write_both(5);
    both([](BatchKvCache& cache, ops::KvFormat) { cache.finalize(); });
    write_both(1);
    const KeysValues other = random_pieces(2, 300);
    both([&](BatchKvCache& cache, ops::KvFormat own) {
      BatchKvCache late({0, 0}, own);
      late.update_and_fetch(other.keys, other.values);
      cache.extend(late);
    });
    write_both(1);
    both([](BatchKvCache& cache, ops::KvFormat) { cache.filter({3, 1}); });
    write_both(2);
    EXPECT_LT(quantized.nbytes() * (format.bits == 8 ? 3U : 5U), plain.nbytes());  // of float32
  }
}

TEST(QuantizedKvCache, IsPlainUntilItSettles) {
  const ops::KvFormat format{4, 64};
  KvCache plain;
  KvCache quantized(format);
  for (const int columns : {5, 1, 300, 1}) {
    const KeysValues fresh = random_pieces(1, columns);
    const KeysValues all = plain.update_and_fetch(fresh.keys, fresh.values);
    const KeysValues found = quantized.update_and_fetch(fresh.keys, fresh.values);
    EXPECT_TRUE(same(found, columns == 5 ? all : all.quantized(format)));
    quantized.settle();
    EXPECT_TRUE(quantized.buffer()->groups.has_value());
    plain.settle();
    EXPECT_FALSE(plain.buffer()->groups.has_value());
  }
}

}  // namespace
}  // namespace galley::kv
