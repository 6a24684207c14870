// Which KV blocks are free, promised and in use. Blocks are the unit of every decision about KV memory: fixed-size runs
// of tokens that all layers of one kind share under one id, as in PagedAttention (Kwon et al. 2023).
//
// Engine thread only. Knows nothing of what a block holds.
#pragma once
#include <cstdint>
#include <vector>

namespace galley::kv {

class BlockPool {
 public:
  BlockPool(int blocks, int block_tokens);

  [[nodiscard]] int total() const { return total_; }
  [[nodiscard]] int block_tokens() const { return block_tokens_; }
  /// Blocks that no row holds.
  [[nodiscard]] int free() const { return static_cast<int>(free_.size()); }
  /// Blocks that no row holds or was promised.
  [[nodiscard]] int unreserved() const { return free() - promised_; }
  [[nodiscard]] int blocks_for(int tokens) const { return (tokens + block_tokens_ - 1) / block_tokens_; }

  /// Promises `n` blocks to a row; false (and nothing changed) when fewer are unreserved.
  [[nodiscard]] bool reserve(int n);
  /// Takes one promised block; its reference count becomes 1. Lowest-numbered free blocks are handed out last-freed
  /// first.
  [[nodiscard]] std::int32_t take();
  /// Gives promised blocks back untaken.
  void unreserve(int n);
  /// One more holder of a block (sharing).
  void retain(std::int32_t block);
  /// One holder less; the block is free when none is left.
  void release(std::int32_t block);
  [[nodiscard]] int references(std::int32_t block) const { return references_[static_cast<std::size_t>(block)]; }

 private:
  int total_;
  int block_tokens_;
  int promised_ = 0;
  std::vector<std::int32_t> free_;  // a stack
  std::vector<int> references_;
};

}  // namespace galley::kv
