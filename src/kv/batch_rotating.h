// Contiguous KV of a batch of rows with a sliding window: rings side by side. The counterpart of mlx-lm's
// BatchRotatingKVCache.
//
//   all rows share the column of the next token and how many columns are held; a row has left padding as in
//   BatchKvCache. Padding shrinks as the ring turns (it may become negative: then the row fills the ring), while
//   offset[row], the RoPE position, goes on counting.
//
// A ragged write of several tokens first rolls rows that ended in padding to the right edge, so that trimming the
// buffer to the window never drops a row's newest tokens for another row's padding.
#pragma once
#include <mlx/mlx.h>

#include <memory>
#include <span>
#include <vector>

#include "kv/cache_kinds.h"
#include "kv/contiguous.h"
#include "kv/rotating.h"

namespace galley::kv {

class BatchRotatingKvCache final : public BatchCache {
 public:
  /// Empty rows, `left_padding` columns of which will be padding.
  BatchRotatingKvCache(int max_size, std::vector<int> left_padding);
  /// Rows of their own rings, all of the same size, side by side: each one's newest tokens, in order, padded on the
  /// left to the longest.
  static BatchRotatingKvCache merge(std::span<const RotatingKvCache* const> rows);

  [[nodiscard]] std::unique_ptr<BatchCache> clone() const override;
  [[nodiscard]] ops::RopeOffset offset() const override;
  /// Always a bool array [B, 1, tokens, columns]; columns as the write will return them, rotated if it will be.
  /// `window`: 0 for the ring's own size.
  [[nodiscard]] ops::AttentionMask mask(int tokens, int window) const override;
  KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v) override;

  void prepare(const std::vector<int>& lengths, const std::vector<int>& right_padding) override;
  void finalize() override;
  /// Padding that all rows share stays.
  void filter(const std::vector<int>& rows) override;
  void extend(const BatchCache& other) override;
  [[nodiscard]] std::unique_ptr<RowCache> row_cache(int row) const override;
  /// A row's tokens, oldest first, as a ring of its own.
  [[nodiscard]] RotatingKvCache extract(int row) const;
  /// Forgets the last `tokens` columns (at most all) of every row; returns how many. Only while trimmable().
  int trim(int tokens);
  [[nodiscard]] bool trimmable() const { return written_ < max_size_; }

  [[nodiscard]] int rows() const { return static_cast<int>(offset_.size()); }
  [[nodiscard]] int size() const override { return written_ < max_size_ ? written_ : max_size_; }
  [[nodiscard]] int max_size() const { return max_size_; }
  [[nodiscard]] bool rotated() const { return rotated_; }
  [[nodiscard]] int next_column() const { return next_; }
  [[nodiscard]] std::span<const int> offsets() const { return offset_; }
  [[nodiscard]] std::span<const int> left_padding() const { return left_padding_; }

 private:
  [[nodiscard]] KeysValues fetched() const override;
  void put_in_order();
  void roll_past_ends();
  KeysValues append_in_order(const KeysValues& fresh);
  KeysValues write_in_place(const KeysValues& fresh);

  std::vector<int> left_padding_;
  std::vector<int> offset_;
  std::vector<int> ends_;  ///< empty, or the offset at which each row's tokens end, between prepare() and finalize()
  int max_size_;
  int next_ = 0;     ///< column of the next token
  int written_ = 0;  ///< columns ever written
  bool rotated_ = false;
};

}  // namespace galley::kv
