// Residual branches with a norm of their own at the end (Gemma): it needs the whole row, so it can't be part of the
// product's epilogue.
#include <cmath>
#include <stdexcept>

#include "ops/kernels/scratch.h"

namespace galley::kernels {

float sum_of_squares(const float* x, int columns) {
  constexpr int kParts = 16;
  float part[kParts] = {};
  const int whole = columns / kParts * kParts;
  for (int c = 0; c < whole; c += kParts) {
    for (int i = 0; i < kParts; ++i) part[i] += x[c + i] * x[c + i];
  }
  for (int i = 0; whole + i < columns; ++i) part[i] += x[whole + i] * x[whole + i];
  float sum = 0;
  for (const float p : part) sum += p;
  return sum;
}

void norm_residual(Context& context, const float* x, int rows, int columns, const float* weight, float eps,
                   const Residual& to) {
  if (to.y == nullptr || to.ld < static_cast<std::size_t>(columns)) {
    throw std::invalid_argument("norm_residual: y is missing, or its rows are too short");
  }
  if (to.out != nullptr &&
      (to.out->rows() != rows || to.out->k() != columns || to.out->normed() != (to.norm != nullptr))) {
    throw std::invalid_argument("norm_residual: the output has another shape, or is not normed as it must be");
  }
  const auto row = [&](int r) {
    const std::size_t at = static_cast<std::size_t>(r) * to.ld;
    const float* in = x + at;
    float* y = to.y + at;
    const float factor = to.scale / std::sqrt(sum_of_squares(in, columns) / static_cast<float>(columns) + eps);
    if (to.residual == nullptr) {
      for (int c = 0; c < columns; ++c) y[c] = in[c] * factor * weight[c] * to.whole;
    } else {
      const float* base = to.residual + at;
      for (int c = 0; c < columns; ++c) y[c] = (base[c] + in[c] * factor * weight[c]) * to.whole;
    }
  };
  if (to.out == nullptr) {
    spread(context, rows, [&](int begin, int end, int) {
      for (int r = begin; r < end; ++r) row(r);
    });
    return;
  }
  const Activations& out = *to.out;
  spread(context, out.tiles(), [&](int begin, int end, int) {
    for (int t = begin; t < end; ++t) {
      for (int r = 0; r < out.tile_rows(t); ++r) row(t * out.tile() + r);
      emit_tile(*context.isa().kernels, out, t, to.norm,
                [&](int r) { return to.y + static_cast<std::size_t>(r) * to.ld; });
    }
  });
}

}  // namespace galley::kernels
