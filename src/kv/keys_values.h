// Keys and values of some rows as MLX arrays [B, kv_heads, S, D], and what the contiguous caches do with them.
//
// Values are MLX arrays: copying shares them, and a later write to one copy leaves the other as it was. Whatever is
// done to the rows or columns of quantized ones is done to codes, scales and biases alike.
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "ops/kv_format.h"
#include "ops/stock/stock_kv.h"

namespace galley::kv {

struct KeysValues {
  /// Of the groups that the last axis is cut into: arrays [B, kv_heads, S, D / group].
  struct Groups {
    mlx::core::array key_scales, key_biases, value_scales, value_biases;
    ops::KvFormat format;
  };

  mlx::core::array keys;  ///< quantized: codes, packed into uint32 as mx::quantize does it
  mlx::core::array values;
  std::optional<Groups> groups = std::nullopt;  ///< present when quantized

  /// `format` without bits: as they are.
  [[nodiscard]] KeysValues quantized(ops::KvFormat format) const;

  /// Columns S, of which a cache may use a part only.
  [[nodiscard]] int capacity() const { return keys.shape(2); }
  [[nodiscard]] std::size_t nbytes() const;
  [[nodiscard]] std::vector<mlx::core::array> arrays() const;
  /// Columns [begin, end) of every row.
  [[nodiscard]] KeysValues slice(int begin, int end) const;
  /// Row `row` alone, [1, kv_heads, S, D].
  [[nodiscard]] KeysValues row(int row) const;
  /// Overwrites columns from `column` on with some of the same format.
  void write(const KeysValues& fresh, int column);
};

/// Zeros, `columns` wide, for the rows, heads and widths of `like`.
KeysValues zeros_like(const KeysValues& like, int columns);
/// One behind the other along the columns.
KeysValues joined(const std::vector<KeysValues>& parts);
/// One below the other, as rows.
KeysValues stacked(const std::vector<KeysValues>& parts);
/// Zero columns added on either side.
KeysValues padded(const KeysValues& x, int left, int right);
/// These rows, in this order.
KeysValues taken(const KeysValues& x, const std::vector<int>& rows);
/// Every row turned right by `shift` columns; what leaves on the right comes back on the left.
KeysValues rolled(const KeysValues& x, int shift);
/// Row b turned right by shifts[b] columns.
KeysValues rolled_by_row(const KeysValues& x, const std::vector<int>& shifts);
/// A copy that holds its own columns only, not the larger arrays they are a part of.
KeysValues contiguous(const KeysValues& x);
/// Puts a batch whose columns end at `own_end` into `capacity` columns so that they end at `end`. A batch without keys
/// yet takes heads and widths from `like`.
KeysValues aligned(const std::optional<KeysValues>& buffer, int rows, int own_end, int end, int capacity,
                   const KeysValues& like);

/// Attention of q [B, heads, L, D] to all columns, as mlx-lm's scaled_dot_product_attention: MLX's own kernel, or for
/// quantized ones products with the codes and a softmax between.
mlx::core::array attend(const mlx::core::array& q, const KeysValues& all, float scale, const ops::AttentionMask& mask);

/// int32 [n]
mlx::core::array int_array(std::span<const int> values);
/// values[rows[i]] for each i.
std::vector<int> taken(const std::vector<int>& values, const std::vector<int>& rows);

/// create_causal_mask of mlx-lm: bool [N, offset + N], or [B, 1, N, offset + N] with per-row left padding (int32 [B]).
mlx::core::array causal_mask(int tokens, int offset, int window, const std::optional<mlx::core::array>& left_padding);

}  // namespace galley::kv
