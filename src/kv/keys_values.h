// Keys and values of some rows as MLX arrays [B, kv_heads, S, D], and what the contiguous caches do with them.
//
// Values are MLX arrays: copying shares them, and a later write to one copy leaves the other as it was.
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace galley::kv {

struct KeysValues {
  mlx::core::array keys;
  mlx::core::array values;

  /// Columns S, of which a cache may use a part only.
  [[nodiscard]] int capacity() const { return keys.shape(2); }
  [[nodiscard]] std::size_t nbytes() const { return keys.nbytes() + values.nbytes(); }
  /// Columns [begin, end) of every row.
  [[nodiscard]] KeysValues slice(int begin, int end) const;
  /// Row `row` alone, [1, kv_heads, S, D].
  [[nodiscard]] KeysValues row(int row) const;
  /// Overwrites columns from `column` on.
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
/// Row b turned right by shifts[b] columns; what leaves on the right comes back on the left.
KeysValues rolled_by_row(const KeysValues& x, const std::vector<int>& shifts);
/// Puts a batch whose columns end at `own_end` into `capacity` columns so that they end at `end`. A batch without keys
/// yet takes heads and widths from `like`.
KeysValues aligned(const std::optional<KeysValues>& buffer, int rows, int own_end, int end, int capacity,
                   const KeysValues& like);

/// int32 [n]
mlx::core::array int_array(std::span<const int> values);
/// values[rows[i]] for each i.
std::vector<int> taken(const std::vector<int>& values, const std::vector<int>& rows);

/// create_causal_mask of mlx-lm: bool [N, offset + N], or [B, 1, N, offset + N] with per-row left padding (int32 [B]).
mlx::core::array causal_mask(int tokens, int offset, int window, const std::optional<mlx::core::array>& left_padding);

}  // namespace galley::kv
