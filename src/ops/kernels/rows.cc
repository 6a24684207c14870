// Embedding rows and the stand-alone norm.
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

}  // namespace galley::kernels
