// The blocks of one row of paged KV. Engine thread only, free of MLX.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_pool.h"

namespace galley::kv {

/// What the sliding layers ask of a row. Of models with windows of several sizes the largest counts.
struct Sliding {
  int window = 0;       ///< tokens that a token sees, its own included; 0: there are no sliding layers
  int most_blocks = 0;  ///< window blocks that a row holds at a time, at most

  /// Index of the first block that a token at `position`, and those after it, see through the window.
  [[nodiscard]] int first_seen(int position, int block_tokens) const {
    return window == 0 || position < window ? 0 : (position - window + 1) / block_tokens;
  }
};

/// The blocks of one row: text blocks for all its tokens, and the window blocks of those that its next tokens see.
/// Grows by taking from what was reserved at the start.
class PagedRow {
 public:
  PagedRow() = default;
  /// Begins with `shared` (full blocks that are `usable`, which it retains) and reserves the rest of what its first
  /// `tokens` need; the caller has checked that this can be had.
  PagedRow(BlockPool& pool, const Sliding& sliding, int tokens, std::span<const std::int32_t> shared = {});

  /// How many of `found`, known blocks that continue the text of a row with so many blocks, the row can go on with:
  /// behind the last of them, all that is to be seen through a window must be there.
  static std::size_t usable(const BlockPool& pool, const Sliding& sliding, std::size_t blocks_before,
                            std::span<const std::int32_t> found);
  [[nodiscard]] std::size_t usable(const BlockPool& pool, std::span<const std::int32_t> found) const {
    return usable(pool, sliding_, table_.size(), found);
  }
  /// Unreserved units that a new row would take from the pool.
  static int needs(const BlockPool& pool, const Sliding& sliding, int tokens, std::span<const std::int32_t> shared);

  /// Unreserved units that grow(pool, n) would take; of a row that doesn't grow (0), those its reservation lacks.
  [[nodiscard]] int growth(const BlockPool& pool, int n) const;
  /// Makes room for positions [length, length + n) and moves the row's end: out of what the row reserved, then out of
  /// what nobody has; the caller has checked that there is enough.
  void grow(BlockPool& pool, int n);
  /// Goes on with full blocks that others computed and are usable, giving back what was reserved for as many. The row
  /// ends at a block's border. False: they can't be had, and nothing has changed.
  bool adopt(BlockPool& pool, std::span<const std::int32_t> shared);
  /// Holds another block of the same content in the place of its own. No step in flight.
  void exchange(BlockPool& pool, std::size_t at, std::int32_t block);
  /// Lets go of window blocks that no token to come sees, and reserves as many as are still to be taken. When others
  /// hold them, and all else is reserved, the reservation stays short. No step in flight.
  void slide(BlockPool& pool);
  /// Gives the reservation back for a while; slide() takes it again.
  void lend(BlockPool& pool);
  /// Gives all blocks and the rest of the reservation back.
  void release(BlockPool& pool);
  [[nodiscard]] int length() const { return length_; }
  [[nodiscard]] std::span<const std::int32_t> table() const { return table_; }
  /// Index of the first block whose window block it holds.
  [[nodiscard]] std::size_t first_window() const { return first_window_; }

 private:
  [[nodiscard]] int reservation(const BlockPool& pool) const;
  void let_go(BlockPool& pool, std::size_t seen, std::size_t held);
  void append(BlockPool& pool, std::span<const std::int32_t> shared);

  std::vector<std::int32_t> table_;
  Sliding sliding_;
  std::size_t first_window_ = 0;
  int length_ = 0;
  int promised_blocks_ = 0;  ///< it is sure of that many, those it has included
  int reserved_ = 0;         ///< units
};

}  // namespace galley::kv
