// The kernels in plain C++: correct on any CPU, and the reference in words. Same rules of order as the vector bodies,
// so invariance holds here too; bits differ between instruction sets.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/kernels/half.h"
#include "ops/kernels/kernel_table.h"
#include "ops/kernels/pack_read.h"

namespace galley::kernels {
namespace {

std::uint16_t load16(const std::uint8_t* p) { return load_packed<std::uint16_t>(p); }

void affine(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
            std::size_t ld, const Fetch&) {
  const int rows = x.tile_rows(tile), group = w.group(), zero = zero_point(w);
  const auto lanes = static_cast<std::size_t>(w.lanes());
  const std::size_t row0 = static_cast<std::size_t>(tile) * x.tile();
  std::vector<std::int32_t> codes(static_cast<std::size_t>(w.groups()) * group);
  for (int b = 0; b < count; ++b) {
    const std::uint8_t* block = w.block(first + static_cast<std::size_t>(b));
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      for (std::size_t k = 0; k < codes.size(); ++k) codes[k] = code_at(w, block, lane, static_cast<int>(k)) - zero;
      for (int r = 0; r < rows; ++r) {
        const std::int8_t* row = x.q() + row0 * x.k() + static_cast<std::ptrdiff_t>(r) * 32;
        float acc = 0;
        for (int g = 0; g < w.groups(); ++g) {
          std::int32_t dot = 0, sum = 0;
          for (int k = g * group; k < (g + 1) * group; ++k) {
            const int q = row[static_cast<std::ptrdiff_t>(k / 32) * rows * 32 + k % 32];
            dot += codes[static_cast<std::size_t>(k)] * q;
            sum += q;
          }
          const int step = g * group / x.form().group;
          const float scale = x.scale()[row0 * x.groups() + static_cast<std::size_t>(step) * rows + r];
          const PackedScale weights = scale_at(w, block, lane, g);
          acc = std::fma(static_cast<float>(dot), weights.scale * scale, acc);
          if (!w.symmetric()) acc = std::fma(weights.bias, scale * static_cast<float>(sum), acc);
        }
        out[r * ld + b * lanes + lane] = acc;
      }
    }
  }
}

void plain(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
           std::size_t ld, const Fetch&) {
  const int rows = x.tile_rows(tile);
  for (int b = 0; b < count; ++b) {
    const std::uint8_t* block = w.block(first + static_cast<std::size_t>(b));
    for (int r = 0; r < rows; ++r) {
      const float* row = x.x() + (static_cast<std::size_t>(tile) * x.tile() + r) * x.stride();
      for (int lane = 0; lane < kPlainColumns; ++lane) {
        float acc = 0;
        for (int k = 0; k < w.depth(); ++k) {
          const std::size_t at = static_cast<std::size_t>(k) * kPlainColumns + lane;
          float v = 0;
          if (w.kind() == WeightKind::f32) {
            std::memcpy(&v, block + at * 4, 4);
          } else {
            const std::uint16_t h = load16(block + at * 2);
            v = w.kind() == WeightKind::f16 ? half_to_float(h) : bfloat_to_float(h);
          }
          acc = std::fma(row[k], v, acc);
        }
        out[r * ld + b * kPlainColumns + lane] = acc;
      }
    }
  }
}

void scale_bias(float* buf, std::size_t ld, int rows, int width, const float* factor, const float* bias) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) {
      float& v = buf[r * ld + c];
      if (factor != nullptr) v *= factor[r];
      if (bias != nullptr) v += bias[c];
    }
  }
}

void add_residual(float* buf, std::size_t ld, int rows, int width, const float* residual, float* y, std::size_t ldy,
                  float scale) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) {
      float& v = buf[r * ld + c];
      v = v * scale + residual[r * ldy + c];
      y[r * ldy + c] = v;
    }
  }
}

void norm(float* buf, std::size_t ld, int rows, int width, const float* weight, float* ssq, std::size_t ssq_stride) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; c += 32) {
      float sum = 0;
      for (int i = c; i < c + 32; ++i) {
        float& v = buf[r * ld + i];
        sum += v * v;
        v *= weight[i];
      }
      ssq[c / 32 * ssq_stride + r] = sum;
    }
  }
}

float activate(float x, Gate kind) {
  if (kind == Gate::silu) return x / (1.0F + std::exp(-x));
  return 0.5F * x * (1.0F + std::tanh(0.7978845608028654F * x * (1.0F + 0.044715F * x * x)));
}

void gate(float* buf, std::size_t ld, int rows, int pairs, Gate kind) {
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < pairs; ++p) {
      for (int c = 0; c < 32; ++c) {
        float* row = buf + r * ld;
        row[p * 32 + c] = activate(row[p * 64 + c], kind) * row[p * 64 + 32 + c];
      }
    }
  }
}

