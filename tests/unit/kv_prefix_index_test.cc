#include <gtest/gtest.h>

#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "kv/block_pool.h"
#include "kv/prefix_index.h"

namespace galley::kv {
namespace {

using Tokens = std::vector<std::int32_t>;
using Blocks = std::vector<std::int32_t>;

std::int32_t take(BlockPool& pool) {
  EXPECT_TRUE(pool.reserve(1));
  return pool.take();
}

TEST(BlockPool, CachedBlocksAreEvictedOldestFirst) {
  BlockPool pool(3, 2);
  std::vector<std::int32_t> lost;
  pool.on_evict([&](std::int32_t block) { lost.push_back(block); });
  const std::int32_t a = take(pool), b = take(pool);
  pool.remember(a);
  pool.remember(b);
  pool.release(b);
  pool.release(a);
  EXPECT_EQ(pool.cached(), 2);
  EXPECT_EQ(pool.held(), 0);
  EXPECT_EQ(pool.unreserved(), 3);
  pool.retain(b);  // back in use: no longer the oldest of the cached
  EXPECT_EQ(pool.unreserved(), 2);
  EXPECT_FALSE(pool.reserve(3));
  (void)take(pool);  // the free one first
  EXPECT_TRUE(lost.empty());
  EXPECT_EQ(take(pool), a);
  EXPECT_EQ(lost, Blocks{a});
  EXPECT_FALSE(pool.reserve(1));
  pool.release(a);  // forgotten: free, not cached
  EXPECT_EQ(pool.free(), 1);
  pool.release(b);
  EXPECT_EQ(pool.cached(), 1);
  pool.limit_cache(0);
  EXPECT_EQ(lost, (Blocks{a, b}));
  EXPECT_EQ(pool.free(), 2);
}

TEST(PrefixIndex, FindsTheBlockWithMostInCommon) {
  BlockPool pool(8, 4);
  PrefixIndex index(pool);
  const auto part = [&](std::int32_t parent, const Tokens& tokens) {
    const auto found = index.find_part(parent, tokens);
    return found ? std::pair(found->block, found->tokens) : std::pair(-9, std::size_t{0});
  };
  const std::pair nothing(-9, std::size_t{0});
  EXPECT_EQ(part(PrefixIndex::kRoot, {1, 2}), nothing);
  const std::int32_t a = take(pool), b = take(pool), c = take(pool), d = take(pool);
  index.insert(PrefixIndex::kRoot, Tokens{1, 2, 3, 4}, a);
  index.insert(PrefixIndex::kRoot, Tokens{1, 2, 5, 6}, b);
  index.insert(PrefixIndex::kRoot, Tokens{9, 9, 9, 9}, c);
  index.insert(a, Tokens{1, 7, 7, 7}, d);
  EXPECT_EQ(part(PrefixIndex::kRoot, {1, 2, 3, 9}), std::pair(a, std::size_t{3}));
  EXPECT_EQ(part(PrefixIndex::kRoot, {1, 2, 5}), std::pair(b, std::size_t{3}));
  EXPECT_EQ(part(PrefixIndex::kRoot, {1, 2, 4, 9}).second, 2U);
  EXPECT_EQ(part(PrefixIndex::kRoot, {1}).second, 1U);
  EXPECT_EQ(part(PrefixIndex::kRoot, {9, 9, 9, 9}), std::pair(c, std::size_t{4}));
  EXPECT_EQ(part(PrefixIndex::kRoot, {2, 2}), nothing);
  EXPECT_EQ(part(PrefixIndex::kRoot, {}), nothing);
  EXPECT_EQ(part(a, {1, 7, 8}), std::pair(d, std::size_t{2}));
  EXPECT_EQ(part(b, {1, 7, 8}), nothing) << "the same tokens, but after another text";
}

TEST(PrefixIndex, FindsTheLongestKnownBeginning) {
  BlockPool pool(8, 2);
  PrefixIndex index(pool);
  const std::int32_t a = take(pool), b = take(pool), c = take(pool);
  EXPECT_EQ(index.insert(PrefixIndex::kRoot, Tokens{1, 2}, a), a);
  EXPECT_EQ(index.insert(a, Tokens{3, 4}, b), b);
  EXPECT_EQ(index.insert(a, Tokens{5, 6}, c), c);
  EXPECT_EQ(index.find(PrefixIndex::kRoot, Tokens{1, 2, 3, 4, 5}), (Blocks{a, b}));
  EXPECT_EQ(index.find(PrefixIndex::kRoot, Tokens{1, 2, 5, 6, 7, 8}), (Blocks{a, c}));
  EXPECT_EQ(index.find(PrefixIndex::kRoot, Tokens{1, 2, 3}), Blocks{a});
  EXPECT_EQ(index.find(PrefixIndex::kRoot, Tokens{1}), Blocks{});
  EXPECT_EQ(index.find(PrefixIndex::kRoot, Tokens{3, 4}), Blocks{}) << "the same tokens elsewhere are another text";
  EXPECT_EQ(index.find(a, Tokens{3, 4}), Blocks{b});
  const std::int32_t twin = take(pool);
  EXPECT_EQ(index.insert(a, Tokens{3, 4}, twin), b) << "known already";
  pool.release(twin);
  EXPECT_EQ(pool.free(), 5) << "a twin is not remembered";
  EXPECT_THROW(index.insert(a, Tokens{9}, twin), std::logic_error);
  EXPECT_THROW(index.insert(a, Tokens{9, 9}, b), std::logic_error) << "one block, one text";
}

TEST(PrefixIndex, ForgetsFromTheEndOfATextWhenThePoolRunsDry) {
  BlockPool pool(3, 1);
  PrefixIndex index(pool);
  Blocks text;
  for (int i = 0; i < 3; ++i) {
    text.push_back(take(pool));
    index.insert(i == 0 ? PrefixIndex::kRoot : text[static_cast<std::size_t>(i) - 1], Tokens{i}, text.back());
  }
  for (auto block = text.rbegin(); block != text.rend(); ++block) pool.release(*block);
  EXPECT_EQ(pool.cached(), 3);
  for (std::size_t left = 3; left-- > 0;) {
    EXPECT_EQ(take(pool), text[left]);
    EXPECT_EQ(index.find(PrefixIndex::kRoot, Tokens{0, 1, 2}).size(), left);
  }
  EXPECT_EQ(index.size(), 0U);
}

// Rows join with what is known of their text, grow, fork, leave and are evicted from the cache, in any order; a plain
// map of what every block holds says whether each answer is right.
TEST(PrefixIndex, EveryBlockIsAccountedForUnderRandomUse) {
  constexpr int kBlocks = 48;
  BlockPool pool(kBlocks, 1);
  PrefixIndex index(pool);
  std::mt19937 random(11);
  struct Row {
    Tokens text;
    Blocks blocks;
  };
  std::vector<Row> rows;
  std::map<std::int32_t, Tokens> content;  // block to the text that ends in it
  std::size_t hits = 0;
  for (int step = 0; step < 30000; ++step) {
    const auto action = random() % 10;
    if (action < 2 && rows.size() < 8) {  // join: few different tokens, so that texts often begin alike
      Row row;
      for (auto n = random() % 6; n > 0; --n) row.text.push_back(static_cast<std::int32_t>(random() % 2));
      row.blocks = index.find(PrefixIndex::kRoot, row.text);
      for (std::size_t i = 0; i < row.blocks.size(); ++i) {
        ASSERT_EQ(content.at(row.blocks[i]), Tokens(row.text.begin(), row.text.begin() + static_cast<long>(i) + 1));
        pool.retain(row.blocks[i]);
      }
      hits += row.blocks.size();
      row.text.resize(row.blocks.size());
      rows.push_back(std::move(row));
    } else if (action < 7 && !rows.empty()) {  // grow
      Row& row = rows[random() % rows.size()];
      if (row.text.size() == 8 || !pool.reserve(1)) continue;
      std::int32_t block = pool.take();
      row.text.push_back(static_cast<std::int32_t>(random() % 2));
      content[block] = row.text;
      const std::int32_t parent = row.blocks.empty() ? PrefixIndex::kRoot : row.blocks.back();
      const std::int32_t known = index.insert(parent, std::span(row.text).last(1), block);
      if (known != block) {
        ASSERT_EQ(content.at(known), row.text);
        pool.retain(known);
        pool.release(block);
        block = known;
      }
      row.blocks.push_back(block);
    } else if (action == 7 && !rows.empty() && rows.size() < 8) {  // fork
      Row copy = rows[random() % rows.size()];
      for (const std::int32_t block : copy.blocks) pool.retain(block);
      rows.push_back(std::move(copy));
    } else if (!rows.empty()) {  // leave
      const std::size_t at = random() % rows.size();
      for (auto block = rows[at].blocks.rbegin(); block != rows[at].blocks.rend(); ++block) pool.release(*block);
      rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(at));
    }
    std::map<std::int32_t, int> holders;
    for (const Row& row : rows) {
      for (const std::int32_t block : row.blocks) ++holders[block];
    }
    for (const auto& [block, count] : holders) ASSERT_EQ(pool.references(block), count);
    ASSERT_EQ(pool.held(), static_cast<int>(holders.size()));
    ASSERT_EQ(pool.free() + pool.cached() + pool.held(), kBlocks);
    ASSERT_EQ(index.size(), static_cast<std::size_t>(pool.held() + pool.cached()));
  }
  EXPECT_GT(hits, 1000U);
}

}  // namespace
}  // namespace galley::kv
