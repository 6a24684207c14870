// What happens to a product's tile before it leaves the core: scaling, residual, norm, gate, int8, arg-max, heads.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_epilogue.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"

#if GALLEY_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {

void ScaleBias(float* HWY_RESTRICT buf, std::size_t ld, int rows, int width, const float* factor, const float* bias) {
  const DF df;
  for (int r = 0; r < rows; r++) {
    float* v = buf + r * ld;
    const VF f = hn::Set(df, factor != nullptr ? factor[r] : 1.F);
    for (int c = 0; c < width; c += kLanes) {
      VF t = hn::Mul(hn::Load(df, v + c), f);
      if (bias != nullptr) t = hn::Add(t, hn::LoadU(df, bias + c));
      hn::Store(t, df, v + c);
    }
  }
}

void AddResidual(float* HWY_RESTRICT buf, std::size_t ld, int rows, int width, const float* residual, float* y,
                 std::size_t ldy, float scale) {
  const DF df;
  const VF s = hn::Set(df, scale);
  for (int r = 0; r < rows; r++) {
    float* v = buf + r * ld;
    for (int c = 0; c < width; c += kLanes) {
      const VF t = hn::Add(hn::Mul(hn::Load(df, v + c), s), hn::LoadU(df, residual + r * ldy + c));
      hn::Store(t, df, v + c);
      hn::StoreU(t, df, y + r * ldy + c);
    }
  }
}

void Norm(float* HWY_RESTRICT buf, std::size_t ld, int rows, int width, const float* HWY_RESTRICT norm,
          float* HWY_RESTRICT ssq, std::size_t ssq_stride) {
  const DF df;
  for (int c = 0; c < width; c += 32) {
    VF w[kPerUnit];
    for (int j = 0; j < kPerUnit; j++) w[j] = hn::LoadU(df, norm + c + j * kLanes);
    for (int r0 = 0; r0 < rows; r0 += 4) {
      const int n = std::min(4, rows - r0);
      VF sum[4];
      for (int r = 0; r < 4; r++) {
        sum[r] = hn::Zero(df);
        if (r >= n) continue;
        float* v = buf + (r0 + r) * ld + c;
        for (int j = 0; j < kPerUnit; j++) {
          const VF t = hn::Load(df, v + j * kLanes);
          sum[r] = hn::MulAdd(t, t, sum[r]);
          hn::Store(hn::Mul(t, w[j]), df, v + j * kLanes);
        }
      }
      alignas(16) float total[4];
      hn::Store(Reduce4<float>(sum, OpAdd()), D4(), total);
      for (int r = 0; r < n; r++) ssq[c / 32 * ssq_stride + r0 + r] = total[r];
    }
  }
}

HWY_INLINE VF Silu(VF x) {
  const DF df;
  const VF e = Exp2(hn::Min(hn::Mul(x, hn::Set(df, -1.4426950408889634F)), hn::Set(df, 126.F)));
  return hn::Div(x, hn::Add(hn::Set(df, 1.F), e));
}
// x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
HWY_INLINE VF Gelu(VF x) {
  const DF df;
  const VF x2 = hn::Mul(x, x);
  const VF inner =
      hn::Mul(hn::Mul(x, hn::Set(df, 0.7978845608028654F)), hn::MulAdd(x2, hn::Set(df, 0.044715F), hn::Set(df, 1.F)));
  return hn::Mul(hn::Mul(x, hn::Set(df, 0.5F)), hn::Add(hn::Set(df, 1.F), Tanh(inner)));
}

void GatePairs(float* buf, std::size_t ld, int rows, int pairs, Gate kind) {
  const DF df;
  for (int r = 0; r < rows; r++) {
    for (int p = 0; p < pairs; p++) {
      const float* v = buf + r * ld + p * 64;
      float* o = buf + r * ld + p * 32;  // never ahead of what is still to be read
      for (int c = 0; c < 32; c += kLanes) {
        const VF g = hn::Load(df, v + c), u = hn::Load(df, v + 32 + c);
        hn::Store(hn::Mul(kind == Gate::silu ? Silu(g) : Gelu(g), u), df, o + c);
      }
    }
  }
}

