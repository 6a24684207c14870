// The contiguous cache kinds behind one face: what a stock forward does with a layer's KV, whatever the layer is.
// Each kind is the counterpart of one mlx-lm cache class and follows it operation by operation.
//
//   AttentionSpec::window    one row              a batch of rows
//   0                        KvCache              BatchKvCache
//   > 0                      RotatingKvCache      BatchRotatingKvCache
//
// Quantized, they follow mlx-optiq 0.7.7, which extends mlx-lm's classes:
//
//   one row           QuantizedKVCache and RotatingQuantizedKVCache: numbers are kept as they come, and attended to as
//                     such, until settle() after the first forward; from then on they are quantized as they are written
//   a batch of rows   BatchQuantizedKVCache: quantized from the first write on. Rings are not, as there
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv/keys_values.h"
#include "ops/kv_format.h"
#include "ops/stock/stock_kv.h"

namespace galley::kv {

/// Tokens by which a buffer grows when it is full.
inline constexpr int growth_tokens = 256;

/// What all kinds share: one buffer of keys and values, and how it is attended to.
class ContiguousKv : public ops::StockLayerKv {
 public:
  mlx::core::array write_and_attend(const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v,
                                    float scale, const ops::AttentionMask& mask) final {
    return attend(q, update_and_fetch(k, v), scale, mask);
  }
  [[nodiscard]] mlx::core::array attend_again(const mlx::core::array& q, float scale,
                                              const ops::AttentionMask& mask) const final {
    return attend(q, fetched(), scale, mask);
  }
  /// Writes k and v [B, kv_heads, L, D]; returns what they attend to.
  virtual KeysValues update_and_fetch(const mlx::core::array& k, const mlx::core::array& v) = 0;

  /// Columns that are held, padding included (for a ring: at most its window).
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] bool empty() const { return !buffer_.has_value(); }
  [[nodiscard]] const std::optional<KeysValues>& buffer() const { return buffer_; }
  [[nodiscard]] std::size_t nbytes() const { return buffer_ ? buffer_->nbytes() : 0; }
  /// What has to be evaluated so that the writes so far are done.
  [[nodiscard]] std::vector<mlx::core::array> arrays() const {
    return buffer_ ? buffer_->arrays() : std::vector<mlx::core::array>{};
  }

 protected:
  /// What the last write attends to.
  [[nodiscard]] virtual KeysValues fetched() const = 0;

  std::optional<KeysValues> buffer_;
};

/// The KV of one row in one layer, without padding: what the serial lane holds.
class RowCache : public ContiguousKv {
 public:
  /// `format`: of what is held from the first settle() on.
  explicit RowCache(ops::KvFormat format) : format_(format) {}

  /// Shares the arrays until one of the two is written to.
  [[nodiscard]] virtual std::unique_ptr<RowCache> clone() const = 0;
  /// Whether the newest tokens can be forgotten, which a ring that has wrapped can't do.
  [[nodiscard]] virtual bool trimmable() const = 0;
  /// Forgets the last `tokens` (at most all); returns how many. Only while trimmable().
  virtual int trim(int tokens) = 0;

  /// To be called after every forward: quantizes what the first one wrote.
  void settle() {
    if (format_.quantized() && buffer_ && !buffer_->groups) buffer_ = buffer_->quantized(format_);
  }

 protected:
  /// k and v in the form of what is held.
  [[nodiscard]] KeysValues in_form(const mlx::core::array& k, const mlx::core::array& v) const {
    const KeysValues plain{k, v};
    return buffer_ && buffer_->groups ? plain.quantized(format_) : plain;
  }

 private:
  ops::KvFormat format_;
};

/// The KV of a batch of rows in one layer. Ragged prompts are written right-padded between prepare() and finalize().
class BatchCache : public ContiguousKv {
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
  /// A row's tokens as a cache of its own.
  [[nodiscard]] virtual std::unique_ptr<RowCache> row_cache(int row) const = 0;
};

/// An empty cache for one row of such a layer, as mlx-lm's make_cache makes it.
std::unique_ptr<RowCache> make_row_cache(const ops::AttentionSpec& layer, ops::KvFormat format = {});
/// The same for `rows` empty rows. Rings are kept as they come, whatever the format.
std::unique_ptr<BatchCache> make_batch_cache(const ops::AttentionSpec& layer, int rows, ops::KvFormat format = {});
/// Rows' own caches of such a layer, empty ones among them, side by side in a batch. In rings nothing is quantized.
std::unique_ptr<BatchCache> merge_row_caches(const ops::AttentionSpec& layer, std::span<const RowCache* const> rows,
                                             ops::KvFormat format = {});

/// Columns that a cache of such a layer may come to hold for rows of up to `tokens` tokens, written in pieces of at
/// most `piece`. A ring holds its window and, while a piece is being read, that piece.
std::size_t most_columns(const ops::AttentionSpec& layer, std::size_t tokens, std::size_t piece);

}  // namespace galley::kv
