// The passes over a whole row of logits, in blocks of fixed absolute position.
//
// These are the only loops of the sampler that touch every vocabulary entry, kept apart and free of branches so that a
// compiler vectorizes them and vector kernels can replace them. Sums are taken block by block in a fixed order, so a
// row's result depends on its own logits alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace galley::sample {

inline constexpr std::size_t kLogitsBlock = 256;  ///< vocabulary entries a block; the last one may be shorter

[[nodiscard]] constexpr std::size_t block_count(std::size_t entries) {
  return (entries + kLogitsBlock - 1) / kLogitsBlock;
}

/// What one pass of maxima tells about a row.
struct Maxima {
  std::vector<float> blocks;  ///< [block_count] largest logit of each block
  float value = 0.0F;         ///< largest of all
  std::int32_t token = 0;     ///< the first token that has it
  bool finite = false;        ///< no NaN anywhere, and `value` is finite (single entries may be -inf: masked tokens)
};
[[nodiscard]] Maxima find_maxima(std::span<const float> logits);

/// exp((x - max) * scale) summed over each block; `scale` > 0. Entries of -inf weigh nothing.
/// `sums` has block_count(logits.size()) entries. Returns the total.
double block_weights(std::span<const float> logits, float max, float scale, std::span<double> sums);

/// exp((x - max) * scale) of single entries (as block_weights takes it): `out` has the size of `logits` and may be the
/// same.
void weights(std::span<const float> logits, float max, float scale, std::span<float> out);

/// How far below the maximum each entry lies, in slices: min((max - x) * scale, limit), rounded down. Monotone in x.
void slice_indices(std::span<const float> logits, float max, float scale, std::int32_t limit,
                   std::span<std::int32_t> out);

/// e^x for x <= 0, two ulp; 0 below -87.
[[nodiscard]] float exp_nonpositive(float x);

}  // namespace galley::sample
