// Products of affine matrices stored with 5 bits, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_dot5.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"
#define GALLEY_BITS 5
#define PickProduct PickProduct5
#include "ops/kernels/dot-inl.h"
#undef PickProduct
#undef GALLEY_BITS

#if HWY_ONCE
namespace galley::kernels {

void fill_dot5(Level level, bool vnni, KernelTable& table) {
  static_cast<void>(vnni);
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      table.affine5 = N_AVX3_DL::PickProduct5(true);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      table.affine5 = N_AVX3::PickProduct5(vnni);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      table.affine5 = N_AVX2::PickProduct5(vnni);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
