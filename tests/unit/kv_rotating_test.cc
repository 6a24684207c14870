// Rings with a sliding window: whatever happens to them, a new token must see exactly its row's newest `window` tokens,
// itself included, and nothing of another row or of padding. What a token sees is read off the mask and the keys that
// the write returns. Row r's key at position p is 1000 r + p (+ 0.5 for values), so every misplaced token shows.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "kv/batch_rotating.h"
#include "kv/rotating.h"

namespace galley::kv {
namespace {

namespace mx = mlx::core;

constexpr int kHeads = 2;
constexpr int kWidth = 4;
constexpr int kWindow = 8;

float code(int row, int position) { return static_cast<float>(1000 * row + position); }

struct Piece {
  int row;
  int first;  // position
  int count;
};

/// The pieces as rows, right-padded with -1 to the longest.
KeysValues as_rows(const std::vector<Piece>& rows) {
  int columns = 0;
  for (const Piece& piece : rows) columns = std::max(columns, piece.count);
  std::vector<float> keys;
  std::vector<float> values;
  for (const Piece& piece : rows) {
    for (int head = 0; head < kHeads; ++head) {
      for (int column = 0; column < columns; ++column) {
        const float key = column < piece.count ? code(piece.row, piece.first + column) : -1.0F;
        keys.insert(keys.end(), kWidth, key);
        values.insert(values.end(), kWidth, key + 0.5F);
      }
    }
  }
  const mx::Shape shape{static_cast<int>(rows.size()), kHeads, columns, kWidth};
  return {mx::array(keys.data(), shape), mx::array(values.data(), shape)};
}

mx::array evaluated(const mx::array& a) {
  mx::array dense = mx::contiguous(a);
  dense.eval();
  return dense;
}

/// The keys of one row that its new token `token` (of `tokens`) sees, sorted; checks that values go with them.
std::vector<float> seen(const ops::AttentionMask& mask, const KeysValues& all, int row, int token, int tokens) {
  const mx::array keys = evaluated(all.keys);
  const mx::array values = evaluated(all.values);
  const int columns = all.capacity();
  std::vector<bool> visible(static_cast<std::size_t>(columns), true);
  if (mask.mode == "causal") {
    for (int c = 0; c < columns; ++c) visible[static_cast<std::size_t>(c)] = c <= columns - tokens + token;
  } else if (mask.mode == "array") {
    const mx::array rows = evaluated(mx::broadcast_to(*mask.array, {keys.shape(0), 1, tokens, columns}));
    const bool* at = rows.data<bool>() + static_cast<std::ptrdiff_t>(row * tokens + token) * columns;
    for (int c = 0; c < columns; ++c) visible[static_cast<std::size_t>(c)] = at[c];
  } else {
    EXPECT_EQ(tokens, 1);
  }
  std::vector<float> found;
  for (int c = 0; c < columns; ++c) {
    if (!visible[static_cast<std::size_t>(c)]) continue;
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * kHeads * columns * kWidth + c * kWidth;
    const std::ptrdiff_t last = at + static_cast<std::ptrdiff_t>(columns) * kWidth + kWidth - 1;  // of the other head
    found.push_back(keys.data<float>()[at]);
    EXPECT_EQ(keys.data<float>()[last], found.back());
    EXPECT_EQ(values.data<float>()[at], found.back() + 0.5F);
    EXPECT_EQ(values.data<float>()[last], found.back() + 0.5F);
  }
  std::ranges::sort(found);
  return found;
}

std::vector<float> newest(int row, int position, int window) {
  std::vector<float> codes;
  for (int p = std::max(0, position - window + 1); p <= position; ++p) codes.push_back(code(row, p));
  return codes;
}

// ---- one row

/// Writes the next `count` tokens of row 0 and checks what each of them sees.
void write(RotatingKvCache& cache, int count, int window = kWindow) {
  const int first = std::get<int>(cache.offset());
  const ops::AttentionMask mask = cache.mask(count, window);
  const KeysValues fresh = as_rows({{0, first, count}});
  const KeysValues all = cache.update_and_fetch(fresh.keys, fresh.values);
  for (int token = 0; token < count; ++token) {
    EXPECT_EQ(seen(mask, all, 0, token, count), newest(0, first + token, window)) << "position " << first + token;
  }
  EXPECT_EQ(cache.position(), first + count);
  EXPECT_EQ(cache.size(), std::min(first + count, cache.max_size()));
}

TEST(RotatingKvCache, DecodesPastItsWindow) {
  RotatingKvCache cache(kWindow);
  for (int step = 0; step < 3 * kWindow; ++step) write(cache, 1);
  EXPECT_EQ(cache.buffer()->capacity(), kWindow);
}

TEST(RotatingKvCache, PromptsShorterAndLongerThanTheWindow) {
  for (const int prompt : {2, 5, kWindow - 1, kWindow, kWindow + 1, 3 * kWindow}) {
    RotatingKvCache cache(kWindow);
    write(cache, prompt);
    for (int step = 0; step < 2 * kWindow + 1; ++step) write(cache, 1);
    EXPECT_EQ(cache.buffer()->capacity(), kWindow);
  }
}

TEST(RotatingKvCache, PromptsInPieces) {
  for (const int piece : {2, 3, kWindow - 1, kWindow, kWindow + 3}) {
    RotatingKvCache cache(kWindow);
    for (int i = 0; i < 6; ++i) {
      write(cache, piece);
      EXPECT_LE(cache.buffer()->capacity(), kWindow - 1 + piece);
    }
    for (int step = 0; step < kWindow + 2; ++step) write(cache, 1);
    write(cache, piece);  // and several tokens again, after the ring has turned
    write(cache, 1);
  }
}

TEST(RotatingKvCache, GrowsByStepsUpToTheWindow) {
  RotatingKvCache cache(600);
  write(cache, 3, 600);
  write(cache, 1, 600);
  EXPECT_EQ(cache.buffer()->capacity(), 3 + growth_tokens);
  for (int step = 0; step < 700; ++step) {
    const KeysValues fresh = as_rows({{0, cache.position(), 1}});
    cache.update_and_fetch(fresh.keys, fresh.values);
    if (step % 50 == 0) mx::eval(cache.arrays());
  }
  EXPECT_EQ(cache.buffer()->capacity(), 600);
  write(cache, 1, 600);
}

TEST(RotatingKvCache, AWindowNarrowerThanTheRing) {
  RotatingKvCache cache(12);
  write(cache, 5, kWindow);
  for (int step = 0; step < 30; ++step) write(cache, 1, kWindow);
  write(cache, 4, kWindow);
  write(cache, 1, kWindow);
}

TEST(RotatingKvCache, KeepsItsFirstTokens) {
  constexpr int kKeep = 2;
  for (const int prompt : {4, 3 * kWindow}) {
    RotatingKvCache cache(kWindow, kKeep);
    const KeysValues fresh = as_rows({{0, 0, prompt}});
    cache.update_and_fetch(fresh.keys, fresh.values);
    for (int step = 0; step < 2 * kWindow; ++step) {
      const int position = cache.position();
      const ops::AttentionMask mask = cache.mask(1, 0);
      const KeysValues one = as_rows({{0, position, 1}});
      const KeysValues all = cache.update_and_fetch(one.keys, one.values);
      std::vector<float> expected;
      for (int p = 0; p <= position; ++p) {
        if (p < kKeep || p > position - (kWindow - kKeep)) expected.push_back(code(0, p));
      }
      EXPECT_EQ(seen(mask, all, 0, 0, 1), expected) << "position " << position;
    }
  }
}

TEST(RotatingKvCache, ForgetsUntilItHasWrapped) {
  RotatingKvCache cache(kWindow);
  write(cache, 5);
  write(cache, 1);
  EXPECT_TRUE(cache.trimmable());
  EXPECT_EQ(cache.trim(2), 2);
  EXPECT_EQ(cache.position(), 4);
  write(cache, 1);
  EXPECT_EQ(cache.trim(100), 5);
  for (int step = 0; step < kWindow; ++step) write(cache, 1);
  EXPECT_FALSE(cache.trimmable());
}

TEST(RotatingKvCache, CopiesAreIndependent) {
  RotatingKvCache cache(kWindow);
  write(cache, 6);
  RotatingKvCache copy = cache;
  for (int step = 0; step < 5; ++step) write(copy, 1);
  write(cache, 1);
  EXPECT_EQ(copy.position(), 11);
}

TEST(QuantizedRotatingKvCache, HoldsWhatAPlainOneHoldsQuantizedTokenByToken) {
  const ops::KvFormat format{4, 64};
  const auto same = [](const KeysValues& a, const KeysValues& b) {
    const auto x = a.arrays(), y = b.arrays();
    return std::ranges::equal(
        x, y, [](const mx::array& l, const mx::array& r) { return mx::array_equal(l, r).item<bool>(); });
  };
  for (const int keep : {0, 2}) {
    RotatingKvCache plain(kWindow, keep);
    RotatingKvCache quantized(kWindow, keep, format);
    bool first = true;
    for (const int columns : {3, 1, 1, 7, 1, 12, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5}) {
      const mx::Shape shape{1, kHeads, columns, 64};
      const mx::array k = mx::random::normal(shape), v = mx::random::normal(shape);
      const KeysValues all = plain.update_and_fetch(k, v);
      EXPECT_TRUE(same(quantized.update_and_fetch(k, v), first ? all : all.quantized(format)));
      quantized.settle();
      first = false;
    }
    EXPECT_TRUE(same(quantized.in_order(), plain.in_order().quantized(format)));
  }
}

// ---- a batch

/// A batch and who its rows are, in order, with how many tokens each has.
struct Batch {
  explicit Batch(std::vector<int> names)
      : who(std::move(names)), length(who.size(), 0), cache(kWindow, std::vector<int>(who.size(), 0)) {}

