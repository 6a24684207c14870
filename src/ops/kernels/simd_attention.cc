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
constexpr int kMostGroups = kMaxHeadDim / 32;

template <class T>
HWY_INLINE VF LoadKv(const T* p) {
  const DF df;
  if constexpr (sizeof(T) == 4) {
    return hn::LoadU(df, p);
  } else {
    return hn::PromoteTo(df, hn::LoadU(hn::Rebind<T, DF>(), p));
  }
}

template <class T>
HWY_INLINE VI LoadCodes(const T* p) {
  return hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<std::uint8_t, DI>(), reinterpret_cast<const std::uint8_t*>(p)));
}

// How the numbers of a run are read (layouts: paged_kv.h), few vectors at a time, since sums take most registers.
// Keys: kKeys dimensions from d on of the keys of half h. Values: vector i of one token's unit, which begins at `unit`,
// and where two share their bytes also vector i + kValues / 2.
template <class T>
struct Plain {
  static constexpr bool kCodes = false;
  static constexpr int kBits = 8 * sizeof(T);
  static constexpr int kKeys = 1;    // vectors read together
  static constexpr int kValues = 1;  // vectors in a unit
  static HWY_INLINE void Keys(const std::byte* run, int d, int h, VF* k) {
    k[0] = LoadKv(reinterpret_cast<const T*>(run) + d * kKeyGroup + h * kLanes);
  }
  static HWY_INLINE void Values(const std::byte* token, int d, int, VF* v) {
    v[0] = LoadKv(reinterpret_cast<const T*>(token) + d);
  }
};

struct Codes8 {
  static constexpr bool kCodes = true;
  static constexpr int kBits = 8, kKeys = 1, kValues = 1;
  static HWY_INLINE void Keys(const std::byte* run, int d, int h, VF* k) {
    k[0] = hn::ConvertTo(DF(), LoadCodes(run + d * kKeyGroup + h * kLanes));
  }
  static HWY_INLINE void Values(const std::byte* token, int d, int, VF* v) {
    v[0] = hn::ConvertTo(DF(), LoadCodes(token + d));
  }
};

struct Codes4 {
  static constexpr bool kCodes = true;
  static constexpr int kBits = 4, kKeys = 2, kValues = 32 / kLanes;
  static HWY_INLINE void Split(const std::byte* p, VF* v) {
    const DF df;
    const VI codes = LoadCodes(p);
    v[0] = hn::ConvertTo(df, hn::And(codes, hn::Set(DI(), 15)));
    v[1] = hn::ConvertTo(df, hn::ShiftRight<4>(codes));
  }
  static HWY_INLINE void Keys(const std::byte* run, int d, int h, VF* k) {
    Split(run + d / 2 * kKeyGroup + h * kLanes, k);
  }
  static HWY_INLINE void Values(const std::byte* token, int unit, int i, VF* v) {
    Split(token + unit / 2 + i * kLanes, v);
  }
};

// Asks for the lines of a run that scoring the dimensions d .. d + 3 reads.
template <int BITS>
HWY_INLINE void Fetch(const std::byte* run, int d) {
  constexpr int kStride = BITS * kKeyGroup / 8;  // bytes of a dimension
  for (int line = (d * kStride + 63) / 64 * 64; line < (d + 4) * kStride; line += 64) {
    __builtin_prefetch(run + line, 0, kToL2);
  }
}

struct Ahead {
  const std::byte *keys, *values;  // runs to ask for meanwhile, or null
};

