// Internal, included once per Highway target: vector types, exp2 and horizontal reductions.
//
// GALLEY_SIMD_TARGET tells whether the target being compiled has vector bodies; the others are served by scalar.cc.
#if defined(GALLEY_KERNELS_SIMD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GALLEY_KERNELS_SIMD_INL_H
#undef GALLEY_KERNELS_SIMD_INL_H
#else
#define GALLEY_KERNELS_SIMD_INL_H
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#if HWY_ARCH_X86
#include <immintrin.h>
#endif

// Highway 1.0.3's string for AVX3_DL names avxvnni (VEX form, absent on Ice Lake) but not avx512vnni. We add the
// latter; avxvnni can't be dropped: GCC inlines an always_inline op only into a function whose flags include the op's.
// So nothing here may use a 128- or 256-bit dot product on AVX3_DL (GCC would pick the VEX encoding).
#if HWY_TARGET == HWY_AVX3_DL
#undef GALLEY_TARGET_STR_DL
#define GALLEY_TARGET_STR_DL \
  HWY_TARGET_STR_AVX3        \
  ",vpclmulqdq,avx512vbmi,avx512vbmi2,vaes,avxvnni,avx512bitalg,avx512vpopcntdq,avx512vnni"
#undef HWY_TARGET_STR
#define HWY_TARGET_STR GALLEY_TARGET_STR_DL
#endif

#undef GALLEY_SIMD_TARGET
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define GALLEY_SIMD_TARGET 1
#else
#define GALLEY_SIMD_TARGET 0
#endif

#if GALLEY_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::ScalableTag<std::int32_t>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VI16 = hn::Vec<hn::ScalableTag<std::int16_t>>;
using VI8 = hn::Vec<hn::ScalableTag<std::int8_t>>;
using VU8 = hn::Vec<hn::ScalableTag<std::uint8_t>>;
constexpr int kLanes = HWY_LANES(float);
constexpr int kPerUnit = 32 / kLanes;      // vectors in 32 columns
[[maybe_unused]] constexpr int kToL2 = 2;  // __builtin_prefetch locality
#if HWY_TARGET == HWY_AVX2
[[maybe_unused]] constexpr int kTile = 4;  // 16 registers
#else
[[maybe_unused]] constexpr int kTile = 12;
#endif

[[maybe_unused]] constexpr float kMagic =
    12582912.F;  // 1.5 * 2^23: adding it leaves the rounded integer in the low mantissa bits
[[maybe_unused]] constexpr std::int32_t kMagicBits =
    0x4B400000;  // (NearestInt and ConvertTo of 1.0.3 carry fix-ups we don't need)

// 2^x for x <= 126 (clamped at -126): integer part and a degree-6 polynomial; relative error about 2e-7; 2^0 is
// exactly 1.
[[maybe_unused]] HWY_INLINE VF Exp2(VF x) {
  const DF df;
  const DI di;
  x = hn::Max(x, hn::Set(df, -126.F));
  const VF t = hn::Add(x, hn::Set(df, kMagic));
  const VF f = hn::Sub(x, hn::Sub(t, hn::Set(df, kMagic)));
  VF p = hn::Set(df, 1.540353039338161e-4F);
  p = hn::MulAdd(p, f, hn::Set(df, 1.333355814642844e-3F));
  p = hn::MulAdd(p, f, hn::Set(df, 9.618129107628477e-3F));
  p = hn::MulAdd(p, f, hn::Set(df, 5.550410866482158e-2F));
  p = hn::MulAdd(p, f, hn::Set(df, 2.402265069591007e-1F));
  p = hn::MulAdd(p, f, hn::Set(df, 6.931471805599453e-1F));
  p = hn::MulAdd(p, f, hn::Set(df, 1.F));
  return hn::BitCast(df, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, t))));
}

[[maybe_unused]] HWY_INLINE float MaxLane(VF v) { return hn::GetLane(hn::MaxOfLanes(DF(), v)); }
[[maybe_unused]] HWY_INLINE float SumLanes(VF v) { return hn::GetLane(hn::SumOfLanes(DF(), v)); }

// tanh(y) = 1 - 2 / (2^(2 y log2 e) + 1)
[[maybe_unused]] HWY_INLINE VF Tanh(VF y) {
  const DF df;
  const VF e = Exp2(hn::Min(hn::Mul(y, hn::Set(df, 2.8853900817779268F)), hn::Set(df, 126.F)));
  return hn::Sub(hn::Set(df, 1.F), hn::Div(hn::Set(df, 2.F), hn::Add(e, hn::Set(df, 1.F))));
}

// Horizontal reductions of four vectors at once; lane i of the result belongs to v[i]. The tree is the same for every
// lane.
using D4 = hn::Full128<float>;
using V4 = hn::Vec<D4>;
using D4I = hn::Full128<std::int32_t>;
using V4I = hn::Vec<D4I>;
struct OpMax {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Max(a, b);
  }
};
struct OpAdd {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};
template <class T, class Op, class V>
HWY_INLINE hn::Vec<hn::Full128<T>> Reduce4(const V* v, Op op) {
  const hn::ScalableTag<T> d;
  const hn::Repartition<double, decltype(d)> d64;
  const V a = op(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const V b = op(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const V c = op(hn::BitCast(d, hn::InterleaveLower(d64, hn::BitCast(d64, a), hn::BitCast(d64, b))),
                 hn::BitCast(d, hn::InterleaveUpper(d64, hn::BitCast(d64, a), hn::BitCast(d64, b))));
  const hn::Half<decltype(d)> dh;
  const auto h = op(hn::LowerHalf(dh, c), hn::UpperHalf(dh, c));
  if constexpr (kLanes == 8) {
    return h;
  } else {
    const hn::Half<decltype(dh)> dq;
    return op(hn::LowerHalf(dq, h), hn::UpperHalf(dq, h));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();
#endif  // GALLEY_SIMD_TARGET

#endif  // include guard
