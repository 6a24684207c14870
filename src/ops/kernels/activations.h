// Activations between two kernels, in the form the consumer reads.
//
// Rows are handled in tiles of up to `tile` rows that share every load of a weight. A row's bits never depend on the
// tiling. Within the arrays the rows of tile t start at row0 = t * tile and R = tile_rows(t) of them are interleaved:
//   int8 form  q     [k/32][R][32] codes of one tile, at q + row0 * k
//              scale [k/group][R], at scale + row0 * (k/group): value = scale * code
//              sum   [k/group][R]: scale * (sum of the group's codes), for the weights' bias
//              neg   [k/group][R]: -(sum of the group's codes), for symmetric weights
//              neg16 [k/16][R]: the same for each 16 codes, for weights in groups of 16; only for groups of 32
//   f32 form   x     [rows][stride], stride = k rounded up to 32; columns past k are not read
//   both       ssq   [ceil(k/32)][R], at ssq + row0 * ceil(k/32): sums of squares of the row before the norm's weight,
//   per
//                    32 columns. Present when the consumer must multiply its result by the row's RMS factor
//                    1/sqrt(sum(ssq)/k + eps); added up in order of the columns.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ops/kernels/memory.h"
#include "ops/kernels/pack.h"

namespace galley::kernels {

/// A buffer of activations. Owns its memory, which only ever grows; reshape() discards the contents.
class Activations {
 public:
  /// `rows` rows of `k` columns. `max_tile`: the instruction set's. `normed`: ssq is present. k must be a multiple of
  /// the form's group when quantized.
  void reshape(int rows, int k, ActivationForm form, bool normed, int max_tile);

  [[nodiscard]] int rows() const { return rows_; }
  [[nodiscard]] int k() const { return k_; }
  [[nodiscard]] ActivationForm form() const { return form_; }
  [[nodiscard]] bool normed() const { return ssq_ != nullptr; }
  [[nodiscard]] int tile() const { return tile_; }
  [[nodiscard]] int tiles() const { return rows_ == 0 ? 0 : (rows_ + tile_ - 1) / tile_; }
  [[nodiscard]] int tile_rows(int t) const { return rows_ - t * tile_ < tile_ ? rows_ - t * tile_ : tile_; }
  [[nodiscard]] int groups() const { return form_.quantized() ? k_ / form_.group : 0; }
  [[nodiscard]] int ssq_groups() const { return (k_ + 31) / 32; }
  [[nodiscard]] std::size_t stride() const { return (static_cast<std::size_t>(k_) + 31) / 32 * 32; }

  [[nodiscard]] std::int8_t* q() const { return q_; }
  [[nodiscard]] float* scale() const { return scale_; }
  [[nodiscard]] float* sum() const { return sum_; }
  [[nodiscard]] std::int32_t* neg() const { return neg_; }
  [[nodiscard]] std::int32_t* neg16() const { return neg16_; }
  [[nodiscard]] float* x() const { return x_; }
  [[nodiscard]] float* ssq() const { return ssq_; }

 private:
  int rows_ = 0, k_ = 0, tile_ = 1;
  ActivationForm form_;
  AlignedMemory memory_;
  std::int8_t* q_ = nullptr;
  float *scale_ = nullptr, *sum_ = nullptr, *x_ = nullptr, *ssq_ = nullptr;
  std::int32_t *neg_ = nullptr, *neg16_ = nullptr;
};

}  // namespace galley::kernels
