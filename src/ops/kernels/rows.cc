// Embedding rows, the stand-alone norm, and the helpers for one row of logits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "ops/kernels/scratch.h"

namespace galley::kernels {
namespace {

void check_norm(const Activations& out, const float* norm) {
  if (out.normed() != (norm != nullptr))
    throw std::invalid_argument("the output must be normed exactly if a norm follows");
}

}  // namespace

void embed(Context& context, const PackedMatrix& table, std::span<const std::int32_t> tokens, float scale, float* y,
           std::size_t ld, const float* norm, Activations* out) {
  const int rows = static_cast<int>(tokens.size());
  if (table.interleaved() || ld < static_cast<std::size_t>(table.depth())) {
    throw std::invalid_argument("embed: not an embedding table, or rows of y too short");
  }
  for (const std::int32_t t : tokens) {
    if (t < 0 || t >= table.columns())
      throw std::invalid_argument("embed: token " + std::to_string(t) + " is out of range");
  }
  if (out != nullptr) {
    check_norm(*out, norm);
    if (out->rows() != rows || out->k() != table.depth())
      throw std::invalid_argument("embed: the output has another shape");
  }
  const auto row = [&](int r) {
    float* to = y + static_cast<std::size_t>(r) * ld;
    table.decode(tokens[static_cast<std::size_t>(r)], {to, static_cast<std::size_t>(table.depth())});
    if (scale != 1.0F) {
      for (int k = 0; k < table.depth(); ++k) to[k] *= scale;
    }
  };
  if (out == nullptr) {
    spread(context, rows, [&](int begin, int end, int) {
      for (int r = begin; r < end; ++r) row(r);
    });
    return;
  }
  spread(context, out->tiles(), [&](int begin, int end, int) {
    for (int t = begin; t < end; ++t) {
      for (int r = 0; r < out->tile_rows(t); ++r) row(t * out->tile() + r);
      emit_tile(*context.isa().kernels, *out, t, norm, [&](int r) { return y + static_cast<std::size_t>(r) * ld; });
    }
  });
}

void norm_quantize(Context& context, const float* x, std::size_t ld, const std::int32_t* rows, const float* norm,
                   Activations& out) {
  check_norm(out, norm);
  if (ld < static_cast<std::size_t>(out.k())) throw std::invalid_argument("norm_quantize: rows of x are too short");
  spread(context, out.tiles(), [&](int begin, int end, int) {
    for (int t = begin; t < end; ++t) {
      emit_tile(*context.isa().kernels, out, t, norm,
                [&](int r) { return x + static_cast<std::size_t>(rows != nullptr ? rows[r] : r) * ld; });
    }
  });
}

float row_max(const Isa& isa, std::span<const float> x) { return isa.kernels->row_max(x.data(), x.size()); }

std::int32_t row_argmax(const Isa& isa, std::span<const float> x) {
  return isa.kernels->row_argmax(x.data(), x.size());
}

float row_log_sum_exp(const Isa& isa, std::span<const float> x) {
  const float max = row_max(isa, x);
  if (!std::isfinite(max)) return max;
  return static_cast<float>(static_cast<double>(max) +
                            std::log(isa.kernels->row_exp(x.data(), x.size(), max, 1.0F, nullptr)));
}

double row_exp(const Isa& isa, std::span<const float> x, float max, float inverse_temperature, float* out) {
  return isa.kernels->row_exp(x.data(), x.size(), max, inverse_temperature, out);
}

}  // namespace galley::kernels
