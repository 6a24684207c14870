// Internal: the Highway targets we compile. Must come before any Highway include.
#pragma once
#define HWY_WANT_AVX3_DL 1  // Highway 1.0.3 leaves AVX3_DL out unless asked
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#endif