// 32 lanes within [-127, 127] to bytes
HWY_INLINE void ToBytes(const VI* n, std::int8_t* o) {
#if HWY_TARGET == HWY_AVX2
  const __m256i a = _mm256_packs_epi32(n[0].raw, n[1].raw), b = _mm256_packs_epi32(n[2].raw, n[3].raw);
  _mm256_store_si256(reinterpret_cast<__m256i*>(o),
                     _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
  for (int i = 0; i < kPerUnit; i++) {
    _mm_store_si128(reinterpret_cast<__m128i*>(o + i * 16), _mm512_cvtsepi32_epi8(n[i].raw));
  }
#endif
}

// The first n of four lanes.
template <class V, class T>
HWY_INLINE void StoreFirst(V v, int n, T* to) {
  const hn::Full128<T> d;
  if (n == 4) {
    hn::StoreU(v, d, to);
    return;
  }
  alignas(16) T lanes[4];
  hn::Store(v, d, lanes);
  to[0] = lanes[0];
  if (n > 1) to[1] = lanes[1];
  if (n > 2) to[2] = lanes[2];
}

// One group of up to four neighbouring rows. GROUP: its columns, or 0: `any_group`. The largest magnitude is taken over
// bit patterns, where NaN is larger than everything: a faulty row gets a NaN scale and stays visibly faulty.
template <int GROUP>
HWY_INLINE void Quantize4(const float* HWY_RESTRICT buf, std::size_t ld, int n, int any_group, int R,
                          std::int8_t* HWY_RESTRICT q, float* HWY_RESTRICT scale, float* HWY_RESTRICT sum,
                          std::int32_t* HWY_RESTRICT neg, std::int32_t* HWY_RESTRICT neg16) {
  const DF df;
  const DI di;
  const D4 d4;
  const int group = GROUP > 0 ? GROUP : any_group;
  const float* v[4] = {buf, buf, buf, buf};
  for (int r = 1; r < 4; r++) v[r] = v[r - 1] + (r < n ? ld : 0);
  VI top[4];
  for (int r = 0; r < 4; r++) {
    top[r] = hn::Zero(di);
    for (int c = 0; c < group; c += kLanes) {
      top[r] = hn::Max(top[r], hn::BitCast(di, hn::Abs(hn::Load(df, v[r] + c))));
    }
  }
  const V4 largest = hn::BitCast(d4, Reduce4<std::int32_t>(top, OpMax()));
  const V4 sc = hn::Mul(largest, hn::Set(d4, 1.F / 127.F));
  alignas(16) float inverse[4];
  hn::Store(hn::IfThenElseZero(hn::Gt(largest, hn::Set(d4, 1e-30F)), hn::Div(hn::Set(d4, 127.F), largest)), d4,
            inverse);
  VI total[2][4];  // of the first and the second 16 of each 32
  for (int r = 0; r < 4; r++) total[0][r] = total[1][r] = hn::Zero(di);
  for (int c = 0; c < group; c += 32) {
    for (int r = 0; r < 4; r++) {
      VI k[kPerUnit];
      for (int i = 0; i < kPerUnit; i++) {
        const VF x = hn::MulAdd(hn::Load(df, v[r] + c + i * kLanes), hn::Set(df, inverse[r]), hn::Set(df, kMagic));
        k[i] = hn::Sub(hn::BitCast(di, x), hn::Set(di, kMagicBits));
        VI& half = total[i / (kPerUnit / 2)][r];
        half = hn::Add(half, k[i]);
      }
      if (r < n) ToBytes(k, q + static_cast<std::size_t>(c) * R + r * 32);
    }
  }
  const V4I first = Reduce4<std::int32_t>(total[0], OpAdd()), second = Reduce4<std::int32_t>(total[1], OpAdd());
  const V4I codes = hn::Add(first, second);
  const V4 fs = hn::Mul(sc, hn::ConvertTo(d4, codes));
  StoreFirst(sc, n, scale);
  StoreFirst(fs, n, sum);
  StoreFirst(hn::Neg(codes), n, neg);
  if (neg16 == nullptr) return;
  StoreFirst(hn::Neg(first), n, neg16);
  StoreFirst(hn::Neg(second), n, neg16 + R);
}

void Quantize(const float* buf, std::size_t ld, int rows, const Activations& out, int row, int g) {
  const int t = row / out.tile(), R = out.tile_rows(t), group = out.form().group;
  const std::size_t row0 = static_cast<std::size_t>(t) * out.tile();
  const std::size_t at = row - row0;
  const std::size_t cell = row0 * out.groups() + static_cast<std::size_t>(g) * R + at;
  std::int8_t* q = out.q() + row0 * out.k() + static_cast<std::size_t>(g) * group * R + at * 32;
  std::int32_t* neg16 =
      group == 32 ? out.neg16() + 2 * (row0 * out.groups() + static_cast<std::size_t>(g) * R) + at : nullptr;
  const auto quantize4 = group == 32 ? Quantize4<32> : Quantize4<0>;
  for (int r = 0; r < rows; r += 4) {
    quantize4(buf + r * ld, ld, std::min(4, rows - r), group, R, q + r * 32, out.scale() + cell + r,
              out.sum() + cell + r, out.neg() + cell + r, neg16 != nullptr ? neg16 + r : nullptr);
  }
}

// A thread may meet units in any order (it steals), so of equals the lower index wins, not the earlier visit.
void ArgMax(const float* HWY_RESTRICT buf, std::size_t ld, int rows, int width, std::int32_t index, Best* best) {
  const DF df;
  for (int r = 0; r < rows; r++) {
    const float* v = buf + r * ld;
    Best b = best[r];
    if (width == 32 && b.index >= 0) {  // most units hold nothing larger: one comparison
      VF m = hn::Set(df, -std::numeric_limits<float>::infinity());
      for (int j = 0; j < kPerUnit; j++) m = hn::Max(hn::Load(df, v + j * kLanes), m);  // a NaN loses
      const float top = MaxLane(m);
      if (!(top > b.value || (top == b.value && index < b.index))) continue;
    }
    for (int c = 0; c < width; c++) {
      if (v[c] > b.value || (v[c] == b.value && (b.index < 0 || index + c < b.index))) b = {v[c], index + c};
    }
    best[r] = b;
  }
}

void SoftCap(float* HWY_RESTRICT buf, std::size_t ld, int rows, int width, float cap) {
  const DF df;
  const VF bound = hn::Set(df, cap), inverse = hn::Set(df, 1.F / cap);
  for (int r = 0; r < rows; r++) {
    float* v = buf + r * ld;
    for (int c = 0; c < width; c += kLanes) {
      // A NaN stays one: the vector minimum in Tanh would lose it.
      const VF x = hn::Load(df, v + c);
      hn::Store(hn::Add(hn::Mul(bound, Tanh(hn::Mul(x, inverse))), hn::Sub(x, x)), df, v + c);
    }
  }
}

// ---- heads: short loops the compiler vectorizes

void ToHalf(const float* v, int n, std::uint16_t* o) {
  const DF df;
  const hn::Rebind<hwy::float16_t, DF> dh;
  // Saturated, so that no stored value is infinite: a masked key's weight of zero times it would not be zero.
  const VF limit = hn::Set(df, 65504.F);
  for (int i = 0; i < n; i += kLanes) {
    const VF x = hn::Load(df, v + i);
    const VF clamped = hn::Min(limit, hn::Max(hn::Neg(limit), x));
    hn::StoreU(hn::DemoteTo(dh, hn::IfThenElse(hn::Eq(x, x), clamped, x)), dh,
               reinterpret_cast<hwy::float16_t*>(o + i));
  }
}

void ToBfloat(const float* v, int n, std::uint16_t* o) {
  for (int i = 0; i < n; i++) {
    std::uint32_t x;
    std::memcpy(&x, v + i, 4);
    const std::uint32_t rounded = (x + 0x7fffU + (x >> 16 & 1U)) >> 16, nan = x >> 16 | 0x40U;
    o[i] = static_cast<std::uint16_t>((x & 0x7fffffffU) > 0x7f800000U ? nan : rounded);
  }
}

template <class T>
HWY_INLINE void StorePlain(const T* v, int n, const HeadTask& task) {
  T* o = reinterpret_cast<T*>(task.run);
  if (task.part == KvPart::values) {
    std::memcpy(o + task.slot * n, v, static_cast<std::size_t>(n) * sizeof(T));
  } else {
    for (int i = 0; i < n; i++) o[i * kKeyGroup + task.slot] = v[i];
  }
}

// As store_kv_row of kv_numbers.h.
void StoreCodes(const HeadTask& task, const float* HWY_RESTRICT x) {
  const DF df;
  const DI di;
  const PagedKv& kv = *task.kv;
  const int top = (1 << kv_element_bits(kv.element)) - 1;
  const VF limit = hn::Set(df, 65504.F);
  const auto load = [&](int i) {
    const VF v = hn::Load(df, x + i);
    return hn::IfThenElse(hn::Eq(v, v), hn::Min(limit, hn::Max(hn::Neg(limit), v)), v);
  };
  alignas(64) std::int32_t codes[kMaxHeadDim];
  for (int g = 0; g < kv.groups(); g++) {
    const int begin = g * kv.group, end = begin + kv.group;
    VF low = load(begin), high = low, faults = hn::Zero(df);
    for (int i = begin; i < end; i += kLanes) {
      const VF v = load(i);
      low = hn::Min(low, v);
      high = hn::Max(high, v);
      faults = hn::Add(faults, hn::Sub(v, v));
    }
    const bool faulty = std::isnan(SumLanes(faults));
    const KvScale scale =
        faulty ? KvScale::faulty() : KvScale::of(hn::GetLane(hn::MinOfLanes(df, low)), MaxLane(high), top);
    const VF bias = hn::Set(df, half_to_float(scale.bias)), inverse = hn::Set(df, scale.inverse());
    for (int i = begin; i < end; i += kLanes) {
      const VF rounded = hn::Add(hn::Mul(hn::Sub(load(i), bias), inverse), hn::Set(df, kMagic));
      const VI code = hn::Sub(hn::BitCast(di, rounded), hn::Set(di, kMagicBits));
      hn::Store(hn::Min(hn::Max(code, hn::Zero(di)), hn::Set(di, top)), di, codes + i);
    }
    std::uint16_t* scales = kv.scales(task.run, g);
    scales[task.slot] = scale.scale;
    scales[kKeyGroup + task.slot] = scale.bias;
  }
  store_kv_codes(kv, task.run, task.part, task.slot, codes);
}

void Head(const HeadTask& task, const float* HWY_RESTRICT values) {
  alignas(64) float t[kMaxHeadDim];
  alignas(64) float u[kMaxHeadDim];
  const int dim = task.dim;
  float scale = task.scale;
  if (task.norm != nullptr) {
    float part[16] = {};
    for (int i = 0; i < dim; i += 16) {
      for (int j = 0; j < 16; j++) part[j] += values[i + j] * values[i + j];
    }
    float sum = 0;
    for (const float p : part) sum += p;
    scale *= 1.F / std::sqrt(sum / static_cast<float>(dim) + task.eps);
    for (int i = 0; i < dim; i++) t[i] = values[i] * scale * task.norm[i];
  } else {
    for (int i = 0; i < dim; i++) t[i] = values[i] * scale;
  }
  const float* x = t;
  if (task.rope != nullptr) {
    const int half = task.rope_dims / 2;
    const float* HWY_RESTRICT c = task.rope;
    const float* HWY_RESTRICT s = task.rope + half;
    if (task.traditional) {
      for (int i = 0; i < half; i++) {
        u[2 * i] = t[2 * i] * c[i] - t[2 * i + 1] * s[i];
        u[2 * i + 1] = t[2 * i + 1] * c[i] + t[2 * i] * s[i];
      }
    } else {
      for (int i = 0; i < half; i++) {
        u[i] = t[i] * c[i] - t[half + i] * s[i];
        u[half + i] = t[half + i] * c[i] + t[i] * s[i];
      }
    }
    for (int i = 2 * half; i < dim; i++) u[i] = t[i];
    x = u;
  }
  if (task.q != nullptr) {
    std::memcpy(task.q, x, static_cast<std::size_t>(dim) * 4);
    return;
  }
  alignas(64) std::uint16_t h[kMaxHeadDim];
  switch (task.kv->element) {
    case KvElement::f32:
      StorePlain(x, dim, task);
      break;
    case KvElement::f16:
      ToHalf(x, dim, h);
      StorePlain(h, dim, task);
      break;
    case KvElement::bf16:
      ToBfloat(x, dim, h);
      StorePlain(h, dim, task);
      break;
    case KvElement::code8:
    case KvElement::code4:
      StoreCodes(task, x);
      break;
  }
}

}  // namespace

void FillEpilogue(KernelTable& t) {
  t.scale_bias = ScaleBias;
  t.add_residual = AddResidual;
  t.norm = Norm;
  t.gate = GatePairs;
  t.quantize = Quantize;
  t.argmax = ArgMax;
  t.soft_cap = SoftCap;
  t.head = Head;
}

}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();
#endif  // GALLEY_SIMD_TARGET

#if HWY_ONCE
namespace galley::kernels {

void fill_epilogue(Level level, KernelTable& table) {
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      N_AVX3_DL::FillEpilogue(table);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      N_AVX3::FillEpilogue(table);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      N_AVX2::FillEpilogue(table);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
