// Which KV blocks are free, cached, promised and held. Blocks are the unit of every decision about KV memory:
// fixed-size runs of tokens that all layers of one kind share under one id, as in PagedAttention (Kwon et al. 2023).
//
// Engine thread only. Knows nothing of what a block holds.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace galley::kv {

/// A block is held (by one or more rows), or cached (by none, but its content is remembered), or free. Rows reserve
/// before they take. Cached blocks can be had like free ones: the one released longest ago is evicted first.
class BlockPool {
 public:
  BlockPool(int blocks, int block_tokens);

  [[nodiscard]] int total() const { return total_; }
  [[nodiscard]] int block_tokens() const { return block_tokens_; }
  [[nodiscard]] int free() const { return static_cast<int>(free_.size()); }
  [[nodiscard]] int cached() const { return cached_; }
  [[nodiscard]] int held() const { return total_ - free() - cached_; }
  /// Blocks that no row holds or was promised.
  [[nodiscard]] int unreserved() const { return free() + cached_ - promised_; }
  [[nodiscard]] int blocks_for(int tokens) const { return (tokens + block_tokens_ - 1) / block_tokens_; }

  /// Promises `n` blocks to a row; false (and nothing changed) when fewer are unreserved.
  [[nodiscard]] bool reserve(int n);
  /// Takes one promised block; its reference count becomes 1. Lowest-numbered free blocks are handed out last-freed
  /// first; when none is free, a cached one is evicted.
  [[nodiscard]] std::int32_t take();
  /// Gives promised blocks back untaken.
  void unreserve(int n);
  /// One more holder of a held or cached block. A cached one counts among the unreserved until then.
  void retain(std::int32_t block);
  /// One holder less; when none is left the block is cached if it is remembered, else free. Who holds several blocks
  /// of one text releases the last first: then what is evicted first is always a text's end.
  void release(std::int32_t block);
  [[nodiscard]] int references(std::int32_t block) const { return at(block).references; }

  /// A held block's content is worth keeping after its last holder is gone.
  void remember(std::int32_t block) { at(block).remembered = true; }
  /// Called with every block that is evicted: what it holds is about to be lost.
  void on_evict(std::function<void(std::int32_t block)> callback) { evicted_ = std::move(callback); }
  /// Most blocks that are kept cached; the oldest beyond are evicted. 0: none.
  void limit_cache(int blocks);

 private:
  static constexpr std::int32_t kNone = -1;
  struct Block {
    int references = 0;
    bool remembered = false;
    std::int32_t older = kNone, newer = kNone;  ///< neighbours in the list of cached blocks
  };
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  [[nodiscard]] const Block& at(std::int32_t block) const { return blocks_[static_cast<std::size_t>(block)]; }
  void link_newest(std::int32_t block);
  void unlink(std::int32_t block);
  void evict_oldest();

  int total_;
  int block_tokens_;
  int promised_ = 0;
  int cached_ = 0;
  int cache_limit_;
  std::int32_t oldest_ = kNone, newest_ = kNone;
  std::vector<std::int32_t> free_;  // a stack
  std::vector<Block> blocks_;
  std::function<void(std::int32_t)> evicted_;
};

}  // namespace galley::kv
