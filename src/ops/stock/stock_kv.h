// What the stock backend asks of a layer's KV cache. Caches live in kv/; the kind of cache decides how to attend.
#pragma once
#include <mlx/mlx.h>

#include <optional>
#include <string>
#include <variant>

#include "ops/error.h"
#include "ops/ops.h"

namespace galley::ops {

/// Position of the next token: one for all rows, or an int32 array [B].
using RopeOffset = std::variant<int, mlx::core::array>;

/// What mx::fast::scaled_dot_product_attention takes: a mode ("", "causal" or "array") and, for "array", a bool array
/// that broadcasts to [B, heads, L, S].
struct AttentionMask {
  std::string mode;
  std::optional<mlx::core::array> array;
};

class StockLayerKv : public LayerKv {
 public:
  /// Positions for RoPE. Changes with every write: read it once a layer, before the write, for q and for k.
  [[nodiscard]] virtual RopeOffset offset() const = 0;
  /// The mask for `tokens` new positions that have not been written yet. `window`: 0 for full attention.
  [[nodiscard]] virtual AttentionMask mask(int tokens, int window) const = 0;
  /// Writes k and v [B, kv_heads, L, D] and attends from q [B, heads, L, D] to everything written so far.
  virtual mlx::core::array write_and_attend(const mlx::core::array& q, const mlx::core::array& k,
                                            const mlx::core::array& v, float scale, const AttentionMask& mask) = 0;
  /// Attends from q to what the last write_and_attend() attended to: for layers that share this one's keys and values.
  virtual mlx::core::array attend_again(const mlx::core::array& /*q*/, float /*scale*/,
                                        const AttentionMask& /*mask*/) const {
    throw Error(500, "this kind of KV cache can't be shared between layers");
  }
};

}  // namespace galley::ops
