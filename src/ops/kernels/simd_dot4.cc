// Products of affine matrices stored with 4 bits, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_dot4.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#define GALLEY_BITS 4
#include "ops/kernels/dot-inl.h"
#undef GALLEY_BITS
