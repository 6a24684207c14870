// Products of affine matrices stored with 8 bits, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_dot8.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#define GALLEY_BITS 8
#include "ops/kernels/dot-inl.h"
#undef GALLEY_BITS
