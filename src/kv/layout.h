// How the KV of a model's layers is laid out in blocks.
//
// Layers are of two kinds: those that see the whole text, and sliding ones, which see a window of it. A text block
// holds a run of tokens for all layers of the first kind, a window block the same for those of the second. Both are
// made of units of one size (see BlockPool); each unit of a block holds some of the kind's layers whole.
//
// A model whose layers all slide, or none of whose do, has one kind: a block is one unit, and holds all layers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/paged_row.h"
#include "ops/kernels/paged_kv.h"
#include "ops/kv_format.h"
#include "ops/ops.h"

namespace galley::kv {

struct Layout {
  struct Layer {
    kernels::PagedKv view;   ///< without data yet
    bool slides = false;     ///< its numbers lie in window blocks
    int unit = 0;            ///< of a text block with its window block, which stands behind it
    std::size_t offset = 0;  ///< in the unit
  };

  /// `element`: f16, bf16 or f32, of layers that `formats` (one a layer, or none at all) does not quantize.
  /// `block_tokens`: a multiple of 16. Unless `kinds`, all layers are taken to be of one kind.
  Layout(std::span<const ops::AttentionSpec> specs, kernels::KvElement element, int block_tokens,
         std::span<const ops::KvFormat> formats, bool kinds = true);

  [[nodiscard]] int block_units() const { return text_units + window_units; }
  [[nodiscard]] std::size_t block_bytes() const { return unit_bytes * static_cast<std::size_t>(block_units()); }
  /// `step_tokens`: most tokens of one row in one step.
  [[nodiscard]] Sliding sliding(int step_tokens) const;
  /// Units that a row of so many blocks holds at most, and blocks of a row that so many units are enough for.
  [[nodiscard]] std::int64_t row_units(std::int64_t blocks, const Sliding& sliding) const;
  [[nodiscard]] std::int64_t row_blocks(std::int64_t units, const Sliding& sliding) const;

  int block_tokens = 0;
  int window = 0;  ///< of the sliding layers, the largest; 0: there are none
  int text_units = 1, window_units = 0;
  std::size_t unit_bytes = 0;
  std::size_t text_bytes = 0, window_bytes = 0;  ///< of numbers in a block of each kind, without the units' unused ends
  std::vector<Layer> layers;
};

}  // namespace galley::kv
