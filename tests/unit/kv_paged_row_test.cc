// Rows of models with sliding layers: who holds which text and window blocks, what is reserved, what a row can begin
// with, and that nothing is lost, held twice or overwritten, whatever rows do.
#include "kv/paged_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kv/prefix_index.h"

namespace galley::kv {
namespace {

using Tokens = std::vector<std::int32_t>;
using Blocks = std::vector<std::int32_t>;

std::int32_t take(BlockPool& pool, bool window) {
  EXPECT_TRUE(pool.reserve(window ? pool.block_units() : pool.text_units()));
  const std::int32_t block = pool.take();
  if (window) pool.take_window(block);
  return block;
}

TEST(WindowBlocks, AreMadeOfUnitsLikeAnyOthers) {
  BlockPool pool(11, 4, 2, 3);
  const std::int32_t a = take(pool, true), b = take(pool, true);
  EXPECT_EQ(pool.held(), 10);
  EXPECT_EQ(pool.windows_held(), 6);
  std::set<std::int32_t> units;
  for (const std::int32_t block : {a, b, pool.window(a), pool.window(b)}) {
    int n = 0;
    for (std::int32_t unit = block; unit != BlockPool::kNone; unit = pool.next_unit(unit), ++n) {
      EXPECT_TRUE(units.insert(unit).second);
    }
    EXPECT_EQ(n, block == a || block == b ? 2 : 3);
  }
  EXPECT_FALSE(pool.reserve(2));
  EXPECT_THROW(pool.release(a), std::logic_error) << "its window block is still held";
  EXPECT_THROW(pool.take_window(a), std::logic_error);
  pool.release_window(a);
  EXPECT_FALSE(pool.has_window(a)) << "nobody knows the text, so it is not kept";
  EXPECT_THROW(pool.release_window(a), std::logic_error);
  pool.release(a);
  EXPECT_EQ(pool.free(), 6);
  EXPECT_EQ(pool.windows_held(), 3);
}

TEST(WindowBlocks, AreEvictedAloneOrWithTheirText) {
  BlockPool pool(10, 4, 2, 3);
  Blocks lost;
  pool.on_evict([&](std::int32_t block) { lost.push_back(block); });
  const std::int32_t a = take(pool, true), b = take(pool, true);
  pool.remember(a);
  pool.remember(b);
  pool.release_window(a);  // it slid out of the window: the oldest of the cached
  pool.release_window(b);
  EXPECT_EQ(pool.windows_cached(), 6);
  EXPECT_EQ(pool.cached(), 6);
  EXPECT_EQ(pool.unreserved(), 6);
  ASSERT_TRUE(pool.reserve(2));
  const std::int32_t c = pool.take();
  EXPECT_FALSE(pool.has_window(a));
  EXPECT_TRUE(pool.has_window(b));
  EXPECT_TRUE(lost.empty()) << "the texts are there";
  pool.retain_window(b);
  pool.release_window(b);
  pool.release(b);
  ASSERT_TRUE(pool.reserve(5));
  pool.take_window(c);  // evicts b's
  EXPECT_FALSE(pool.has_window(b));
  EXPECT_TRUE(lost.empty());
  (void)pool.take();
  EXPECT_EQ(lost, Blocks{b});
  EXPECT_EQ(pool.free(), 1);
  // A text block takes its window block along.
  pool.release_window(c);
  pool.remember(c);
  ASSERT_TRUE(pool.reserve(1));
  pool.unreserve(1);
  const std::int32_t held = c;
  EXPECT_FALSE(pool.has_window(held));
  pool.release(c);
  EXPECT_EQ(pool.cached(), 2);
}

TEST(WindowBlocks, GoAlongToAnotherTextBlock) {
  BlockPool pool(10, 4, 1, 2);
  const std::int32_t a = take(pool, true), b = take(pool, false);
  const std::int32_t window = pool.window(a);
  pool.move_window(a, b);
  EXPECT_FALSE(pool.has_window(a));
  EXPECT_EQ(pool.window(b), window);
  EXPECT_EQ(pool.window_references(b), 1);
  pool.release(a);
  pool.release_window(b);
  pool.release(b);
  EXPECT_EQ(pool.free(), 10);
}

TEST(PagedRow, HoldsOnlyTheWindowBlocksThatTokensToComeSee) {
  // Blocks of 4 tokens, a window of 6, steps of up to 8: (6 + 8) / 4, rounded up, and one more.
  const Sliding sliding{6, 5};
  BlockPool pool(100, 4, 1, 3);
  PagedRow row(pool, sliding, 40);
  EXPECT_EQ(pool.total() - pool.unreserved(), 10 + 5 * 3);
  for (int length = 0; length < 40; length += 8) {
    row.grow(pool, 8);
    row.slide(pool);
    const int seen = row.length() < 6 ? 0 : (row.length() - 5) / 4;
    EXPECT_EQ(static_cast<int>(row.first_window()), seen);
    EXPECT_EQ(pool.windows_held(), 3 * (row.length() / 4 - seen));
    EXPECT_LE(pool.held(), 10 + 5 * 3);
  }
  EXPECT_EQ(pool.held(), 10 + 2 * 3);
  EXPECT_EQ(pool.unreserved(), 100 - 16) << "nothing of the promise is left";
  EXPECT_EQ(row.growth(pool, 1), 4);
  row.release(pool);
  EXPECT_EQ(pool.free(), 100);
}

TEST(PagedRow, BeginsWhereAllThatIsSeenIsThere) {
  const Sliding sliding{5, 4};  // from behind block i, blocks i - 1 and i are seen
  BlockPool pool(100, 4, 1, 2);
  Blocks text;
  for (int i = 0; i < 6; ++i) text.push_back(take(pool, i != 2));
  const auto usable = [&](std::size_t before, std::size_t n) {
    return PagedRow::usable(pool, sliding, before, std::span(text).subspan(before, n));
  };
  EXPECT_EQ(usable(0, 2), 2U);
  EXPECT_EQ(usable(0, 3), 2U) << "not behind the block whose window block is gone";
  EXPECT_EQ(usable(0, 4), 4U) << "a window of 5 behind a border sees the last 4 tokens: one block";
  EXPECT_EQ(usable(0, 6), 6U);
  EXPECT_EQ(usable(3, 1), 1U);
  const Sliding wider{6, 4};
  EXPECT_EQ(PagedRow::usable(pool, wider, 0, std::span(text).first(4)), 2U);
  EXPECT_EQ(PagedRow::usable(pool, wider, 0, std::span(text).first(5)), 5U);
}

TEST(PagedRow, AReservationThatCannotBeFilledUpIsKnown) {
  // The second row shares the first one's window blocks, so that these are not free when the first lets them go.
  const Sliding sliding{4, 3};
  BlockPool pool(16, 4, 1, 1);
  PrefixIndex index(pool);
  PagedRow first(pool, sliding, 24);  // 6 + 3 units
  first.grow(pool, 8);
  std::int32_t parent = PrefixIndex::kRoot;
  for (const std::int32_t block : first.table()) parent = index.insert(parent, Tokens(4, block), block);
  first.slide(pool);
  PagedRow second(pool, sliding, 8, first.table());
  EXPECT_EQ(pool.held(), 3) << "two texts, and the one window block that is still seen";
  ASSERT_TRUE(pool.reserve(pool.unreserved()));
  first.grow(pool, 8);
  first.slide(pool);
  EXPECT_EQ(first.growth(pool, 0), 1) << "two window blocks are to come, and one was freed";
  second.release(pool);
  first.slide(pool);
  EXPECT_EQ(first.growth(pool, 0), 0);
  first.grow(pool, 8);
  first.release(pool);
}

/// Rows as a forward drives them, over a pool of blocks whose every slot says what was written to it.
class World {
 public:
  struct Row {
    PagedRow kv;
    Tokens text;  ///< what it is going to hold
    std::size_t known = 0;
    int age = 0;
  };
  World(int units, Sliding sliding_, int text_units, int window_units, int step, unsigned seed)
      : pool(units, kTokens, text_units, window_units), index(pool), sliding(sliding_), most(step), random(seed) {}

