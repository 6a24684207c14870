// Contiguous KV of one row, grown 256 tokens at a time. The counterpart of mlx-lm's KVCache (quantized:
// QuantizedKVCache), the serial lane's cache of full-attention layers.
#pragma once
#include <mlx/mlx.h>

#include <memory>
#include <optional>

#include "kv/cache_kinds.h"
#include "kv/keys_values.h"

namespace galley::kv {

/// Writes `fresh` behind the first `used` columns of `buffer`, growing it when it is too small.
void append(std::optional<KeysValues>& buffer, int used, const KeysValues& fresh);

/// One row, no padding.
class KvCache final : public RowCache {
 public:
  explicit KvCache(ops::KvFormat format = {}) : RowCache(format) {}

  [[nodiscard]] ops::RopeOffset offset() const override { return size_; }
  [[nodiscard]] ops::AttentionMask mask(int tokens, int window) const override;
  /// Appends k and v and returns everything written so far.
  KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v) override;
  [[nodiscard]] std::unique_ptr<RowCache> clone() const override;
  [[nodiscard]] bool trimmable() const override { return true; }
  int trim(int tokens) override;

  [[nodiscard]] int size() const override { return size_; }

  /// A cache that holds exactly these tokens.
  static KvCache holding(KeysValues contents);

 private:
  [[nodiscard]] KeysValues fetched() const override;
  int size_ = 0;  ///< tokens written; the next one's position
};

}  // namespace galley::kv
