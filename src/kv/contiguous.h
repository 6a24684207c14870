// Contiguous KV of one row, grown 256 tokens at a time. The counterpart of mlx-lm's KVCache, the serial lane's cache of
// full-attention layers.
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "kv/cache_kinds.h"
#include "kv/keys_values.h"

namespace galley::kv {

/// Writes `fresh` behind the first `used` columns of `buffer`, growing it when it is too small.
void append(std::optional<KeysValues>& buffer, int used, const KeysValues& fresh);

/// One row, no padding: mlx-lm's KVCache.
class KvCache final : public RowCache {
 public:
  [[nodiscard]] ops::RopeOffset offset() const override { return size_; }
  [[nodiscard]] ops::AttentionMask mask(int tokens, int window) const override;
  mlx::core::array write_and_attend(const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v,
                                    float scale, const ops::AttentionMask& mask) override;
  [[nodiscard]] mlx::core::array attend_again(const mlx::core::array& q, float scale,
                                              const ops::AttentionMask& mask) const override;

  /// Appends k and v [1, kv_heads, L, D] and returns everything written so far.
  KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v);
  /// Forgets the last `tokens` (at most all); returns how many.
  int trim(int tokens);

  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] bool empty() const { return !buffer_.has_value(); }
  [[nodiscard]] const std::optional<KeysValues>& buffer() const { return buffer_; }
  [[nodiscard]] std::size_t nbytes() const override { return buffer_ ? buffer_->nbytes() : 0; }
  [[nodiscard]] std::vector<mlx::core::array> arrays() const override;

  /// A cache that holds exactly these tokens.
  static KvCache holding(KeysValues contents);

 private:
  /// What the last write attends to.
  [[nodiscard]] KeysValues fetched() const;
  std::optional<KeysValues> buffer_;
  int size_ = 0;  ///< tokens written; the next one's position
};

}  // namespace galley::kv
