// Attention of some query vectors over one segment of paged keys and values, for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_attention.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"

#if GALLEY_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_AVX2
constexpr int kVectors = 3;  // query vectors scored together: 4 accumulators each must fit into registers
#else
constexpr int kVectors = 6;
#endif
static_assert(kVectors <= kMaxVectors);

template <class T>
HWY_INLINE VF LoadKv(const T* p) {
  const DF df;
  if constexpr (sizeof(T) == 4) {
    return hn::LoadU(df, p);
  } else {
    return hn::PromoteTo(df, hn::LoadU(hn::Rebind<T, DF>(), p));
  }
}

// Scores of N query vectors against 16 keys [dim][16]: four partial sums a score, whatever N is.
template <int N, class T>
HWY_INLINE void Score16(const float* const* q, int dim, const T* HWY_RESTRICT keys, float* const* scores,
                        const char* fetch_keys, const char* fetch_values) {
  const DF df;
  constexpr int kHalves = kKeyGroup / kLanes, C = 4;
  for (int h = 0; h < kHalves; h++) {
    VF a[N][C];
    for (int j = 0; j < N; j++) {
      for (int c = 0; c < C; c++) a[j][c] = hn::Zero(df);
    }
    for (int d = 0; d < dim; d += C) {
      if (h == 0 && fetch_values != nullptr) {
        for (std::size_t i = 0; i < C * kKeyGroup * sizeof(T); i += 64) {
          __builtin_prefetch(fetch_values + d * kKeyGroup * sizeof(T) + i, 0, kToL2);
          if (fetch_keys != nullptr) __builtin_prefetch(fetch_keys + d * kKeyGroup * sizeof(T) + i, 0, kToL2);
        }
      }
      for (int c = 0; c < C; c++) {
        const VF k = LoadKv(keys + (d + c) * kKeyGroup + h * kLanes);
        for (int j = 0; j < N; j++) a[j][c] = hn::MulAdd(hn::Set(df, q[j][d + c]), k, a[j][c]);
      }
    }
    for (int j = 0; j < N; j++) {
      hn::StoreU(hn::Add(hn::Add(a[j][0], a[j][1]), hn::Add(a[j][2], a[j][3])), df, scores[j] + h * kLanes);
    }
  }
}

// out[j][d0 ..] = sum over keys [begin, end) of weight * value, D vectors of the head at a time so that accumulators
// stay in registers; weights[j][0] belongs to key `origin`.
template <int N, int D, class T>
HWY_INLINE void Mix(const SegmentTask& task, int origin, int begin, int end, const float* const* weights, int d0,
                    float* const* out) {
  const DF df;
  const int dim = task.kv->head_dim, block_tokens = task.kv->block_tokens;
  VF a[N][D];
  for (int j = 0; j < N; j++) {
    for (int d = 0; d < D; d++) a[j][d] = hn::Zero(df);
  }
  for (int s = begin; s < end;) {
    const int stop = std::min(end, (s / block_tokens + 1) * block_tokens);
    const T* HWY_RESTRICT v = reinterpret_cast<const T*>(task.kv->values(task.table[s / block_tokens], task.kv_head)) +
                              static_cast<std::size_t>(s % block_tokens) * dim + d0;
    for (; s < stop; s++, v += dim) {
      VF w[N];
      for (int j = 0; j < N; j++) w[j] = hn::Set(df, weights[j][s - origin]);
      for (int d = 0; d < D; d++) {
        const VF x = LoadKv(v + d * kLanes);
        for (int j = 0; j < N; j++) a[j][d] = hn::MulAdd(w[j], x, a[j][d]);
      }
    }
  }
  for (int j = 0; j < N; j++) {
    for (int d = 0; d < D; d++) hn::StoreU(a[j][d], df, out[j] + d0 + d * kLanes);
  }
}

// Scores of one vector become weights 2^(score - max); keys outside [first, last) get exactly 0. Lanes follow absolute
// positions, so where the range of a group of vectors starts and ends changes no bit of the sum.
HWY_INLINE void Weigh(float* HWY_RESTRICT s, int count, int first, int last, float softcap, float* max, float* sum) {
  const DF df;
  if (softcap > 0) {
    const VF cap = hn::Set(df, softcap), inverse = hn::Set(df, 1.F / softcap);
    for (int i = 0; i < count; i += kLanes) {
      hn::Store(hn::Mul(cap, Tanh(hn::Mul(hn::Load(df, s + i), inverse))), df, s + i);
    }
  }
  for (int i = 0; i < std::min(first, count); i++) s[i] = kNothing;
  for (int i = std::max(last, 0); i < count; i++) s[i] = kNothing;
  VF m = hn::Set(df, kNothing);
  for (int i = 0; i < count; i += kLanes) m = hn::Max(m, hn::Load(df, s + i));
  *max = MaxLane(m);
  const VF top = hn::Set(df, *max), limit = hn::Set(df, kNothing);
  VF total = hn::Zero(df);
  for (int i = 0; i < count; i += kLanes) {
    const VF x = hn::Load(df, s + i);
    // A NaN score (a faulty row) stays NaN; what is masked becomes 0.
    const VF e = hn::IfThenZeroElse(hn::Eq(x, limit), hn::Add(Exp2(hn::Sub(x, top)), hn::Sub(x, x)));
    hn::Store(e, df, s + i);
    total = hn::Add(total, e);
  }
  *sum = SumLanes(total);
}

