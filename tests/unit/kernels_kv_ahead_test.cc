// The pieces of KV that products fetch on the side: together they are the blocks an attention will read, each once.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "ops/kernels/kv_ahead.h"

namespace galley::kernels {
namespace {

struct Pool {
  PagedKv kv;
  std::vector<std::byte> memory;

  explicit Pool(int blocks) {
    kv.kv_heads = 3;
    kv.head_dim = 64;
    kv.block_stride = kv.block_bytes() + 64;
    memory.resize(kv.block_stride * static_cast<std::size_t>(blocks));
    kv.data = memory.data();
  }
  /// Bytes fetched of each block; each piece lies within one.
  std::map<std::size_t, std::size_t> fetched(const KvPieces& pieces, int slots, std::size_t most) const {
    std::map<std::size_t, std::size_t> bytes;
    const char* last = nullptr;
    for (int slot = 0; slot < slots; ++slot) {
      const Fetch piece = pieces[slot];
      if (piece.bytes == 0) continue;
      EXPECT_LE(piece.bytes, most);
      EXPECT_NE(piece.at, last);
      last = piece.at;
      const auto at = static_cast<std::size_t>(piece.at - reinterpret_cast<const char*>(memory.data()));
      EXPECT_LE(at % kv.block_stride + piece.bytes, kv.block_bytes());
      bytes[at / kv.block_stride] += piece.bytes;
    }
    return bytes;
  }
};

using Table = std::vector<std::int32_t>;

TEST(KvAhead, EverySequencesBlocksAreFetchedOnce) {
  const Pool pool(40);
  const Table a = {7, 3, 20}, b = {11}, c = {5, 30, 31, 32, 33};
  const std::int32_t positions[] = {70, 71, 9, 159};  // two rows of a, one of b, one of c
  const std::int32_t* const tables[] = {a.data(), a.data(), b.data(), c.data()};
  const KvAhead ahead{{4, positions, tables}, pool.kv, 0};
  std::vector<const char*> scratch;
  for (const int slots : {9, 10, 100, 1000}) {
    const KvPieces pieces(scratch, ahead, slots, 1 << 20);
    std::set<std::size_t> blocks;
    for (const auto& [block, bytes] : pool.fetched(pieces, slots, 1 << 20)) {
      blocks.insert(block);
      EXPECT_EQ(bytes, pool.kv.block_bytes());
    }
    EXPECT_EQ(blocks, (std::set<std::size_t>{3, 5, 7, 11, 20, 30, 31, 32, 33})) << slots;
  }
}

TEST(KvAhead, AWindowNeedsItsOwnBlocksOnly) {
  const Pool pool(8);
  const Table table = {-1, -1, 2, 6};  // what lies before the window may be anything
  const std::int32_t position = 100;
  const std::int32_t* const tables[] = {table.data()};
  const KvAhead ahead{{1, &position, tables}, pool.kv, 30};  // 71 to 100
  std::vector<const char*> scratch;
  const auto bytes = pool.fetched(KvPieces(scratch, ahead, 50, 4096), 50, 4096);
  ASSERT_EQ(bytes.size(), 2U);
  EXPECT_TRUE(bytes.contains(2) && bytes.contains(6));
}

TEST(KvAhead, TooManyBlocksAreThinnedEvenly) {
  const Pool pool(600);
  Table table(600);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
  const std::int32_t position = 600 * 32 - 1;
  const std::int32_t* const tables[] = {table.data()};
  const KvAhead ahead{{1, &position, tables}, pool.kv, 0};
  std::vector<const char*> scratch;
  const auto few = pool.fetched(KvPieces(scratch, ahead, 10, 2048), 10, 2048);
  EXPECT_EQ(few.size(), 10U);
  EXPECT_EQ(few.begin()->first, 0U);
  EXPECT_EQ(few.rbegin()->first, 540U);
  const auto many = pool.fetched(KvPieces(scratch, ahead, 5000, 1 << 20), 5000, 1 << 20);
  std::size_t bytes = 0;
  for (const auto& [block, n] : many) bytes += n;
  EXPECT_LE(bytes, std::size_t{8} << 20);  // the most of one layer
  EXPECT_GE(bytes, std::size_t{4} << 20);
}

TEST(KvAhead, NothingToRead) {
  const Pool pool(1);
  std::vector<const char*> scratch;
  EXPECT_TRUE(KvPieces().empty());
  EXPECT_TRUE(KvPieces(scratch, KvAhead{{0, nullptr, nullptr}, pool.kv, 0}, 10, 4096).empty());
}

}  // namespace
}  // namespace galley::kernels
