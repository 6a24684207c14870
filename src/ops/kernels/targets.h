// Internal: the Highway targets we compile, and whether AMX is compiled with them. Must come before any Highway
// include.
#pragma once
#define HWY_WANT_AVX3_DL 1  // Highway 1.0.3 leaves AVX3_DL out unless asked
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#endif
#if defined(__x86_64__) && defined(__linux__)
#define GALLEY_HAS_AMX 1
#else
#define GALLEY_HAS_AMX 0
#endif