  std::vector<int> who;
  std::vector<int> length;
  BatchRotatingKvCache cache;

  /// Writes the next counts[i] tokens of each row as one ragged piece and checks what they see.
  void prompt(const std::vector<int>& counts) {
    const int columns = *std::ranges::max_element(counts);
    std::vector<int> padding;
    for (const int count : counts) padding.push_back(columns - count);
    cache.prepare(counts, padding);
    write(counts);
    cache.finalize();
    expect_offsets();
  }

  void decode(int steps = 1) {
    for (int step = 0; step < steps; ++step) write(std::vector<int>(who.size(), 1));
    expect_offsets();
    EXPECT_LE(cache.buffer()->capacity(), kWindow);
  }

  void keep(const std::vector<int>& rows) {
    cache.filter(rows);
    who = taken(who, rows);
    length = taken(length, rows);
  }

  void join(const Batch& other) {
    cache.extend(other.cache);
    who.insert(who.end(), other.who.begin(), other.who.end());
    length.insert(length.end(), other.length.begin(), other.length.end());
    EXPECT_EQ(cache.rows(), static_cast<int>(who.size()));
    expect_offsets();
  }

  void expect_offsets() const { EXPECT_EQ(std::vector<int>(cache.offsets().begin(), cache.offsets().end()), length); }

