// Internal: memory a Context lends to its kernels. Grows, never shrinks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/kernels.h"
#include "ops/kernels/memory.h"

namespace galley::kernels {

struct Context::Scratch {
  struct alignas(64) Thread {
    AlignedMemory memory;
    /// `count` floats, 64-byte aligned; what they held is lost.
    float* floats(std::size_t count) {
      if (memory.size() < count * sizeof(float)) memory = AlignedMemory(count * sizeof(float) * 2);
      return reinterpret_cast<float*>(memory.data());
    }
  };
  struct RowGroup {  // neighbouring rows of one sequence
    int row, rows;
  };
  std::vector<Thread> threads;
  std::vector<float> factors;          // RMS factor of each row
  std::vector<Best> best;              // [threads][rows]
  std::vector<RowGroup> groups;        // of the attention
  std::vector<const char*> kv_blocks;  // to fetch ahead
  std::vector<std::int64_t> offsets;   // of each attention unit's partial results
  AlignedMemory parts;
  struct Experts {  // of one mixture: picks by place (row, rank), slots in order of the experts
    std::vector<std::int32_t> expert, slot;  // of each place
    std::vector<float> weight;
    std::vector<std::int32_t> begin, next;  // each expert's first slot
    std::vector<std::int32_t> row;          // of each slot
    Activations in, gated;
    AlignedMemory products;  // [slots][hidden]
  } experts;
};

/// Sixteen partial sums, whatever the width, so that the order never changes and the loop vectorizes.
float sum_of_squares(const float* x, int columns);

/// Units per grab so that each thread comes by about four times.
[[nodiscard]] inline int grain_of(int units, int threads) {
  return units / (threads * 4) > 1 ? units / (threads * 4) : 1;
}

/// Runs f(begin, end, thread) on the pool for [0, units).
template <class F>
void spread(Context& context, int units, const F& f) {
  context.pool().for_each(units, grain_of(units, context.threads()), f);
}

/// Leaves width columns (from group-aligned column `column` on) of `rows` rows in `out`; `row`.. lie in one tile.
void emit(const KernelTable& kernels, float* buf, std::size_t ld, int rows, int width, const float* norm,
          const Activations& out, int row, int column);

/// Columns a producer of `out` finishes at a time: whole quantization groups and whole sums of squares.
[[nodiscard]] inline int unit_of(const Activations& out) {
  return out.form().group > kUnitColumns ? out.form().group : kUnitColumns;
}

/// One tile of `out` from rows of x: source(r) is the start of the row.
template <class Source>
void emit_tile(const KernelTable& kernels, const Activations& out, int tile, const float* norm, const Source& source) {
  alignas(64) float buf[static_cast<std::size_t>(kMaxTile) * kMaxUnit];
  const int rows = out.tile_rows(tile), row0 = tile * out.tile(), width = unit_of(out);
  for (int column = 0; column < out.k(); column += width) {
    const int n = std::min(width, out.k() - column);
    for (int r = 0; r < rows; ++r) {
      float* to = buf + r * width;
      std::memcpy(to, source(row0 + r) + column, static_cast<std::size_t>(n) * sizeof(float));
      std::fill(to + n, to + width, 0.0F);
    }
    emit(kernels, buf, static_cast<std::size_t>(width), rows, width, norm, out, row0, column);
  }
}

}  // namespace galley::kernels
