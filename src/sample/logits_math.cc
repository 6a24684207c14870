#include "sample/logits_math.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

// The loops below are written to be vectorized by the compiler, once for every instruction set named here; the loader
// picks. Partial results are laid out in kLanes whatever the registers hold and nothing is contracted, so the bits are
// the same on each. (The resolvers run before a sanitizer's runtime is up.)
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GALLEY_EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GALLEY_EVERY_ISA
#endif

namespace galley::sample {
namespace {

constexpr std::size_t kLanes = 16;  // independent partial results, so that the loops below vectorize
constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr std::int32_t kInfinityBits = 0x7F800000;

// Cephes' expf, without branches: a select flushes what would be denormal to zero.
inline float exp_poly(float x) {
  constexpr float kLog2e = 1.44269504088896341F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLowest = -87.0F;
  const float clamped = x < kLowest ? kLowest : x;
  const float shifted = clamped * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const float mantissa = p * (r * r) + r + 1.0F;
  const auto exponent = (std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound) + 127) << 23;
  const float result = mantissa * std::bit_cast<float>(exponent);
  return x < kLowest ? 0.0F : result;
}

struct BlockMaximum {
  float value;
  std::int32_t magnitude;  // largest bit pattern without sign: beyond infinity's, there is a NaN
};

GALLEY_EVERY_ISA BlockMaximum block_maximum(const float* logits, std::size_t n) {
  std::array<float, kLanes> best;
  std::array<std::int32_t, kLanes> magnitude{};
  best.fill(-std::numeric_limits<float>::infinity());
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const float x = logits[i + j];
      const auto bits = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x) & kMagnitude);
      best[j] = x > best[j] ? x : best[j];
      magnitude[j] = bits > magnitude[j] ? bits : magnitude[j];
    }
  }
  for (; i < n; ++i) {
    const auto bits = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(logits[i]) & kMagnitude);
    best[0] = logits[i] > best[0] ? logits[i] : best[0];
    magnitude[0] = std::max(magnitude[0], bits);
  }
  return {*std::max_element(best.begin(), best.end()), *std::max_element(magnitude.begin(), magnitude.end())};
}

}  // namespace

Maxima find_maxima(std::span<const float> logits) {
  Maxima found;
  found.blocks.resize(block_count(logits.size()));
  std::int32_t magnitude = 0;
  std::size_t best_block = 0;
  for (std::size_t b = 0; b < found.blocks.size(); ++b) {
    const std::size_t begin = b * kLogitsBlock;
    const BlockMaximum block = block_maximum(logits.data() + begin, std::min(kLogitsBlock, logits.size() - begin));
    found.blocks[b] = block.value;
    magnitude = std::max(magnitude, block.magnitude);
    if (block.value > found.blocks[best_block]) best_block = b;
  }
  if (logits.empty()) return found;
  found.value = found.blocks[best_block];
  found.finite = magnitude <= kInfinityBits && std::isfinite(found.value);
  if (!found.finite) return found;
  const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(best_block * kLogitsBlock);
  found.token = static_cast<std::int32_t>(std::find(begin, logits.end(), found.value) - logits.begin());
  return found;
}

GALLEY_EVERY_ISA double block_weights(std::span<const float> logits, float max, float scale, std::span<double> sums) {
  double total = 0.0;
  for (std::size_t b = 0; b < sums.size(); ++b) {
    const float* block = logits.data() + b * kLogitsBlock;
    const std::size_t n = std::min(kLogitsBlock, logits.size() - b * kLogitsBlock);
    std::array<float, kLanes> lanes{};
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += exp_poly((block[i + j] - max) * scale);
    }
    for (; i < n; ++i) lanes[i % kLanes] += exp_poly((block[i] - max) * scale);
    double sum = 0.0;
    for (const float lane : lanes) sum += static_cast<double>(lane);
    sums[b] = sum;
    total += sum;
  }
  return total;
}

GALLEY_EVERY_ISA void weights(std::span<const float> logits, float max, float scale, std::span<float> out) {
  for (std::size_t i = 0; i < logits.size(); ++i) out[i] = exp_poly((logits[i] - max) * scale);
}

GALLEY_EVERY_ISA void slice_indices(std::span<const float> logits, float max, float scale, std::int32_t limit,
                                    std::span<std::int32_t> out) {
  const auto most = static_cast<float>(limit);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float slice = (max - logits[i]) * scale;
    out[i] = static_cast<std::int32_t>(slice < most ? slice : most);
  }
}

float exp_nonpositive(float x) { return exp_poly(x); }

}  // namespace galley::sample
