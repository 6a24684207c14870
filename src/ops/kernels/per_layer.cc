// Per-layer inputs (Gemma 4): vectors that every layer mixes in through a gate of its own.
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "ops/kernels/scratch.h"

namespace galley::kernels {

void per_layer_sum(Context& context, const PerLayerSum& sum, const float* projected, int rows, float* y) {
  if (sum.norm == nullptr || sum.layers <= 0 || sum.width <= 0) {
    throw std::invalid_argument("per_layer_sum: the norm is missing, or there are no layers");
  }
  const auto width = static_cast<std::size_t>(sum.width);
  spread(context, rows * sum.layers, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const float* p = projected + static_cast<std::size_t>(i) * width;
      float* to = y + static_cast<std::size_t>(i) * width;
      const float mean = sum_of_squares(p, sum.width) / static_cast<float>(sum.width);
      const float factor =
          sum.projection_scale / std::sqrt(mean * sum.projection_scale * sum.projection_scale + sum.eps);
      for (std::size_t c = 0; c < width; ++c) to[c] = (p[c] * factor * sum.norm[c] + to[c]) * sum.scale;
    }
  });
}

void gate_rows(Context& context, const float* x, std::size_t ldx, const float* by, std::size_t ldby, Gate gate,
               Activations& out) {
  const int columns = out.k();
  if (out.normed() || ldx < static_cast<std::size_t>(columns) || ldby < static_cast<std::size_t>(columns)) {
    throw std::invalid_argument("gate_rows: rows too short, or an output that expects a norm");
  }
  const KernelTable& kernels = *context.isa().kernels;
  const int width = unit_of(out);
  spread(context, out.tiles(), [&](int begin, int end, int) {
    // As linear_gated has them: 32 columns of the gate, then 32 of what it multiplies.
    alignas(64) float buf[static_cast<std::size_t>(kMaxTile) * kMaxUnit];
    const auto ld = static_cast<std::size_t>(2 * width);
    for (int t = begin; t < end; ++t) {
      const int rows = out.tile_rows(t), row0 = t * out.tile();
      for (int column = 0; column < columns; column += width) {
        for (int r = 0; r < rows; ++r) {
          const auto row = static_cast<std::size_t>(row0 + r);
          for (int c = 0; c < width; c += kUnitColumns) {
            float* pair = buf + static_cast<std::size_t>(r) * ld + 2 * c;
            const int n = std::min(kUnitColumns, columns - column - c);
            std::fill(pair, pair + 2 * kUnitColumns, 0.0F);
            if (n <= 0) continue;
            const auto at = static_cast<std::size_t>(column + c);
            std::memcpy(pair, x + row * ldx + at, static_cast<std::size_t>(n) * sizeof(float));
            std::memcpy(pair + kUnitColumns, by + row * ldby + at, static_cast<std::size_t>(n) * sizeof(float));
          }
        }
        kernels.gate(buf, ld, rows, width / kUnitColumns, gate);
        emit(kernels, buf, ld, rows, width, nullptr, out, row0, column);
      }
    }
  });
}

}  // namespace galley::kernels
