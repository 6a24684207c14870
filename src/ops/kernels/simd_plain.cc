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
                         const char* prefetch) {
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
      if (prefetch != nullptr) {
        __builtin_prefetch(prefetch + b * w.block_bytes() + k * (kPlainColumns * sizeof(T)), 0, kToL2);
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
void Tile(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
          std::size_t ld, const char* prefetch) {
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x.x() + (static_cast<std::size_t>(tile) * x.tile() + r) * x.stride();
  // As many blocks at a time as accumulators fit into registers.
  constexpr int kWide = HWY_TARGET == HWY_AVX2 && R > 2 ? 1 : 2;
  int b = 0;
  for (; b + kWide <= count; b += kWide) {
    Blocks<R, kWide, T>(w, first + b, rows, out + b * kPlainColumns, ld,
                        prefetch != nullptr ? prefetch + b * w.block_bytes() : nullptr);
  }
  if constexpr (kWide > 1) {
    if (b < count) {
      Blocks<R, 1, T>(w, first + b, rows, out + b * kPlainColumns, ld,
                      prefetch != nullptr ? prefetch + b * w.block_bytes() : nullptr);
    }
  }
}

template <class T>
ProductFunction PickRows(int rows) {
  static constexpr ProductFunction kRows[] = {
    Tile<1, T>,
    Tile<2, T>,
    Tile<3, T>,
    Tile<4, T>,
#if HWY_TARGET != HWY_AVX2
    Tile<5, T>,
    Tile<6, T>,
    Tile<7, T>,
    Tile<8, T>,
    Tile<9, T>,
    Tile<10, T>,
    Tile<11, T>,
    Tile<12, T>,
#endif
  };
  return kRows[rows - 1];
}

}  // namespace

void PlainProduct(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
                  std::size_t ld, const char* prefetch) {
  const int rows = x.tile_rows(tile);
  const ProductFunction f = w.kind() == WeightKind::f32   ? PickRows<float>(rows)
                            : w.kind() == WeightKind::f16 ? PickRows<hwy::float16_t>(rows)
                                                          : PickRows<hwy::bfloat16_t>(rows);
  f(w, x, first, count, tile, out, ld, prefetch);
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
