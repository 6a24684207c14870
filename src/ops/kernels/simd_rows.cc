// Reductions over one row of logits, for every vector target. Orders are fixed: lane by lane within 1024 values, block
// by block in double.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_rows.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"

#if GALLEY_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {

float RowMax(const float* x, std::size_t n) {
  const DF df;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  VF m[4];
  for (auto& v : m) v = hn::Set(df, kLowest);
  std::size_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++)
      m[j] = hn::Max(hn::LoadU(df, x + i + j * kLanes), m[j]);  // x86: a NaN on the left loses
  }
  float top = MaxLane(hn::Max(hn::Max(m[0], m[1]), hn::Max(m[2], m[3])));
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  return top;
}

std::int32_t RowArgMax(const float* x, std::size_t n) {
  const DF df;
  const float top = RowMax(x, n);
  const VF t = hn::Set(df, top);
  std::size_t i = 0;
  while (i + kLanes <= n && hn::AllFalse(df, hn::Eq(hn::LoadU(df, x + i), t))) i += kLanes;
  for (; i < n; i++) {
    if (x[i] == top) return static_cast<std::int32_t>(i);
  }
  return -1;
}

double RowExp(const float* x, std::size_t n, float max, float scale, float* out) {
  const DF df;
  const VF top = hn::Set(df, max), factor = hn::Set(df, scale * 1.4426950408889634F);
  constexpr std::size_t kBlock = 1024;
  double sum = 0;
  for (std::size_t b = 0; b < n; b += kBlock) {
    const std::size_t end = std::min(n, b + kBlock);
    VF total = hn::Zero(df);
    for (std::size_t i = b; i < end; i += kLanes) {
      alignas(64) float tail[kLanes];
      const bool whole = i + kLanes <= end;
      if (!whole) {  // past the end: weight 0
        for (int j = 0; j < kLanes; j++) tail[j] = i + j < end ? x[i + j] : -std::numeric_limits<float>::infinity();
      }
      const VF v = whole ? hn::LoadU(df, x + i) : hn::Load(df, tail);
      const VF y = hn::Mul(hn::Sub(v, top), factor);
      // Below 2^-126: exactly 0, not the clamped power.
      const VF e = hn::IfThenZeroElse(hn::Lt(y, hn::Set(df, -126.F)), Exp2(y));
      total = hn::Add(total, e);
      if (out == nullptr) continue;
      if (whole) {
        hn::StoreU(e, df, out + i);
      } else {
        hn::Store(e, df, tail);
        std::memcpy(out + i, tail, (end - i) * sizeof(float));
      }
    }
    sum += static_cast<double>(SumLanes(total));
  }
  return sum;
}

}  // namespace

void FillRows(KernelTable& t) {
  t.row_max = RowMax;
  t.row_argmax = RowArgMax;
  t.row_exp = RowExp;
}

}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();
#endif  // GALLEY_SIMD_TARGET

#if HWY_ONCE
namespace galley::kernels {

void fill_rows(Level level, KernelTable& table) {
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      N_AVX3_DL::FillRows(table);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      N_AVX3::FillRows(table);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      N_AVX2::FillRows(table);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
