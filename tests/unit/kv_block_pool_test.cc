#include <gtest/gtest.h>

#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "kv/block_pool.h"

namespace galley::kv {
namespace {

TEST(BlockPool, PromisesBeforeItGives) {
  BlockPool pool(4, 32);
  EXPECT_EQ(pool.blocks_for(0), 0);
  EXPECT_EQ(pool.blocks_for(1), 1);
  EXPECT_EQ(pool.blocks_for(32), 1);
  EXPECT_EQ(pool.blocks_for(33), 2);
  EXPECT_THROW((void)pool.take(), std::logic_error);
  ASSERT_TRUE(pool.reserve(3));
  EXPECT_FALSE(pool.reserve(2));
  EXPECT_EQ(pool.unreserved(), 1);
  EXPECT_EQ(pool.free(), 4);
  const std::int32_t block = pool.take();
  EXPECT_EQ(pool.free(), 3);
  EXPECT_EQ(pool.unreserved(), 1);
  pool.unreserve(2);
  EXPECT_EQ(pool.unreserved(), 3);
  EXPECT_THROW(pool.unreserve(1), std::logic_error);
  pool.release(block);
  EXPECT_EQ(pool.unreserved(), 4);
  EXPECT_THROW(pool.release(block), std::logic_error);
}

TEST(BlockPool, SharedBlocksLiveUntilTheLastHolder) {
  BlockPool pool(1, 16);
  ASSERT_TRUE(pool.reserve(1));
  const std::int32_t block = pool.take();
  pool.retain(block);
  pool.release(block);
  EXPECT_EQ(pool.free(), 0);
  pool.release(block);
  EXPECT_EQ(pool.free(), 1);
  EXPECT_THROW(pool.retain(block), std::logic_error);
}

TEST(BlockPool, EveryBlockIsAccountedForUnderRandomUse) {
  constexpr int kBlocks = 64;
  BlockPool pool(kBlocks, 32);
  std::mt19937 random(7);
  struct Row {
    int promised = 0;
    std::vector<std::int32_t> held;
  };
  std::vector<Row> rows;
  for (int step = 0; step < 20000; ++step) {
    switch (random() % 4) {
      case 0: {
        const int n = 1 + static_cast<int>(random() % 12);
        const bool fits = n <= pool.unreserved();
        ASSERT_EQ(pool.reserve(n), fits);
        if (fits) rows.push_back({n, {}});
        break;
      }
      case 1:
      case 2:
        if (!rows.empty()) {
          Row& row = rows[random() % rows.size()];
          if (row.promised > 0) {
            row.held.push_back(pool.take());
            --row.promised;
          }
        }
        break;
      default:
        if (!rows.empty()) {
          const std::size_t at = random() % rows.size();
          for (const std::int32_t block : rows[at].held) pool.release(block);
          pool.unreserve(rows[at].promised);
          rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(at));
        }
    }
    std::set<std::int32_t> seen;
    int promised = 0;
    for (const Row& row : rows) {
      promised += row.promised;
      for (const std::int32_t block : row.held) ASSERT_TRUE(seen.insert(block).second) << "a block given twice";
    }
    ASSERT_EQ(pool.free(), kBlocks - static_cast<int>(seen.size()));
    ASSERT_EQ(pool.unreserved(), pool.free() - promised);
  }
}

}  // namespace
}  // namespace galley::kv
