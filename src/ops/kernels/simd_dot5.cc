// Products of affine matrices stored with 5 bits, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_dot5.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#define GALLEY_BITS 5
#include "ops/kernels/dot-inl.h"
#undef GALLEY_BITS
