// Products of affine matrices stored with 6 bits, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_dot6.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"
#define GALLEY_BITS 6
#define PickProduct PickProduct6
#include "ops/kernels/dot-inl.h"
#undef PickProduct
#undef GALLEY_BITS

#if HWY_ONCE
namespace galley::kernels {

void fill_dot6(Level level, bool vnni, KernelTable& table) {
  static_cast<void>(vnni);
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      table.affine6 = N_AVX3_DL::PickProduct6(true);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      table.affine6 = N_AVX3::PickProduct6(vnni);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      table.affine6 = N_AVX2::PickProduct6(vnni);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
