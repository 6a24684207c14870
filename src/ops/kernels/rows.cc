// Embedding rows, the stand-alone norm, and the helpers for one row of logits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "ops/kernels/half.h"
#include "ops/kernels/scratch.h"

namespace galley::kernels {
namespace {

// One output column of a packed matrix, decoded.
void decode_column(const PackedMatrix& w, int column, float* y) {
  const auto columns = static_cast<std::size_t>(w.block_columns());
  const std::uint8_t* block = w.block(static_cast<std::size_t>(column) / columns);
  const std::size_t lane = static_cast<std::size_t>(column) % columns;
  const auto depth = static_cast<std::size_t>(w.depth());
  const auto half_at = [](const std::uint8_t* p) {
    std::uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
  };
  if (!w.affine()) {
    for (std::size_t k = 0; k < depth; ++k) {
      const std::size_t at = k * columns + lane;
      switch (w.kind()) {
        case WeightKind::f16:
          y[k] = half_to_float(half_at(block + at * 2));
          break;
        case WeightKind::bf16:
          y[k] = bfloat_to_float(half_at(block + at * 2));
          break;
        default:
          std::memcpy(y + k, block + at * 4, 4);
          break;
      }
    }
    return;
  }
  const auto scale_at = [&](std::size_t index) {
    if (w.half_scales()) return half_to_float(half_at(block + index * 2));
    float f;
    std::memcpy(&f, block + index * 4, 4);
    return f;
  };
  const auto group = static_cast<std::size_t>(w.group()), bits = static_cast<std::size_t>(w.bits());
  const std::size_t per_group = w.symmetric() ? columns : 2 * columns;
  const float zero_point = static_cast<float>(1 << (w.bits() - 1));
  for (std::size_t g = 0; g < depth / group; ++g) {
    const float scale = scale_at(g * per_group + lane);
    const float bias = w.symmetric() ? -zero_point * scale : scale_at(g * per_group + columns + lane);
    for (std::size_t k = g * group; k < (g + 1) * group; ++k) {
      const std::uint8_t* part = block + w.header_bytes() + k / 32 * columns * 4 * bits;
      const std::size_t row = k % 32 / 4, j = k % 4;
      const int code = bits == 8 ? part[(row * columns + lane) * 4 + j]
                                 : part[(row % 4 * columns + lane) * 4 + j] >> (row < 4 ? 0 : 4) & 15;
      y[k] = scale * static_cast<float>(code) + bias;
    }
  }
}

// One tile of `out` from rows of x: source(r) is the start of the row.
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
    decode_column(table, tokens[static_cast<std::size_t>(r)], to);
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
