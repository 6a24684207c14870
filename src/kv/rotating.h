// Contiguous KV of one row with a sliding window: a ring of `max_size` tokens. The counterpart of mlx-lm's
// RotatingKVCache (quantized: mlx-optiq's RotatingQuantizedKVCache).
//
//   write of several tokens   temporal order, the newest max_size - 1 stay, then the new ones: every new token sees a
//                             full window
//   write of one token        in place: the ring grows to max_size, then each token overwrites the oldest
//
// The first `keep` tokens are never overwritten (attention sinks).
#pragma once
#include <mlx/mlx.h>

#include <memory>

#include "kv/cache_kinds.h"
#include "kv/contiguous.h"

namespace galley::kv {

class RotatingKvCache final : public RowCache {
 public:
  explicit RotatingKvCache(int max_size, int keep = 0, ops::KvFormat format = {})
      : RowCache(format), max_size_(max_size), keep_(keep) {}

  [[nodiscard]] ops::RopeOffset offset() const override { return offset_; }
  /// `window`: 0 for the ring's own size. Columns are those that the write returns, in the ring's order.
  [[nodiscard]] ops::AttentionMask mask(int tokens, int window) const override;
  KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v) override;
  [[nodiscard]] std::unique_ptr<RowCache> clone() const override;
  [[nodiscard]] bool trimmable() const override { return offset_ < max_size_; }
  int trim(int tokens) override;

  [[nodiscard]] int size() const override { return offset_ < max_size_ ? offset_ : max_size_; }
  [[nodiscard]] int max_size() const { return max_size_; }
  /// Tokens ever written; the next one's position.
  [[nodiscard]] int position() const { return offset_; }
  /// The tokens held, oldest first (after the `keep` ones). The cache must not be empty.
  [[nodiscard]] KeysValues in_order() const;

  /// A ring that holds these tokens in order, the last of them at `position` - 1.
  static RotatingKvCache holding(int max_size, KeysValues contents, int position);

 private:
  [[nodiscard]] KeysValues fetched() const override;
  KeysValues append_in_order(const KeysValues& fresh);
  KeysValues write_in_place(const KeysValues& fresh);
  /// Drops `count` tokens behind the `keep` first ones.
  [[nodiscard]] KeysValues without(const KeysValues& all, int count) const;

  int max_size_;
  int keep_;
  int offset_ = 0;
  int next_ = 0;  ///< column of the next token
};

}  // namespace galley::kv
