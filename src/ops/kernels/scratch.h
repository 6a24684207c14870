// Internal: memory a Context lends to its kernels. Grows, never shrinks.
#pragma once
#include <cstdint>
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
  std::vector<float> factors;         // RMS factor of each row
  std::vector<Best> best;             // [threads][rows]
  std::vector<RowGroup> groups;       // of the attention
  std::vector<std::int64_t> offsets;  // of each attention unit's partial results
  AlignedMemory parts;
};

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

}  // namespace galley::kernels
