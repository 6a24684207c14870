// Contiguous KV of one row, and what every contiguous cache shares: [B, kv_heads, S, D] arrays grown 256 tokens at a
// time. The counterpart of mlx-lm's KVCache, the cache of the serial lane.
//
// Values are MLX arrays: copying a cache shares them, and a later write to one copy leaves the other as it was.
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "ops/stock/stock_kv.h"

namespace galley::kv {

/// Tokens by which a buffer grows when it is full.
inline constexpr int growth_tokens = 256;

/// Keys and values [B, kv_heads, S, D], of which a cache uses a leading part.
struct KeysValues {
  mlx::core::array keys;
  mlx::core::array values;

  [[nodiscard]] int capacity() const { return keys.shape(2); }
  [[nodiscard]] std::size_t nbytes() const { return keys.nbytes() + values.nbytes(); }
  /// Tokens [begin, end) of every row.
  [[nodiscard]] KeysValues slice(int begin, int end) const;
};

/// Writes `fresh` behind the first `used` tokens of `buffer`, growing it when it is too small.
void append(std::optional<KeysValues>& buffer, int used, const KeysValues& fresh);

/// create_causal_mask of mlx-lm: bool [N, offset + N], or [B, 1, N, offset + N] with per-row left padding (int32 [B]).
mlx::core::array causal_mask(int tokens, int offset, int window, const std::optional<mlx::core::array>& left_padding);

/// One row, no padding: mlx-lm's KVCache.
class KvCache final : public ops::StockLayerKv {
 public:
  [[nodiscard]] ops::RopeOffset offset() const override { return size_; }
  [[nodiscard]] ops::AttentionMask mask(int tokens, int window) const override;
  mlx::core::array write_and_attend(const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v,
                                    float scale, const ops::AttentionMask& mask) override;

  /// Appends k and v [1, kv_heads, L, D] and returns everything written so far.
  KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v);
  /// Forgets the last `tokens` (at most all); returns how many.
  int trim(int tokens);

  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] bool empty() const { return !buffer_.has_value(); }
  [[nodiscard]] const std::optional<KeysValues>& buffer() const { return buffer_; }
  [[nodiscard]] std::size_t nbytes() const { return buffer_ ? buffer_->nbytes() : 0; }

  /// A cache that holds exactly these tokens.
  static KvCache holding(KeysValues contents);

 private:
  std::optional<KeysValues> buffer_;
  int size_ = 0;  ///< tokens written; the next one's position
};

}  // namespace galley::kv
