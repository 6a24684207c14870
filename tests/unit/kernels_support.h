// Random matrices, references in double and a toy paged pool for the kernel tests.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/kernels/half.h"
#include "ops/kernels/kernels.h"
#include "ops/kernels/kv_numbers.h"
#include "ops/weights.h"

namespace galley::kernels::test {

using Floats = std::vector<float>;

inline Floats random_floats(std::size_t n, unsigned seed, float spread = 1.0F) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  Floats v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

struct MatrixSpec {
  int rows = 0, cols = 0, bits = 4, group = 32;   // bits 0: plain of `type`
  ops::ElementType type = ops::ElementType::f16;  // affine: what scales are rounded to
  bool symmetric = false;
  unsigned seed = 1;
};

class TestMatrix : public ops::MatrixSource {
 public:
  explicit TestMatrix(const MatrixSpec& spec) : spec_(spec) {
    std::mt19937 rng(spec.seed);
    std::normal_distribution<float> normal(0.0F, 1.0F);
    const auto n = static_cast<std::size_t>(spec.rows) * static_cast<std::size_t>(spec.cols);
    if (spec.bits == 0) {
      for (std::size_t i = 0; i < n; ++i) values_.push_back(round(normal(rng) * 0.1F));
      return;
    }
    for (std::size_t i = 0; i < n; ++i) codes_.push_back(static_cast<std::uint8_t>(rng() % (1U << spec.bits)));
    for (std::size_t i = 0; i < n / static_cast<std::size_t>(spec.group); ++i) {
      scale_.push_back(round(0.02F + 0.01F * std::fabs(normal(rng))));
      const float zero = static_cast<float>(1 << (spec.bits - 1));
      bias_.push_back(spec.symmetric ? -zero * scale_.back() : round(-zero * scale_.back() + 0.02F * normal(rng)));
    }
  }
  const std::string& name() const override { return name_; }
  int rows() const override { return spec_.rows; }
  int cols() const override { return spec_.cols; }
  bool quantized() const override { return spec_.bits != 0; }
  ops::AffineFormat affine() const override { return {spec_.bits, spec_.group}; }
  ops::ElementType type() const override { return spec_.type; }
  void codes(int row, std::span<std::uint8_t> out) const override {
    std::copy_n(codes_.begin() + std::ptrdiff_t{row} * spec_.cols, spec_.cols, out.begin());
  }
  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    const int groups = spec_.cols / spec_.group;
    std::copy_n(scale_.begin() + std::ptrdiff_t{row} * groups, groups, scale.begin());
    std::copy_n(bias_.begin() + std::ptrdiff_t{row} * groups, groups, bias.begin());
  }
  void values(int row, std::span<float> out) const override {
    for (int k = 0; k < spec_.cols; ++k) {
      const std::size_t i =
          static_cast<std::size_t>(row) * static_cast<std::size_t>(spec_.cols) + static_cast<std::size_t>(k);
      if (spec_.bits == 0) {
        out[static_cast<std::size_t>(k)] = values_[i];
        continue;
      }
      const std::size_t g = i / static_cast<std::size_t>(spec_.group);
      out[static_cast<std::size_t>(k)] = scale_[g] * static_cast<float>(codes_[i]) + bias_[g];
    }
  }
  Floats row(int r) const {
    Floats v(static_cast<std::size_t>(spec_.cols));
    values(r, v);
    return v;
  }

 private:
  float round(float f) const {
    switch (spec_.type) {
      case ops::ElementType::f16:
        return half_to_float(float_to_half(f));
      case ops::ElementType::bf16:
        return bfloat_to_float(float_to_bfloat(f));
      case ops::ElementType::f32:
        break;
    }
    return f;
  }
  MatrixSpec spec_;
  std::string name_ = "test.weight";
  std::vector<std::uint8_t> codes_;
  Floats scale_, bias_, values_;
};

inline PackedMatrix packed(const Context& context, const TestMatrix& m) {
  const ops::MatrixSource* const one[] = {&m};
  return PackedMatrix::concatenate(context.isa(), one);
}

/// The activations as the kernels see them: decoded from int8, or the fp32 rows.
inline Floats decoded(const Activations& a) {
  const auto k = static_cast<std::size_t>(a.k());
  Floats out(static_cast<std::size_t>(a.rows()) * k);
  for (int row = 0; row < a.rows(); ++row) {
    const int t = row / a.tile(), R = a.tile_rows(t), row0 = t * a.tile(), at = row - row0;
    for (int c = 0; c < a.k(); ++c) {
      float& v = out[static_cast<std::size_t>(row) * k + static_cast<std::size_t>(c)];
      if (!a.form().quantized()) {
        v = a.x()[static_cast<std::size_t>(row) * a.stride() + static_cast<std::size_t>(c)];
        continue;
      }
      const float scale = a.scale()[row0 * a.groups() + c / a.form().group * R + at];
      v = scale *
          static_cast<float>(
              a.q()[static_cast<std::size_t>(row0) * k + static_cast<std::size_t>((c / 32 * R + at) * 32 + c % 32)]);
    }
  }
  return out;
}

