// Products of plain matrices (f32, f16, bf16 weights, fp32 activations), for every vector target.
#include "ops/kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/simd_plain.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/simd-inl.h"

#if GALLEY_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace galley::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr int kPerBlock = kPlainColumns / kLanes;  // vectors in a block's 16 columns

template <class T>
HWY_INLINE VF LoadWeight(const T* p) {
  const DF df;
  if constexpr (sizeof(T) == 4) {
    return hn::Load(df, p);
  } else {
    return hn::PromoteTo(df, hn::Load(hn::Rebind<T, DF>(), p));
  }
}

// B neighbouring blocks times R rows. Every output has one accumulator, fed in order of k whatever R and B are.
template <int R, int B, class T>
HWY_NOINLINE void Blocks(const PackedMatrix& w, std::size_t first, const float* const* x, float* out, std::size_t ld,
                         const char* fetch, std::size_t fetch_step) {
  const DF df;
  const T* p[B];
  for (int b = 0; b < B; b++) p[b] = reinterpret_cast<const T*>(w.block(first + b));
  VF acc[R][B * kPerBlock];
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < B * kPerBlock; i++) acc[r][i] = hn::Zero(df);
  }
  const int depth = w.depth();
  for (int k = 0; k < depth; k++) {
    VF v[B * kPerBlock];
    for (int b = 0; b < B; b++) {
      for (std::size_t o = 0; o < fetch_step; o += 64) {
        __builtin_prefetch(fetch + (static_cast<std::size_t>(b) * depth + k) * fetch_step + o, 0, kToL2);
      }
      for (int i = 0; i < kPerBlock; i++) v[b * kPerBlock + i] = LoadWeight(p[b] + k * kPlainColumns + i * kLanes);
    }
    for (int r = 0; r < R; r++) {
      const VF s = hn::Set(df, x[r][k]);
      for (int i = 0; i < B * kPerBlock; i++) acc[r][i] = hn::MulAdd(s, v[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < B * kPerBlock; i++) hn::Store(acc[r][i], df, out + r * ld + i * kLanes);
  }
}

template <int R, class T>
void Rows(const PackedMatrix& w, const Activations& x, std::size_t first, int count, std::size_t row, float* out,
          std::size_t ld, const Fetch& fetch) {
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x.x() + (row + r) * x.stride();
  // As many blocks at a time as accumulators fit into registers.
  constexpr int kWide = HWY_TARGET == HWY_AVX2 && R > 2 ? 1 : 2;
  const auto depth = static_cast<std::size_t>(w.depth());
  const std::size_t fetch_step = fetch.share(depth * static_cast<std::size_t>(count));
  int b = 0;
  for (; b + kWide <= count; b += kWide) {
    Blocks<R, kWide, T>(w, first + b, rows, out + b * kPlainColumns, ld, fetch.at + b * depth * fetch_step, fetch_step);
  }
  if constexpr (kWide > 1) {
    if (b < count) {
      Blocks<R, 1, T>(w, first + b, rows, out + b * kPlainColumns, ld, fetch.at + b * depth * fetch_step, fetch_step);
    }
  }
}

using RowsFunction = void (*)(const PackedMatrix& w, const Activations& x, std::size_t first, int count,
                              std::size_t row, float* out, std::size_t ld, const Fetch& fetch);

template <class T>
RowsFunction PickRows(int rows) {
  static constexpr RowsFunction kRows[] = {
    Rows<1, T>,
    Rows<2, T>,
    Rows<3, T>,
    Rows<4, T>,
#if HWY_TARGET != HWY_AVX2
    Rows<5, T>,
    Rows<6, T>,
    Rows<7, T>,
    Rows<8, T>,
    Rows<9, T>,
    Rows<10, T>,
    Rows<11, T>,
    Rows<12, T>,
#endif
  };
  return kRows[rows - 1];
}

}  // namespace

void PlainProduct(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
                  std::size_t ld, const Fetch& fetch) {
  const auto row0 = static_cast<std::size_t>(tile) * x.tile();
  const int rows = x.tile_rows(tile), most = rows > kTile ? (rows + 1) / 2 : rows;  // AMX has higher tiles than this
  for (int r = 0; r < rows; r += most) {
    const int n = std::min(most, rows - r);
    const RowsFunction f = w.kind() == WeightKind::f32   ? PickRows<float>(n)
                           : w.kind() == WeightKind::f16 ? PickRows<hwy::float16_t>(n)
                                                         : PickRows<hwy::bfloat16_t>(n);
    f(w, x, first, count, row0 + r, out + r * ld, ld, r == 0 ? fetch : Fetch{});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace galley::kernels
HWY_AFTER_NAMESPACE();
#endif  // GALLEY_SIMD_TARGET

#if HWY_ONCE
namespace galley::kernels {

void fill_plain(Level level, KernelTable& table) {
  static_cast<void>(table);
  switch (level) {
#if HWY_TARGETS & HWY_AVX3_DL
    case Level::avx3dl:
      table.plain = N_AVX3_DL::PlainProduct;
      break;
#endif
#if HWY_TARGETS & HWY_AVX3
    case Level::avx3:
      table.plain = N_AVX3::PlainProduct;
      break;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Level::avx2:
      table.plain = N_AVX2::PlainProduct;
      break;
#endif
    default:
      break;
  }
}

}  // namespace galley::kernels
#endif  // HWY_ONCE