void quantize(const float* buf, std::size_t ld, int rows, const Activations& out, int row, int g) {
  const int t = row / out.tile(), in_tile = out.tile_rows(t), group = out.form().group;
  const std::size_t row0 = static_cast<std::size_t>(t) * out.tile();
  for (int r = 0; r < rows; ++r) {
    const float* v = buf + r * ld;
    std::uint32_t top = 0;  // over bit patterns, where NaN is largest: a faulty row stays visibly faulty
    for (int i = 0; i < group; ++i) top = std::max(top, std::bit_cast<std::uint32_t>(v[i]) & 0x7fffffffU);
    const float largest = std::bit_cast<float>(top);
    const float inverse = largest > 1e-30F ? 127.0F / largest : 0.0F;
    const std::size_t at = static_cast<std::size_t>(row) + r - row0;
    std::int8_t* q = out.q() + row0 * out.k() + static_cast<std::size_t>(g) * group * in_tile + at * 32;
    std::int32_t sum = 0, half_sum = 0;
    for (int i = 0; i < group; ++i) {
      const float scaled = v[i] * inverse;
      const int code = std::isfinite(scaled) ? static_cast<int>(std::nearbyint(scaled)) : 0;
      q[static_cast<std::size_t>(i / 32) * in_tile * 32 + i % 32] = static_cast<std::int8_t>(code);
      sum += code;
      if (i == 15) half_sum = sum;
    }
    if (group == 32) {
      std::int32_t* neg16 = out.neg16() + 2 * (row0 * out.groups() + static_cast<std::size_t>(g) * in_tile) + at;
      neg16[0] = -half_sum;
      neg16[in_tile] = half_sum - sum;
    }
    const std::size_t cell = row0 * out.groups() + static_cast<std::size_t>(g) * in_tile + at;
    out.scale()[cell] = largest * (1.0F / 127.0F);
    out.sum()[cell] = out.scale()[cell] * static_cast<float>(sum);
    out.neg()[cell] = -sum;
  }
}

void argmax(const float* buf, std::size_t ld, int rows, int width, std::int32_t index, Best* best) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) {
      const float v = buf[r * ld + c];
      Best& b = best[r];  // of equals the lower index wins: units may come in any order
      if (v > b.value || (v == b.value && (b.index < 0 || index + c < b.index))) b = {v, index + c};
    }
  }
}

void soft_cap(float* buf, std::size_t ld, int rows, int width, float cap) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) buf[r * ld + c] = cap * std::tanh(buf[r * ld + c] / cap);
  }
}

void head(const HeadTask& task, const float* values) {
  float t[kMaxHeadDim], u[kMaxHeadDim];
  float scale = task.scale;
  if (task.norm != nullptr) {
    float sum = 0;
    for (int i = 0; i < task.dim; ++i) sum += values[i] * values[i];
    scale *= 1.0F / std::sqrt(sum / static_cast<float>(task.dim) + task.eps);
  }
  for (int i = 0; i < task.dim; ++i) t[i] = u[i] = values[i] * scale * (task.norm != nullptr ? task.norm[i] : 1.0F);
  if (task.rope != nullptr) {
    const int half = task.rope_dims / 2;
    for (int i = 0; i < half; ++i) {
      const int a = task.traditional ? 2 * i : i, b = task.traditional ? 2 * i + 1 : half + i;
      const float c = task.rope[i], s = task.rope[half + i];
      u[a] = t[a] * c - t[b] * s;
      u[b] = t[b] * c + t[a] * s;
    }
  }
  if (task.q != nullptr) {
    std::copy(u, u + task.dim, task.q);
  } else {
    store_kv_row(*task.kv, task.run, task.part, task.slot, u);
  }
}

void segment(const SegmentTask& task) {
  const PagedKv& kv = *task.kv;
  const int dim = kv.head_dim;
  for (int v = 0; v < task.vectors; ++v) {
    const int first = task.first[v], last = task.last[v];
    float* out = task.out + static_cast<std::ptrdiff_t>(v) * dim;
    float max = kNothing, sum = 0;
    for (int s = first; s < last; ++s) {
      const std::byte* keys = kv.keys(task.table[s / kv.block_tokens], task.kv_head, s % kv.block_tokens);
      float score = 0;
      for (int d = 0; d < dim; ++d) {
        score = std::fma(task.q[v][d], kv_number(kv, keys, KvPart::keys, s % kKeyGroup, d), score);
      }
      if (task.softcap > 0) score = task.softcap * std::tanh(score / task.softcap);
      task.scores[s - first] = score;
      max = std::max(max, score);
    }
    std::fill(out, out + dim, 0.0F);
    for (int s = first; s < last; ++s) {
      const float weight = std::exp2(task.scores[s - first] - max);
      sum += weight;
      const std::byte* values = kv.values(task.table[s / kv.block_tokens], task.kv_head, s % kv.block_tokens);
      for (int d = 0; d < dim; ++d) {
        out[d] = std::fma(weight, kv_number(kv, values, KvPart::values, s % kKeyGroup, d), out[d]);
      }
    }
    task.max[v] = max;
    task.sum[v] = sum;
  }
}

void merge(int dim, float* out, float* max, float* sum, const float* part, float part_max, float part_sum) {
  if (part_max == kNothing && part_sum == 0) return;
  if (*max == kNothing && *sum == 0) {
    std::copy(part, part + dim, out);
    *max = part_max;
    *sum = part_sum;
    return;
  }
  const float top = std::max(*max, part_max), a = std::exp2(*max - top), b = std::exp2(part_max - top);
  for (int d = 0; d < dim; ++d) out[d] = std::fma(part[d], b, out[d] * a);
  *sum = *sum * a + part_sum * b;
  *max = top;
}

}  // namespace

void fill_scalar(KernelTable& t) {
  for (const int bits : {4, 5, 6, 8}) t.affine[bits] = affine;
  t.plain = plain;
  t.scale_bias = scale_bias;
  t.add_residual = add_residual;
  t.norm = norm;
  t.gate = gate;
  t.quantize = quantize;
  t.argmax = argmax;
  t.soft_cap = soft_cap;
  t.head = head;
  t.segment = segment;
  t.merge = merge;
}

}  // namespace galley::kernels