template <int N, class T>
HWY_NOINLINE void Vectors(const SegmentTask& task, int v0) {
  const int dim = task.kv->head_dim, block_tokens = task.kv->block_tokens;
  int begin = task.first[v0], end = task.last[v0];
  for (int j = 1; j < N; j++) {
    if (task.first[v0 + j] >= task.last[v0 + j]) continue;
    if (begin >= end) {
      begin = task.first[v0 + j];
      end = task.last[v0 + j];
    }
    begin = std::min(begin, task.first[v0 + j]);
    end = std::max(end, task.last[v0 + j]);
  }
  if (begin >= end) {
    for (int j = 0; j < N; j++) {
      task.max[v0 + j] = kNothing;
      task.sum[v0 + j] = 0;
    }
    return;
  }
  const int origin = begin / kKeyGroup * kKeyGroup;
  const int count = (end - origin + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
  const float* q[N];
  float* scores[N];
  float* out[N];
  for (int j = 0; j < N; j++) {
    q[j] = task.q[v0 + j];
    scores[j] = task.scores + static_cast<std::size_t>(j) * (kAttentionSegment + kKeyGroup);
    out[j] = task.out + static_cast<std::size_t>(v0 + j) * dim;
  }
  const auto keys = [&](int s) {
    return reinterpret_cast<const T*>(task.kv->keys(task.table[s / block_tokens], task.kv_head)) +
           static_cast<std::size_t>(s % block_tokens) * dim;
  };
  constexpr int kAhead = 3 * kKeyGroup;
  for (int s = origin; s < end; s += kKeyGroup) {
    float* at[N];
    for (int j = 0; j < N; j++) at[j] = scores[j] + (s - origin);
    const char* fetch_keys = nullptr;
    const char* fetch_values = nullptr;
    if (task.prefetch) {  // memory traffic is spread: scoring fetches keys ahead and the values the mixing will read
      if (s + kAhead < end) fetch_keys = reinterpret_cast<const char*>(keys(s + kAhead));
      fetch_values = reinterpret_cast<const char*>(
          reinterpret_cast<const T*>(task.kv->values(task.table[s / block_tokens], task.kv_head)) +
          static_cast<std::size_t>(s % block_tokens) * dim);
    }
    Score16<N>(q, dim, keys(s), at, fetch_keys, fetch_values);
  }
  for (int j = 0; j < N; j++) {
    Weigh(scores[j], count, task.first[v0 + j] - origin, task.last[v0 + j] - origin, task.softcap, task.max + v0 + j,
          task.sum + v0 + j);
  }
  int d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) Mix<N, 4, T>(task, origin, begin, end, scores, d, out);
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) Mix<N, 2, T>(task, origin, begin, end, scores, d, out);
  for (; d < dim; d += kLanes) Mix<N, 1, T>(task, origin, begin, end, scores, d, out);
}

template <class T>
void Typed(const SegmentTask& task) {
  using Run = void (*)(const SegmentTask&, int);
  static constexpr Run kRun[] = {
    Vectors<1, T>,
    Vectors<2, T>,
    Vectors<3, T>,
#if HWY_TARGET != HWY_AVX2
    Vectors<4, T>,
    Vectors<5, T>,
    Vectors<6, T>,
#endif
  };
  const int chunks = (task.vectors + kVectors - 1) / kVectors;  // balanced: 4 vectors run as 2 + 2
  for (int c = 0; c < chunks; c++) {
    const int v0 = task.vectors * c / chunks, v1 = task.vectors * (c + 1) / chunks;
    kRun[v1 - v0 - 1](task, v0);
  }
}

void Segment(const SegmentTask& task) {
  switch (task.kv->element) {
    case KvElement::f16:
      Typed<hwy::float16_t>(task);
      break;
    case KvElement::bf16:
      Typed<hwy::bfloat16_t>(task);
      break;
    case KvElement::f32:
      Typed<float>(task);
      break;
  }
}

void Merge(int dim, float* HWY_RESTRICT out, float* max, float* sum, const float* HWY_RESTRICT part, float part_max,
           float part_sum) {
  const DF df;
  if (part_max == kNothing && part_sum == 0) return;
  if (*max == kNothing && *sum == 0) {
    std::memcpy(out, part, static_cast<std::size_t>(dim) * 4);
    *max = part_max;
    *sum = part_sum;
    return;
  }
  const float top = std::max(*max, part_max);
  const VF a = Exp2(hn::Set(df, *max - top)), b = Exp2(hn::Set(df, part_max - top));
  for (int d = 0; d < dim; d += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(df, part + d), b, hn::Mul(hn::LoadU(df, out + d), a)), df, out + d);
  }
  *sum = *sum * hn::GetLane(a) + part_sum * hn::GetLane(b);
  *max = top;
}

}  // namespace

void FillAttention(KernelTable& t) {
  t.segment = Segment;
  t.merge = Merge;
}

}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();
#endif  // GALLEY_SIMD_TARGET

#if HWY_ONCE
namespace galley::kernels {

void fill_attention(Level level, KernelTable& table) {
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      N_AVX3_DL::FillAttention(table);
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      N_AVX3::FillAttention(table);
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      N_AVX2::FillAttention(table);
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