  void join() {
    Row row;
    for (auto n = 2 + up_to(40); n > 0; --n) row.text.push_back(up_to(12) == 0 ? 1 : 0);
    const auto shared = begin(row.text);
    if (PagedRow::needs(pool, sliding, static_cast<int>(row.text.size()), shared) + debts() > pool.unreserved()) return;
    row.kv = PagedRow(pool, sliding, static_cast<int>(row.text.size()), shared);
    row.known = shared.size();
    hits += shared.size();
    row.age = ++ages;
    rows.push_back(std::move(row));
  }
  /// One step: all rows go on by a few tokens, the youngest make room if need be.
  void step() {
    while (true) {
      parts.assign(rows.size(), 0);
      int needed = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        Row& row = rows[i];
        adopt(row);
        const auto left = static_cast<int>(row.text.size()) - row.kv.length();
        parts[i] = left > 0 ? 1 + up_to(std::min(left, most) - 1) : 1;
        if (left <= 0) row.text.push_back(up_to(12) == 0 ? 1 : 0);  // it says something
        needed += row.kv.growth(pool, parts[i]);
      }
      if (needed <= pool.unreserved()) break;
      rows.back().kv.release(pool);
      rows.pop_back();
      ++preempted;
      ASSERT_FALSE(rows.empty()) << "a row alone always fits";
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const int begin = rows[i].kv.length();
      ASSERT_LE(begin + parts[i], static_cast<int>(rows[i].text.size()));
      rows[i].kv.grow(pool, parts[i]);
      for (int p = begin; p < rows[i].kv.length(); ++p) write(rows[i], p);
    }
    for (std::size_t i = 0; i < rows.size(); ++i) read(rows[i], rows[i].kv.length() - parts[i]);
    for (Row& row : rows) remember(row);
    for (Row& row : rows) row.kv.slide(pool);
  }
  void leave(std::size_t at) {
    rows[at].kv.release(pool);
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void check() {
    std::map<std::int32_t, int> texts, windows;
    for (const Row& row : rows) {
      if (pool.window_units() > 0) {
        ASSERT_LE(static_cast<int>(row.kv.table().size() - row.kv.first_window()), sliding.most_blocks);
      }
      for (std::size_t i = 0; i < row.kv.table().size(); ++i) {
        ++texts[row.kv.table()[i]];
        if (pool.window_units() > 0 && i >= row.kv.first_window()) ++windows[row.kv.table()[i]];
      }
    }
    for (const auto& [block, holders] : texts) ASSERT_EQ(pool.references(block), holders);
    for (const auto& [block, holders] : windows) {
      ASSERT_TRUE(pool.has_window(block));
      ASSERT_EQ(pool.window_references(block), holders);
    }
    ASSERT_EQ(pool.windows_held(), static_cast<int>(windows.size()) * pool.window_units());
    ASSERT_EQ(pool.held(), static_cast<int>(texts.size()) * pool.text_units() + pool.windows_held());
    ASSERT_EQ(pool.free() + pool.cached() + pool.held(), pool.total());
    ASSERT_GE(pool.unreserved(), 0);
  }
  int up_to(int n) { return static_cast<int>(random() % static_cast<unsigned>(n + 1)); }

  static constexpr int kTokens = 4;
  BlockPool pool;
  PrefixIndex index;
  Sliding sliding;
  int most;
  std::mt19937 random;
  std::vector<Row> rows;  ///< by age
  std::vector<int> parts;
  std::size_t hits = 0, adopted = 0;
  int preempted = 0, ages = 0;

 private:
  Blocks begin(const Tokens& text) {
    Blocks found = index.find(PrefixIndex::kRoot, std::span(text).first(text.size() - 1));
    found.resize(PagedRow::usable(pool, sliding, 0, found));
    return found;
  }
  int debts() {
    int n = 0;
    for (const Row& row : rows) n += row.kv.growth(pool, 0);
    return n;
  }
  void adopt(Row& row) {
    const auto length = static_cast<std::size_t>(row.kv.length());
    if (row.known * kTokens != length || length + 1 >= row.text.size()) return;
    const std::int32_t parent = row.known == 0 ? PrefixIndex::kRoot : row.kv.table().back();
    Blocks found = index.find(parent, std::span(row.text).subspan(length, row.text.size() - 1 - length));
    found.resize(row.kv.usable(pool, found));
    if (found.empty() || !row.kv.adopt(pool, found)) return;
    row.known += found.size();
    adopted += found.size();
  }
  void remember(Row& row) {
    for (; (row.known + 1) * kTokens <= static_cast<std::size_t>(row.kv.length()); ++row.known) {
      const std::int32_t parent = row.known == 0 ? PrefixIndex::kRoot : row.kv.table()[row.known - 1];
      const std::int32_t own = row.kv.table()[row.known];
      const std::int32_t known = index.insert(parent, std::span(row.text).subspan(row.known * kTokens, kTokens), own);
      if (known != own) row.kv.exchange(pool, row.known, known);
    }
  }
  template <typename F>
  void at_slots(const Row& row, int position, bool window, const F& f) {
    const std::int32_t text = row.kv.table()[static_cast<std::size_t>(position / kTokens)];
    for (std::int32_t unit = window ? pool.window(text) : text; unit != BlockPool::kNone; unit = pool.next_unit(unit)) {
      f(memory[{unit, position % kTokens}]);
    }
  }
  void write(const Row& row, int position) {
    const Tokens value(row.text.begin(), row.text.begin() + position + 1);
    for (const bool window : {false, true}) {
      if (window && pool.window_units() == 0) continue;
      at_slots(row, position, window, [&](Tokens& slot) { slot = value; });
    }
  }
  /// What the tokens of a step see, from `first` on, must be what the text was when it was written.
  void read(const Row& row, int first) {
    for (int p = 0; p < row.kv.length(); ++p) {
      const Tokens value(row.text.begin(), row.text.begin() + p + 1);
      int units = 0;
      const auto count = [&](const Tokens& slot) {
        ASSERT_EQ(slot, value);
        ++units;
      };
      at_slots(row, p, false, count);
      if (pool.window_units() > 0 && p > first - sliding.window) {
        at_slots(row, p, true, count);
      }
      ASSERT_EQ(units, pool.text_units() + (p > first - sliding.window ? pool.window_units() : 0));
    }
  }
  std::map<std::pair<std::int32_t, int>, Tokens> memory;
};

TEST(PagedRow, EveryUnitIsAccountedForUnderRandomUse) {
  struct Case {
    int units;
    Sliding sliding;
    int text_units, window_units;
    std::optional<int> cache;
  };
  constexpr int kStep = 9;
  const auto most = [](int window) { return (window + kStep + World::kTokens - 1) / World::kTokens + 1; };
  const Case cases[] = {{300, {6, most(6)}, 1, 3, {}},   {130, {6, most(6)}, 1, 3, {}},
                        {160, {11, most(11)}, 2, 1, {}}, {150, {17, most(17)}, 1, 2, {}},
                        {130, {6, most(6)}, 1, 3, 8},    {130, {6, most(6)}, 1, 3, 0},
                        {60, {1, most(1)}, 1, 1, {}},    {60, {}, 1, 0, {}}};
  unsigned seed = 3;
  for (const Case& c : cases) {
    World world(c.units, c.sliding, c.text_units, c.window_units, kStep, seed++);
    if (c.cache) world.pool.limit_cache(*c.cache);
    for (int turn = 0; turn < 1500; ++turn) {
      const int action = world.up_to(9);
      if (action < 3 && world.rows.size() < 7) {
        world.join();
      } else if (action == 3 && !world.rows.empty()) {
        world.leave(static_cast<std::size_t>(world.up_to(static_cast<int>(world.rows.size()) - 1)));
      } else if (!world.rows.empty()) {
        world.step();
        for (std::size_t i = world.rows.size(); i-- > 0;) {  // long ones end
          if (world.rows[i].kv.length() > 70) world.leave(i);
        }
      }
      world.check();
      if (HasFatalFailure()) FAIL() << "turn " << turn << " of the case with seed " << seed - 1;
    }
    EXPECT_EQ(world.preempted > 0, c.units < 200) << seed - 1;
    EXPECT_GT(world.hits + world.adopted, c.cache ? 30U : 200U) << seed - 1;
    while (!world.rows.empty()) world.leave(world.rows.size() - 1);
    EXPECT_EQ(world.pool.held(), 0);
    EXPECT_EQ(world.pool.unreserved(), world.pool.total());
  }
}

}  // namespace
}  // namespace galley::kv