 private:
  void write(const std::vector<int>& counts) {
    const int columns = *std::ranges::max_element(counts);
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < who.size(); ++i) pieces.push_back({who[i], length[i], counts[i]});
    const mx::array offsets = evaluated(std::get<mx::array>(cache.offset()));
    const ops::AttentionMask mask = cache.mask(columns, kWindow);
    const KeysValues fresh = as_rows(pieces);
    const KeysValues all = cache.update_and_fetch(fresh.keys, fresh.values);
    ASSERT_EQ(mask.mode, "array");
    ASSERT_EQ(mask.array->shape(), (mx::Shape{cache.rows(), 1, columns, all.capacity()}));
    for (std::size_t i = 0; i < who.size(); ++i) {
      EXPECT_EQ(offsets.data<int>()[i], length[i]);
      for (int token = 0; token < counts[i]; ++token) {
        EXPECT_EQ(seen(mask, all, static_cast<int>(i), token, columns), newest(who[i], length[i] + token, kWindow))
            << "row " << who[i] << ", position " << length[i] + token;
      }
      length[i] += counts[i];
    }
  }
};

TEST(BatchRotatingKvCache, RaggedPromptsAroundTheWindow) {
  for (const auto& lengths : std::vector<std::vector<int>>{
           {2, 5, 3}, {1, 1, 2}, {8, 8, 8}, {3, 20, 9}, {30, 1, 8}, {9, 7, 25}, {40, 40, 40}}) {
    Batch batch({0, 1, 2});
    batch.prompt(lengths);
    batch.decode(2 * kWindow + 3);
  }
}

TEST(BatchRotatingKvCache, RaggedPromptsInPieces) {
  Batch batch({0, 1, 2});
  batch.prompt({6, 6, 2});  // the last is done here; the others go on without it
  batch.keep({0, 1});
  batch.prompt({6, 3});
  batch.keep({0});
  batch.prompt({6});
  batch.decode(kWindow + 1);
}

TEST(BatchRotatingKvCache, ARowThatSitsAPieceOutKeepsItsTokens) {
  Batch batch({0, 1});
  batch.prompt({10, 4});
  batch.prompt({5, 0});
  batch.prompt({1, 0});  // a single column, and padding for one row
  batch.prompt({3, 2});
  batch.decode(kWindow + 2);
}

TEST(BatchRotatingKvCache, ALongPromptJoinsARunningBatch) {
  for (const int steps : {0, 1, 3, kWindow - 1, kWindow, 2 * kWindow + 3}) {
    for (const int prompt : {1, 4, kWindow, 3 * kWindow}) {
      for (const bool running_first : {true, false}) {
        Batch running({0, 1});
        running.prompt({3, 6});
        running.decode(1 + steps);
        Batch fresh({2});
        fresh.prompt({prompt});
        fresh.decode();  // the forward of a prompt's last token comes before the join
        Batch& into = running_first ? running : fresh;
        into.join(running_first ? fresh : running);
        into.decode(2 * kWindow + 1);
      }
    }
  }
}

TEST(BatchRotatingKvCache, EmptyRowsJoin) {
  Batch batch({0});
  batch.prompt({11});
  batch.join(Batch({1, 2}));
  batch.prompt({2, 5, 13});
  batch.decode(kWindow);
  Batch empty({3});
  empty.join(Batch({4}));
  empty.prompt({2, 9});
  empty.decode(kWindow + 1);
}

TEST(BatchRotatingKvCache, LeavesAfterTheRingHasTurned) {
  Batch batch({0, 1, 2, 3});
  batch.prompt({2, 17, 9, 5});
  batch.decode(kWindow + 5);
  batch.keep({0, 2, 3});
  batch.decode(3);
  batch.keep({2});
  batch.decode(kWindow + 2);
}

TEST(BatchRotatingKvCache, AClonedBatchGoesItsOwnWay) {
  Batch batch({0, 1});
  batch.prompt({3, 12});
  const std::unique_ptr<BatchCache> clone = batch.cache.clone();
  const KeysValues other = as_rows({{7, 0, 1}, {8, 0, 1}});
  auto& copy = dynamic_cast<BatchRotatingKvCache&>(*clone);
  copy.update_and_fetch(other.keys, other.values);
  copy.filter({1});
  batch.decode(kWindow);
  EXPECT_EQ(copy.rows(), 1);
  EXPECT_EQ(copy.offsets()[0], 13);
}

TEST(BatchRotatingKvCache, RowsGoOnAloneAndTogetherAgain) {
  Batch batch({0, 1, 2});
  batch.prompt({2, 17, 9});
  for (const int steps : {0, 2, kWindow}) {
    if (steps > 0) batch.decode(steps);
    std::vector<RotatingKvCache> alone;
    for (int row = 0; row < 3; ++row) {
      const auto at = static_cast<std::size_t>(row);
      alone.push_back(batch.cache.extract(row));
      EXPECT_EQ(alone.back().position(), batch.length[at]);
      const mx::array keys = evaluated(alone.back().in_order().keys);
      const int held = alone.back().in_order().capacity();
      ASSERT_GE(held, std::min(batch.length[at], kWindow));
      for (int i = 0; i < held; ++i) EXPECT_EQ(keys.data<float>()[i * kWidth], code(row, batch.length[at] - held + i));
    }
    Batch again({0, 1, 2});
    again.cache = BatchRotatingKvCache::merge(std::vector<const RotatingKvCache*>{alone.data(), &alone[1], &alone[2]});
    again.length = batch.length;
    again.expect_offsets();
    again.decode(kWindow + 1);
    write(alone[0], 1);
    write(alone[0], kWindow + 2);
  }
}

TEST(BatchRotatingKvCache, MergesRingsOfAnyFill) {
  std::vector<RotatingKvCache> rings(3, RotatingKvCache(kWindow));
  Batch merged({0, 1, 2});
  const std::vector<const RotatingKvCache*> pointers{rings.data(), &rings[1], &rings[2]};
  EXPECT_EQ(BatchRotatingKvCache::merge(pointers).size(), 0);
  for (int row = 0; row < 2; ++row) {
    const auto at = static_cast<std::size_t>(row);
    const KeysValues fresh = as_rows({{row, 0, 5 + 15 * row}});
    rings[at].update_and_fetch(fresh.keys, fresh.values);
    merged.length[at] = 5 + 15 * row;
  }
  for (int step = 0; step < 3; ++step) {  // a turned ring
    const KeysValues one = as_rows({{1, rings[1].position(), 1}});
    rings[1].update_and_fetch(one.keys, one.values);
    ++merged.length[1];
  }
  merged.cache = BatchRotatingKvCache::merge(pointers);
  EXPECT_EQ(merged.cache.size(), kWindow);
  merged.expect_offsets();
  merged.decode(kWindow + 3);

  const RotatingKvCache other(kWindow + 1);
  EXPECT_THROW(BatchRotatingKvCache::merge(std::vector<const RotatingKvCache*>{rings.data(), &other}),
               std::logic_error);
}

TEST(BatchRotatingKvCache, ForgetsUntilItHasWrapped) {
  Batch batch({0, 1});
  batch.prompt({3, 5});
  EXPECT_TRUE(batch.cache.trimmable());
  EXPECT_EQ(batch.cache.trim(1), 1);
  --batch.length[0];
  --batch.length[1];
  batch.decode(kWindow + 1);
  EXPECT_FALSE(batch.cache.trimmable());
}

TEST(BatchRotatingKvCache, AnyCourseOfEvents) {
  for (std::uint32_t seed = 0; seed < 25; ++seed) {
    std::mt19937 engine(seed);
    const auto below = [&](int n) { return static_cast<int>(engine() % static_cast<std::uint32_t>(n)); };
    int names = 2;
    Batch batch({0, 1});
    batch.prompt({1 + below(20), 1 + below(20)});
    for (int event = 0; event < 14; ++event) {
      switch (below(3)) {
        case 0: {
          Batch fresh({names++});
          fresh.prompt({1 + below(3 * kWindow)});
          if (below(2) == 0) fresh.prompt({1 + below(kWindow)});
          fresh.decode();
          batch.join(fresh);
          break;
        }
        case 1:
          if (batch.who.size() > 1) {
            std::vector<int> rows(batch.who.size());
            for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int>(i);
            rows.erase(rows.begin() + below(static_cast<int>(rows.size())));
            batch.keep(rows);
          }
          break;
        default:
          break;
      }
      batch.decode(1 + below(kWindow));
      if (HasFailure()) FAIL() << "seed " << seed << ", event " << event;
    }
  }
}

}  // namespace
}  // namespace galley::kv