// Scores of N query vectors against the 16 keys of a run: four partial sums a score and group of dimensions, whatever N
// is. q_sums: [N][kMostGroups] sums of the query's groups, which the biases of codes multiply.
template <int N, class R>
HWY_INLINE void Score16(const PagedKv& kv, const float* const* q, const float* q_sums, const std::byte* run,
                        float* const* scores, const Ahead& ahead) {
  const DF df;
  constexpr int kHalves = kKeyGroup / kLanes, C = 4;
  const int width = R::kCodes ? kv.group : kv.head_dim;
  for (int h = 0; h < kHalves; h++) {
    for (int d0 = 0, g = 0; d0 < kv.head_dim; d0 += width, g++) {
      VF a[N][C];
      for (int j = 0; j < N; j++) {
        for (int c = 0; c < C; c++) a[j][c] = hn::Zero(df);
      }
      for (int d = d0; d < d0 + width; d += C) {
        if (h == 0 && ahead.values != nullptr) {
          Fetch<R::kBits>(ahead.values, d);
          if (ahead.keys != nullptr) Fetch<R::kBits>(ahead.keys, d);
        }
        for (int c = 0; c < C; c += R::kKeys) {
          VF k[R::kKeys];
          R::Keys(run, d + c, h, k);
          for (int i = 0; i < R::kKeys; i++) {
            for (int j = 0; j < N; j++) a[j][c + i] = hn::MulAdd(hn::Set(df, q[j][d + c + i]), k[i], a[j][c + i]);
          }
        }
      }
      if constexpr (R::kCodes) {
        const auto* scales = reinterpret_cast<const hwy::float16_t*>(kv.scales(run, g)) + h * kLanes;
        if (h == 0 && ahead.values != nullptr) {
          __builtin_prefetch(kv.scales(ahead.values, g), 0, kToL2);
          if (ahead.keys != nullptr) __builtin_prefetch(kv.scales(ahead.keys, g), 0, kToL2);
        }
        const VF scale = LoadKv(scales), bias = LoadKv(scales + kKeyGroup);
        for (int j = 0; j < N; j++) {
          const VF sum = hn::Add(hn::Add(a[j][0], a[j][1]), hn::Add(a[j][2], a[j][3]));
          const VF before = g == 0 ? hn::Zero(df) : hn::LoadU(df, scores[j] + h * kLanes);
          const VF biased = hn::MulAdd(bias, hn::Set(df, q_sums[j * kMostGroups + g]), before);
          hn::StoreU(hn::MulAdd(scale, sum, biased), df, scores[j] + h * kLanes);
        }
      } else {
        for (int j = 0; j < N; j++) {
          hn::StoreU(hn::Add(hn::Add(a[j][0], a[j][1]), hn::Add(a[j][2], a[j][3])), df, scores[j] + h * kLanes);
        }
      }
    }
  }
}

// The keys that some query vectors score together: [begin, end), with a slot for each from `origin` on, the start of a
// run.
struct Range {
  int origin, begin, end;
};

HWY_INLINE const std::byte* ValueRun(const SegmentTask& task, int s) {
  const int block_tokens = task.kv->block_tokens;
  return task.kv->values(task.table[s / block_tokens], task.kv_head, s % block_tokens);
}

// out[j][d0 ..] = rest[j] + sum over the keys of weight * number, D vectors of the head at a time so that accumulators
// stay in registers; weights[j][0] belongs to key `origin`.
template <int N, int D, class R>
HWY_INLINE void Mix(const SegmentTask& task, const Range& range, const float* const* weights, const float* rest, int d0,
                    float* const* out) {
  static_assert(D % R::kValues == 0);
  const DF df;
  const std::size_t token_bytes = task.kv->number_bytes() / kKeyGroup;
  VF a[N][D];
  for (int j = 0; j < N; j++) {
    for (int d = 0; d < D; d++) a[j][d] = hn::Zero(df);
  }
  for (int s = range.begin; s < range.end;) {
    const int stop = std::min(range.end, (s / kKeyGroup + 1) * kKeyGroup);
    const std::byte* token = ValueRun(task, s) + static_cast<std::size_t>(s % kKeyGroup) * token_bytes;
    for (; s < stop; s++, token += token_bytes) {
      if constexpr (R::kValues == 1) {
        VF w[N];
        for (int j = 0; j < N; j++) w[j] = hn::Set(df, weights[j][s - range.origin]);
        for (int d = 0; d < D; d++) {
          VF x[1];
          R::Values(token, d0 + d * kLanes, 0, x);
          for (int j = 0; j < N; j++) a[j][d] = hn::MulAdd(w[j], x[0], a[j][d]);
        }
      } else {
        constexpr int kHalf = R::kValues / 2;
        for (int u = 0; u < D; u += R::kValues) {
          for (int i = u; i < u + kHalf; i++) {
            VF x[2];
            R::Values(token, d0 + u * kLanes, i - u, x);
            for (int j = 0; j < N; j++) {
              const VF w = hn::Set(df, weights[j][s - range.origin]);
              a[j][i] = hn::MulAdd(w, x[0], a[j][i]);
              a[j][i + kHalf] = hn::MulAdd(w, x[1], a[j][i + kHalf]);
            }
          }
        }
      }
    }
  }
  for (int j = 0; j < N; j++) {
    for (int d = 0; d < D; d++) {
      const VF sum = R::kCodes ? hn::Add(a[j][d], hn::Set(df, rest[j])) : a[j][d];
      hn::StoreU(sum, df, out[j] + d0 + d * kLanes);
    }
  }
}

template <int N, class R>
HWY_INLINE void MixDimensions(const SegmentTask& task, const Range& range, const float* const* weights,
                              const float* rest, int begin, int end, float* const* out) {
  int d = begin;
  for (; d + 4 * kLanes <= end; d += 4 * kLanes) Mix<N, 4, R>(task, range, weights, rest, d, out);
  if constexpr (R::kValues <= 2) {
    for (; d + 2 * kLanes <= end; d += 2 * kLanes) Mix<N, 2, R>(task, range, weights, rest, d, out);
  }
  if constexpr (R::kValues == 1) {
    for (; d < end; d += kLanes) Mix<N, 1, R>(task, range, weights, rest, d, out);
  }
}

