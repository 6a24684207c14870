// Paged KV: fixed-size blocks in one region a layer, found through a row's block table. Rows join and leave without
// copying. Numbers are stored as they come, in a 16- or 32-bit type, or quantized token by token, layer by layer.
// Engine thread only, but for the memory itself, which only MLX stream tasks touch.
//
// The regions are reserved address space: a page becomes resident when a block in it is first written.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_pool.h"
#include "ops/fused/paged_layer.h"
#include "ops/kernels/memory.h"
#include "ops/kernels/paged_kv.h"
#include "ops/kv_format.h"
#include "ops/ops.h"

namespace galley::kv {

class PagedKv {
 public:
  /// Tokens in a block, unless asked for otherwise.
  static constexpr int kBlockTokens = 32;

  /// `block_tokens`: a multiple of 16. As many as a row may hold make the KV contiguous, a block a row.
  /// `element`: f16, bf16 or f32, of layers that `formats` (one a layer, or none at all) does not quantize.
  PagedKv(std::span<const ops::AttentionSpec> layers, kernels::KvElement element, std::size_t budget_bytes,
          int block_tokens = kBlockTokens, std::span<const ops::KvFormat> formats = {});

  /// Bytes of one block over all layers.
  [[nodiscard]] std::size_t block_bytes() const { return block_bytes_; }
  [[nodiscard]] const BlockPool& pool() const { return pool_; }
  [[nodiscard]] BlockPool& pool() { return pool_; }
  [[nodiscard]] std::span<ops::LayerKv* const> layers() const { return pointers_; }

  /// Makes block `to` hold what `from` holds. No step in flight.
  void copy(std::int32_t from, std::int32_t to);
  /// The bytes of a block, layer after layer, to or from `bytes` [block_bytes()]. No step in flight.
  void copy_out(std::int32_t block, std::span<std::byte> bytes) const;
  void copy_in(std::int32_t block, std::span<const std::byte> bytes);

  /// Bytes of a block over `layers` for numbers stored so: what a budget is divided by.
  static std::size_t block_bytes(std::span<const ops::AttentionSpec> layers, kernels::KvElement element,
                                 int block_tokens = kBlockTokens, std::span<const ops::KvFormat> formats = {});

 private:
  std::size_t block_bytes_;
  BlockPool pool_;
  std::vector<kernels::AlignedMemory> regions_;
  std::vector<ops::PagedLayerKv> layers_;
  std::vector<ops::LayerKv*> pointers_;
};

/// The blocks of one row. Grows by taking from what was reserved at the start.
class PagedRow {
 public:
  PagedRow() = default;
  /// Begins with `shared` (full blocks, which it retains) and reserves the rest of what its first `tokens` need; the
  /// caller has checked that this can be had.
  PagedRow(BlockPool& pool, int tokens, std::span<const std::int32_t> shared = {});

  /// Unreserved blocks that grow(pool, n) would take.
  [[nodiscard]] int growth(const BlockPool& pool, int n) const;
  /// Makes room for positions [length, length + n) and moves the row's end: out of what the row reserved, then out of
  /// what nobody has; the caller has checked that there is enough.
  void grow(BlockPool& pool, int n);
  /// Goes on with full blocks that others computed, giving back as many of those reserved. The row ends at a block's
  /// border.
  void adopt(BlockPool& pool, std::span<const std::int32_t> shared);
  /// Holds another block of the same content in the place of its own. No step in flight.
  void exchange(BlockPool& pool, std::size_t at, std::int32_t block);
  /// Gives all blocks and the rest of the reservation back.
  void release(BlockPool& pool);
  [[nodiscard]] int length() const { return length_; }
  [[nodiscard]] std::span<const std::int32_t> table() const { return table_; }

 private:
  std::vector<std::int32_t> table_;
  int length_ = 0;
  int reserved_ = 0;
};

}  // namespace galley::kv