/// 1/sqrt(mean(x^2) + eps) of each row as the consumer would compute it.
inline std::vector<double> rms_of(const Activations& a, float eps) {
  std::vector<double> f(static_cast<std::size_t>(a.rows()), 1.0);
  if (!a.normed()) return f;
  for (int row = 0; row < a.rows(); ++row) {
    const int t = row / a.tile(), R = a.tile_rows(t), row0 = t * a.tile();
    double sum = 0;
    for (int g = 0; g < a.ssq_groups(); ++g)
      sum += static_cast<double>(a.ssq()[row0 * a.ssq_groups() + g * R + row - row0]);
    f[static_cast<std::size_t>(row)] = 1.0 / std::sqrt(sum / a.k() + static_cast<double>(eps));
  }
  return f;
}

/// x W^T in double from decoded activations, times the RMS factors.
inline std::vector<double> reference_product(const Activations& a, const TestMatrix& w, float eps) {
  const Floats x = decoded(a);
  const auto f = rms_of(a, eps);
  const auto k = static_cast<std::size_t>(a.k());
  std::vector<double> y;
  std::vector<Floats> rows;
  for (int n = 0; n < w.rows(); ++n) rows.push_back(w.row(n));
  for (std::size_t r = 0; r < f.size(); ++r) {
    for (const Floats& row : rows) {
      double sum = 0;
      for (std::size_t i = 0; i < k; ++i) sum += static_cast<double>(x[r * k + i]) * static_cast<double>(row[i]);
      y.push_back(sum * f[r]);
    }
  }
  return y;
}

/// Bits of one row of a buffer of activations, wherever the tiling put them.
inline std::vector<std::uint32_t> row_bits(const Activations& a, int row) {
  std::vector<std::uint32_t> bits;
  const auto push = [&bits](const void* p) {
    std::uint32_t u;
    std::memcpy(&u, p, 4);
    bits.push_back(u);
  };
  const int t = row / a.tile(), R = a.tile_rows(t), row0 = t * a.tile(), at = row - row0;
  if (a.form().quantized()) {
    for (int c = 0; c < a.k() / 4; ++c)
      push(a.q() + static_cast<std::size_t>(row0) * static_cast<std::size_t>(a.k()) +
           static_cast<std::size_t>((c / 8 * R + at) * 32 + c % 8 * 4));
    for (int g = 0; g < a.groups(); ++g) {
      const int cell = row0 * a.groups() + g * R + at;
      push(a.scale() + cell);
      push(a.sum() + cell);
      push(a.neg() + cell);
    }
    for (int g = 0; a.form().group == 32 && g < 2 * a.groups(); ++g)
      push(a.neg16() + 2 * row0 * a.groups() + g * R + at);
  } else {
    for (int c = 0; c < a.k(); ++c)
      push(a.x() + static_cast<std::size_t>(row) * a.stride() + static_cast<std::size_t>(c));
  }
  for (int g = 0; a.normed() && g < a.ssq_groups(); ++g) push(a.ssq() + row0 * a.ssq_groups() + g * R + at);
  return bits;
}

/// A pool of blocks full of NaN bits, and block tables that scatter a sequence over it.
class TestPool {
 public:
  TestPool(KvElement element, int kv_heads, int head_dim, int block_tokens, int blocks, int group = 0) {
    kv.element = element;
    kv.group = group != 0 ? group : head_dim % 64 == 0 ? 64 : 32;
    kv.kv_heads = kv_heads;
    kv.head_dim = head_dim;
    kv.block_tokens = block_tokens;
    kv.block_stride = (kv.block_bytes() + 63) / 64 * 64;
    memory_ = AlignedMemory(kv.block_stride * static_cast<std::size_t>(blocks));
    kv.data = memory_.data();
    std::memset(memory_.data(), 0xff, memory_.size());
    for (int b = 0; b < blocks; ++b) free_.push_back(b);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
  }
  std::vector<std::int32_t> table(int tokens) {
    std::vector<std::int32_t> t;
    for (int p = 0; p < tokens; p += kv.block_tokens) {
      t.push_back(free_.back());
      free_.pop_back();
    }
    return t;
  }
  float key(const std::int32_t* table, int position, int head, int d) const {
    const std::byte* run = kv.keys(table[position / kv.block_tokens], head, position % kv.block_tokens);
    return kv_number(kv, run, KvPart::keys, position % 16, d);
  }
  float value(const std::int32_t* table, int position, int head, int d) const {
    const std::byte* run = kv.values(table[position / kv.block_tokens], head, position % kv.block_tokens);
    return kv_number(kv, run, KvPart::values, position % 16, d);
  }
  PagedKv kv;

 private:
  AlignedMemory memory_;
  std::vector<std::int32_t> free_;
};

inline Floats rope_table(int positions, int dims) {
  Floats t(static_cast<std::size_t>(positions) * static_cast<std::size_t>(dims));
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < dims / 2; ++i) {
      const double angle = p * std::pow(10000.0, -2.0 * i / dims);
      t[static_cast<std::size_t>(p * dims + i)] = static_cast<float>(std::cos(angle));
      t[static_cast<std::size_t>(p * dims + dims / 2 + i)] = static_cast<float>(std::sin(angle));
    }
  }
  return t;
}

}  // namespace galley::kernels::test