// Of codes, group g: each key's weight times its scale, and in rest[j] the sum of weight * bias. Keys of weight 0 may
// not have been written yet. Lanes follow absolute positions, as in Weigh.
template <int N>
HWY_INLINE void ScaleWeights(const SegmentTask& task, const Range& range, int g, const float* const* weights,
                             float* const* scaled, float* rest) {
  const DF df;
  VF sum[N];
  for (int j = 0; j < N; j++) sum[j] = hn::Zero(df);
  for (int s = range.origin; s < range.end; s += kKeyGroup) {
    const auto* scales = reinterpret_cast<const hwy::float16_t*>(task.kv->scales(ValueRun(task, s), g));
    for (int i = 0; i < kKeyGroup; i += kLanes) {
      const VF scale = LoadKv(scales + i), bias = LoadKv(scales + kKeyGroup + i);
      for (int j = 0; j < N; j++) {
        const VF w = hn::Load(df, weights[j] + (s - range.origin) + i);
        const auto none = hn::Eq(w, hn::Zero(df));
        hn::Store(hn::Mul(w, hn::IfThenZeroElse(none, scale)), df, scaled[j] + (s - range.origin) + i);
        sum[j] = hn::MulAdd(w, hn::IfThenZeroElse(none, bias), sum[j]);
      }
    }
  }
  for (int j = 0; j < N; j++) rest[j] = SumLanes(sum[j]);
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

template <int N, class R>
HWY_NOINLINE void Vectors(const SegmentTask& task, int v0) {
  const PagedKv& kv = *task.kv;
  const int dim = kv.head_dim, block_tokens = kv.block_tokens;
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
  float q_sums[N * kMostGroups] = {};
  float* scores[N];
  float* out[N];
  for (int j = 0; j < N; j++) {
    q[j] = task.q[v0 + j];
    scores[j] = task.scores + static_cast<std::size_t>(j) * (kAttentionSegment + kKeyGroup);
    out[j] = task.out + static_cast<std::size_t>(v0 + j) * dim;
    for (int g = 0; g < kv.groups(); g++) {
      float sum = 0;
      for (int d = g * kv.group; d < (g + 1) * kv.group; d++) sum += q[j][d];
      q_sums[j * kMostGroups + g] = sum;
    }
  }
  const auto keys = [&](int s) { return kv.keys(task.table[s / block_tokens], task.kv_head, s % block_tokens); };
  constexpr int kAhead = 3 * kKeyGroup;
  for (int s = origin; s < end; s += kKeyGroup) {
    float* at[N];
    for (int j = 0; j < N; j++) at[j] = scores[j] + (s - origin);
    Ahead ahead{};
    if (task.prefetch) {  // memory traffic is spread: scoring fetches keys ahead and the values the mixing will read
      if (s + kAhead < end) ahead.keys = keys(s + kAhead);
      ahead.values = ValueRun(task, s);
    }
    Score16<N, R>(kv, q, q_sums, keys(s), at, ahead);
  }
  for (int j = 0; j < N; j++) {
    Weigh(scores[j], count, task.first[v0 + j] - origin, task.last[v0 + j] - origin, task.softcap, task.max + v0 + j,
          task.sum + v0 + j);
  }
  const Range range{origin, begin, end};
  float rest[N] = {};
  if constexpr (R::kCodes) {
    float* scaled[N];
    for (int j = 0; j < N; j++) scaled[j] = scores[j] + kMaxVectors * (kAttentionSegment + kKeyGroup);
    for (int g = 0; g < kv.groups(); g++) {
      ScaleWeights<N>(task, range, g, scores, scaled, rest);
      MixDimensions<N, R>(task, range, scaled, rest, g * kv.group, (g + 1) * kv.group, out);
    }
  } else {
    MixDimensions<N, R>(task, range, scores, rest, 0, dim, out);
  }
}

template <class R>
void Typed(const SegmentTask& task) {
  using Run = void (*)(const SegmentTask&, int);
  static constexpr Run kRun[] = {
    Vectors<1, R>,
    Vectors<2, R>,
    Vectors<3, R>,
#if HWY_TARGET != HWY_AVX2
    Vectors<4, R>,
    Vectors<5, R>,
    Vectors<6, R>,
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
      Typed<Plain<hwy::float16_t>>(task);
      break;
    case KvElement::bf16:
      Typed<Plain<hwy::bfloat16_t>>(task);
      break;
    case KvElement::f32:
      Typed<Plain<float>>(task);
      break;
    case KvElement::code8:
      Typed<Codes8>(task);
      break;
    case KvElement::code4:
      Typed<Codes4>(task);
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
