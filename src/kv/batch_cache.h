// Contiguous KV of a batch of rows with left padding: the counterpart of mlx-lm's BatchKVCache (quantized: mlx-optiq's
// BatchQuantizedKVCache), one object a layer.
//
//   row 0   . . a b c          '.' left padding: columns below left_padding[row] are masked out
//   row 1   d e f g h          end: the physical column where the next token goes, the same for all rows
//   row 2   . . . . i          offset[row] = end - left_padding[row]: the row's RoPE position
//
// Ragged prompts are written right-padded between prepare() and finalize(), which rolls each row to the right edge.
// Everything but the arrays lives on the host, so no step waits for the device to learn a length.
#pragma once
#include <mlx/mlx.h>

#include <memory>
#include <span>
#include <vector>

#include "kv/cache_kinds.h"
#include "kv/contiguous.h"

namespace galley::kv {

class BatchKvCache final : public BatchCache {
 public:
  /// Empty rows, `left_padding` columns of which will be padding.
  explicit BatchKvCache(std::vector<int> left_padding, ops::KvFormat format = {});
  /// Rows of their own caches side by side, padded on the left to the longest.
  static BatchKvCache merge(std::span<const KvCache* const> rows);

  [[nodiscard]] std::unique_ptr<BatchCache> clone() const override;
  [[nodiscard]] ops::RopeOffset offset() const override;
  /// Always a bool array [B, 1, tokens, end + tokens], also for one row and one token, as in mlx-lm.
  [[nodiscard]] ops::AttentionMask mask(int tokens, int window) const override;
  /// Appends k and v and returns the columns [0, end).
  KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v) override;

  void prepare(const std::vector<int>& lengths, const std::vector<int>& right_padding) override;
  void finalize() override;
  /// Also drops columns that are padding for all the rows that stay.
  void filter(const std::vector<int>& rows) override;
  /// The two batches are aligned at the end.
  void extend(const BatchCache& other) override;
  [[nodiscard]] std::unique_ptr<RowCache> row_cache(int row) const override;
  /// A row's tokens as a cache of its own.
  [[nodiscard]] KvCache extract(int row) const;
  /// Forgets the last `tokens` columns (at most all) of every row; returns how many.
  int trim(int tokens);

  [[nodiscard]] int rows() const { return static_cast<int>(offset_.size()); }
  [[nodiscard]] int size() const override { return end_; }
  [[nodiscard]] std::span<const int> offsets() const { return offset_; }
  [[nodiscard]] std::span<const int> left_padding() const { return left_padding_; }

 private:
  [[nodiscard]] KeysValues fetched() const override;
  ops::KvFormat format_;
  std::vector<int> left_padding_;
  std::vector<int> offset_;
  std::vector<int> right_padding_;  ///< empty, or what prepare() announced
  int end_ = 0;
};

}  // namespace galley::kv
