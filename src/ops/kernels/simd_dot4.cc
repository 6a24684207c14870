// Products of affine matrices stored with 4 bits, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_dot4.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"
#define GALLEY_BITS 4
#define PickProduct PickProduct4
#include "ops/kernels/dot-inl.h"
#undef PickProduct
#undef GALLEY_BITS

#if HWY_ONCE
namespace galley::kernels {

void fill_dot4(Level level, bool vnni, KernelTable& table) {
  static_cast<void>(vnni);
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      table.affine4 = N_AVX3_DL::PickProduct4(true);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      table.affine4 = N_AVX3::PickProduct4(vnni);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      table.affine4 = N_AVX2::PickProduct4(vnni);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
