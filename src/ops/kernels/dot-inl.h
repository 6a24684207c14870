// Internal: the affine products of one target in all its dot-product flavours. Included once per target by
// simd_dot4.cc, 5, 6 and 8, which set GALLEY_BITS. No include guard on purpose.
#include "ops/kernels/amx.h"
#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"

#undef GALLEY_AMX
#define GALLEY_AMX (GALLEY_HAS_AMX && HWY_TARGET == HWY_AVX3_DL)

#if GALLEY_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {
constexpr int kBits = GALLEY_BITS;

HWY_INLINE VI8 Broadcast4(const std::int8_t* p) {
  std::int32_t t;
  std::memcpy(&t, p, 4);
  return hn::BitCast(hn::ScalableTag<std::int8_t>(), hn::Set(DI(), t));
}

// vpmaddubsw + vpmaddwd. Highway 1.0.3 has no byte form; its ReorderWidenMulAccumulate (i16) leaves the lane order
// open.
namespace plain {
#if HWY_TARGET == HWY_AVX2
HWY_INLINE VI16 Pairs(VU8 w, VI8 x) { return VI16{_mm256_maddubs_epi16(w.raw, x.raw)}; }
HWY_INLINE VI Widen(VI16 a, VI16 b) { return VI{_mm256_madd_epi16(a.raw, b.raw)}; }
#else
HWY_INLINE VI16 Pairs(VU8 w, VI8 x) { return VI16{_mm512_maddubs_epi16(w.raw, x.raw)}; }
HWY_INLINE VI Widen(VI16 a, VI16 b) { return VI{_mm512_madd_epi16(a.raw, b.raw)}; }
#endif
#define GALLEY_DOT 0
#include "ops/kernels/block-inl.h"
#undef GALLEY_DOT
}  // namespace plain
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();

// vpdpbusd: part of AVX3_DL; below it a flavour with one more attribute, chosen by cpuid (AVX2 + AVX-VNNI: Alder Lake,
// Sierra Forest; AVX3 + avx512vnni: Cascade Lake, Cooper Lake). Attributes change at file scope, hence the namespaces.
#undef GALLEY_VNNI_STR
#if HWY_TARGET == HWY_AVX2
#define GALLEY_VNNI_STR HWY_TARGET_STR ",avxvnni"
#elif HWY_TARGET == HWY_AVX3
#define GALLEY_VNNI_STR HWY_TARGET_STR ",avx512vnni"
#else
#define GALLEY_VNNI_STR HWY_TARGET_STR
#endif
HWY_PUSH_ATTRIBUTES(GALLEY_VNNI_STR)
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {
namespace vnni {
#if HWY_TARGET == HWY_AVX2
HWY_INLINE VI Dot4(VI acc, VU8 w, VI8 x) { return VI{_mm256_dpbusd_avx_epi32(acc.raw, w.raw, x.raw)}; }
#else
HWY_INLINE VI Dot4(VI acc, VU8 w, VI8 x) { return VI{_mm512_dpbusd_epi32(acc.raw, w.raw, x.raw)}; }
#endif
#define GALLEY_DOT 1
#include "ops/kernels/block-inl.h"
#undef GALLEY_DOT
}  // namespace vnni
#if GALLEY_AMX
namespace amx {
#include "ops/kernels/amx-inl.h"
}  // namespace amx
#endif
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_POP_ATTRIBUTES

HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {
ProductFunction PickProduct([[maybe_unused]] Dot dot) {
#if GALLEY_AMX
  if (dot == Dot::amx) return amx::Product;
#endif
  return dot == Dot::pairs ? plain::Product : vnni::Product;
}
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();
#endif  // GALLEY_SIMD_TARGET

#if HWY_ONCE
namespace galley::kernels {

// No header but for its name: each simd_dot*.cc includes it once, with bits of its own.
template <>  // NOLINTNEXTLINE(misc-definitions-in-headers)
void fill_affine<GALLEY_BITS>([[maybe_unused]] Level level, [[maybe_unused]] Dot dot,
                              [[maybe_unused]] KernelTable& table) {
  [[maybe_unused]] ProductFunction& product = table.affine[GALLEY_BITS];
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      product = N_AVX3_DL::PickProduct(dot);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      product = N_AVX3::PickProduct(dot);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      product = N_AVX2::PickProduct(dot);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
