// Paged KV: fixed-size blocks found through a row's block table. Rows join and leave without copying. Numbers are
// stored as they come, in a 16- or 32-bit type, or quantized token by token, layer by layer. Engine thread only, but
// for the memory itself, which only MLX stream tasks touch.
//
// The memory is reserved address space: a page becomes resident when a block in it is first written.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_pool.h"
#include "kv/layout.h"
#include "kv/paged_row.h"
#include "ops/fused/paged_layer.h"
#include "ops/kernels/memory.h"

namespace galley::kv {

class PagedKv {
 public:
  /// Tokens in a block, unless asked for otherwise. As many as a row may hold, with layers all of one kind, make the KV
  /// contiguous, a block a row.
  static constexpr int kBlockTokens = 32;

  PagedKv(Layout layout, std::size_t budget_bytes);

  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const BlockPool& pool() const { return pool_; }
  [[nodiscard]] BlockPool& pool() { return pool_; }
  [[nodiscard]] std::span<ops::LayerKv* const> layers() const { return pointers_; }

  /// Makes text block `to` hold what `from` holds, in their window blocks too. No step in flight.
  void copy(std::int32_t from, std::int32_t to);
  /// From a text block, layer after layer, and then its window block, if it has one, to `bytes` [all_bytes()]; returns
  /// what was filled. No step in flight.
  std::span<const std::byte> copy_out(std::int32_t block, std::span<std::byte> bytes) const;
  /// To a text block and, if `bytes` has so much, its window block.
  void copy_in(std::int32_t block, std::span<const std::byte> bytes);
  /// To its window block alone, out of `bytes` [all_bytes()].
  void copy_in_window(std::int32_t block, std::span<const std::byte> bytes);
  [[nodiscard]] std::size_t all_bytes() const { return layout_.text_bytes + layout_.window_bytes; }

 private:
  [[nodiscard]] std::byte* place(std::size_t layer, std::int32_t block) const;
  void fill(std::int32_t block, bool window, std::span<const std::byte> bytes);

  Layout layout_;
  BlockPool pool_;
  kernels::AlignedMemory memory_;  // unit after unit, so that what is resident grows block by block
  std::vector<ops::PagedLayerKv> layers_;
  std::vector<ops::LayerKv*> pointers_;
};

}  // namespace galley::kv
