// Internal: what one instruction set must provide. The drivers (products.cc, attend.cc, rows.cc) are plain C++ and call
// through this table; simd_*.cc fill it for each Highway target, scalar.cc for any CPU.
//
// A "tile buffer" is float [rows][ld] on the caller's stack, 64-byte aligned, ld a multiple of 16.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ops/kernels/activations.h"
#include "ops/kernels/kernels.h"
#include "ops/kernels/kv_numbers.h"
#include "ops/kernels/pack.h"
#include "ops/kernels/paged_kv.h"

namespace galley::kernels {

constexpr int kMaxTile = 16;   ///< of any target
constexpr int kMaxUnit = 512;  ///< widest unit: a head, or two interleaved groups of 128
constexpr int kMaxHeadDim = 512;
constexpr int kMaxVectors = 6;  ///< query vectors scored together, of any target

/// Memory to ask for while a kernel computes, spread over its course. It is not read, so it may lie anywhere.
struct Fetch {
  const char* at = nullptr;
  std::size_t bytes = 0;
  /// Bytes in each of `steps` steps.
  [[nodiscard]] std::size_t share(std::size_t steps) const { return (bytes + steps - 1) / steps; }
};

/// blocks [first, first + count) of the matrix times tile `tile` of x into out[r * ld + column].
using ProductFunction = void (*)(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile,
                                 float* out, std::size_t ld, const Fetch& fetch);

struct Best {
  float value;
  std::int32_t index;
};

/// One head of one row after the product.
struct HeadTask {
  int dim = 0;
  const float* norm = nullptr;  // [dim] or null
  float eps = 0;
  const float* rope = nullptr;  // the position's cosines and sines, or null
  int rope_dims = 0;
  bool traditional = false;
  float scale = 1;
  float* q = nullptr;        // exactly one of these is set: a query head [dim] f32,
  std::byte* run = nullptr;  // or the run whose token `slot` (0 to 15) this is
  const PagedKv* kv = nullptr;
  KvPart part = KvPart::keys;
  int slot = 0;
};

/// Query vectors of one KV head against the keys [begin, end) of one segment.
struct SegmentTask {
  const PagedKv* kv = nullptr;
  int kv_head = 0;
  const std::int32_t* table = nullptr;
  int vectors = 0;
  const float* const* q = nullptr;  // [vectors] -> [head_dim]
  const int* first = nullptr;       // [vectors] visible keys, clipped to the segment; first >= last: none
  const int* last = nullptr;
  float softcap = 0;        // already times log2(e); 0: none
  bool prefetch = false;    // the keys come from memory
  float* scores = nullptr;  // scratch, 2 * kMaxVectors * (kAttentionSegment + kKeyGroup)
  float* out = nullptr;     // [vectors][head_dim], sum of weights * values
  float* max = nullptr;     // [vectors]; kNothing when none is visible
  float* sum = nullptr;     // [vectors] sum of weights 2^(score - max)
};
constexpr float kNothing = -1e30F;

struct KernelTable {
  ProductFunction affine[9] = {};  ///< by the bits a code is stored with: 4, 5, 6 or 8
  ProductFunction plain = nullptr;
  /// Called by a thread before (`begin`) and after its share of a product with tiles of `rows`; null: nothing to do.
  void (*around_products)(int rows, bool begin) = nullptr;

  /// In place: buf[r][c] = buf[r][c] * factor[r] + bias[c]; either may be null.
  void (*scale_bias)(float* buf, std::size_t ld, int rows, int width, const float* factor, const float* bias) = nullptr;
  /// buf = residual + scale * buf, stored to y as well. residual and y point at [rows][ldy] of the unit's columns.
  void (*add_residual)(float* buf, std::size_t ld, int rows, int width, const float* residual, float* y,
                       std::size_t ldy, float scale) = nullptr;
  /// Sums of squares per 32 columns to ssq[(c/32) * ssq_stride + r], then buf *= norm[c]. width a multiple of 32.
  void (*norm)(float* buf, std::size_t ld, int rows, int width, const float* norm, float* ssq,
               std::size_t ssq_stride) = nullptr;
  /// In place, `pairs` times: 32 columns of gate and 32 of up become 32 columns.
  void (*gate)(float* buf, std::size_t ld, int rows, int pairs, Gate kind) = nullptr;
  /// Group g of `rows` rows from `row` on (all within one tile) in int8 form.
  void (*quantize)(const float* buf, std::size_t ld, int rows, const Activations& out, int row, int g) = nullptr;
  /// Keeps the first of the largest of buf[r][0, width) in best[r]; `index` is column 0's.
  void (*argmax)(const float* buf, std::size_t ld, int rows, int width, std::int32_t index, Best* best) = nullptr;
  /// In place: cap * tanh(buf / cap).
  void (*soft_cap)(float* buf, std::size_t ld, int rows, int width, float cap) = nullptr;
  void (*head)(const HeadTask& task, const float* values) = nullptr;

  void (*segment)(const SegmentTask& task) = nullptr;
  /// Merges a later part into (out, max, sum): both are rescaled to the larger maximum.
  void (*merge)(int dim, float* out, float* max, float* sum, const float* part, float part_max,
                float part_sum) = nullptr;
};

/// Instruction sets with compiled bodies, best last. Flavours that differ in their dot products share a level.
enum class Level { scalar, avx2, avx3, avx3dl };
/// Of bytes: vpmaddubsw, vpdpbusd, or AMX tiles.
enum class Dot { pairs, vnni, amx };

void fill_scalar(KernelTable& table);
template <int BITS>
void fill_affine(Level level, Dot dot, KernelTable& table);
template <>
void fill_affine<4>(Level level, Dot dot, KernelTable& table);
template <>
void fill_affine<5>(Level level, Dot dot, KernelTable& table);
template <>
void fill_affine<6>(Level level, Dot dot, KernelTable& table);
template <>
void fill_affine<8>(Level level, Dot dot, KernelTable& table);
void fill_plain(Level level, KernelTable& table);
void fill_epilogue(Level level, KernelTable& table);
void fill_attention(Level level, KernelTable& table);

}  // namespace galley::kernels
