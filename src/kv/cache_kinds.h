// The contiguous cache kinds behind one face: what a stock forward does with a layer's KV, whatever the layer is.
// Each kind is the counterpart of one mlx-lm cache class and follows it operation by operation.
//
//   AttentionSpec::window    one row              a batch of rows
//   0                        KvCache              BatchKvCache
//   > 0                      RotatingKvCache      BatchRotatingKvCache
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "ops/stock/stock_kv.h"

namespace galley::kv {

/// Tokens by which a buffer grows when it is full.
inline constexpr int growth_tokens = 256;

/// The KV of one row in one layer, without padding: what the serial lane holds.
class RowCache : public ops::StockLayerKv {
 public:
  /// Tokens that are held (for a ring: at most its window).
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual std::size_t nbytes() const = 0;
  /// What has to be evaluated so that the writes so far are done.
  [[nodiscard]] virtual std::vector<mlx::core::array> arrays() const = 0;
};

/// The KV of a batch of rows in one layer. Ragged prompts are written right-padded between prepare() and finalize().
class BatchCache : public ops::StockLayerKv {
 public:
  [[nodiscard]] virtual std::unique_ptr<BatchCache> clone() const = 0;

  /// Announces that of the columns written until finalize(), row b has only `lengths[b]`, followed by
  /// `right_padding[b]` that are padding. Without any padding nothing happens.
  virtual void prepare(const std::vector<int>& lengths, const std::vector<int>& right_padding) = 0;
  /// Turns the right padding of the writes since prepare() into left padding.
  virtual void finalize() = 0;
  /// Keeps these rows, in this order.
  virtual void filter(const std::vector<int>& rows) = 0;
  /// Adds the rows of another batch of the same kind behind this one's.
  virtual void extend(const BatchCache& other) = 0;

  /// Columns that are held, padding included (for a ring: at most its window).
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual std::size_t nbytes() const = 0;
  [[nodiscard]] virtual std::vector<mlx::core::array> arrays() const = 0;
};

/// An empty cache for one row of such a layer, as mlx-lm's make_cache makes it.
std::unique_ptr<RowCache> make_row_cache(const ops::AttentionSpec& layer);
/// The same for `rows` empty rows.
std::unique_ptr<BatchCache> make_batch_cache(const ops::AttentionSpec& layer, int rows);

/// Columns that a cache of such a layer may come to hold for rows of up to `tokens` tokens, written in pieces of at
/// most `piece`. A ring holds its window and, while a piece is being read, that piece.
std::size_t most_columns(const ops::AttentionSpec& layer, std::size_t tokens, std::size_t piece);

}  // namespace galley::kv
