#include "sample/truncate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

namespace galley::sample {
namespace {

bool uses_top_p(const Params& params) { return params.top_p > 0.0F && params.top_p < 1.0F; }
bool uses_min_p(const Params& params) { return params.min_p > 0.0F; }
bool uses_top_k(const Params& params, std::size_t vocab) {
  return params.top_k > 0 && static_cast<std::size_t>(params.top_k) < vocab;
}

/// Appends the tokens of block `b` for which `wanted(index in block)` holds. Without branches: which tokens those are
/// is unpredictable.
template <typename Wanted>
void append_block(std::vector<Candidate>& found, std::span<const float> block, std::size_t b, Wanted wanted) {
  std::array<Candidate, kLogitsBlock + 1> taken;
  std::size_t n = 0;
  for (std::size_t i = 0; i < block.size(); ++i) {
    taken[n] = {static_cast<std::int32_t>(b * kLogitsBlock + i), block[i]};
    n += wanted(i) ? 1 : 0;
  }
  found.insert(found.end(), taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(n));
}

std::span<const float> block_of(std::span<const float> logits, std::size_t b) {
  const std::size_t begin = b * kLogitsBlock;
  return logits.subspan(begin, std::min(kLogitsBlock, logits.size() - begin));
}

/// Every token with a logit of at least `floor`, by ascending id; blocks whose maximum is lower are skipped.
std::vector<Candidate> gather(std::span<const float> logits, const Maxima& maxima, float floor) {
  std::vector<Candidate> found;
  for (std::size_t b = 0; b < maxima.blocks.size(); ++b) {
    if (maxima.blocks[b] < floor) continue;
    const auto block = block_of(logits, b);
    append_block(found, block, b, [&](std::size_t i) { return block[i] >= floor; });
  }
  return found;
}

/// A value that at least `count` logits reach: the count-th largest of the block maxima.
float floor_for(const Maxima& maxima, std::size_t count) {
  if (count > maxima.blocks.size()) return -std::numeric_limits<float>::infinity();
  std::vector<float> blocks = maxima.blocks;
  const auto nth = blocks.begin() + static_cast<std::ptrdiff_t>(count - 1);
  std::nth_element(blocks.begin(), nth, blocks.end(), std::greater<>());
  return *nth;
}

/// The least likely logit that top_p keeps: the smallest v whose more likely tokens weigh less than `target`, where
/// `above` is the weight of everything more likely than the pool. Sorts the pool.
float nucleus_floor(std::vector<Candidate>& pool, float max, double above, double target) {
  std::sort(pool.begin(), pool.end(), more_likely);
  float kept = max;
  for (const Candidate& candidate : pool) {
    if (above >= target) break;
    kept = candidate.logit;
    above += static_cast<double>(exp_nonpositive(candidate.logit - max));
  }
  return kept;
}

/// `at_most`: when not zero, only that many of the most likely tokens matter to the caller.
float top_p_floor(std::span<const float> logits, const Maxima& maxima, float top_p, std::size_t at_most) {
  std::vector<double> sums(maxima.blocks.size());
  const double total = block_weights(logits, maxima.value, 1.0F, sums);
  const double target = static_cast<double>(top_p) * total;
  if (at_most > 0) {
    std::vector<Candidate> pool = most_likely(logits, maxima, at_most);
    return nucleus_floor(pool, maxima.value, 0.0, target);
  }
  // Mostly a few tokens hold the mass.
  constexpr std::size_t kFirstTry = 64;
  std::vector<Candidate> pool = gather(logits, maxima, floor_for(maxima, kFirstTry));
  if (pool.size() <= 16 * kFirstTry) {
    double mass = 0.0;
    for (const Candidate& candidate : pool)
      mass += static_cast<double>(exp_nonpositive(candidate.logit - maxima.value));
    if (mass >= target) return nucleus_floor(pool, maxima.value, 0.0, target);
  }
  // Tokens further than `reach` below the maximum weigh less than (1 - top_p) * total together, so the border is above.
  const double outside = (total - target) / static_cast<double>(logits.size());
  const auto reach = static_cast<float>(-std::log(std::max(outside, 1e-30)) + 1e-3);
  // Mass by slices of equal width below the maximum, so that only the slice of the border has to be sorted.
  constexpr std::int32_t kSlices = 2048;
  const float scale = static_cast<float>(kSlices) / reach;
  std::vector<double> mass(kSlices + 1, 0.0);  // the last one: out of reach
  std::array<float, kLogitsBlock> weight{};
  std::array<std::int32_t, kLogitsBlock> slice{};
  for (std::size_t b = 0; b < maxima.blocks.size(); ++b) {
    if (maxima.blocks[b] < maxima.value - reach) continue;
    const auto block = block_of(logits, b);
    weights(block, maxima.value, 1.0F, std::span(weight).first(block.size()));
    slice_indices(block, maxima.value, scale, kSlices, std::span(slice).first(block.size()));
    for (std::size_t i = 0; i < block.size(); ++i) {
      mass[static_cast<std::size_t>(slice[i])] += static_cast<double>(weight[i]);
    }
  }
  double above = 0.0;
  std::int32_t border = 0;
  while (border + 1 < kSlices && above + mass[static_cast<std::size_t>(border)] < target) {
    above += mass[static_cast<std::size_t>(border++)];
  }
  pool.clear();
  const float lowest = maxima.value - static_cast<float>(border + 2) / scale;  // below the border, rounding included
  for (std::size_t b = 0; b < maxima.blocks.size(); ++b) {
    if (maxima.blocks[b] < lowest) continue;
    const auto block = block_of(logits, b);
    slice_indices(block, maxima.value, scale, kSlices, std::span(slice).first(block.size()));
    append_block(pool, block, b, [&](std::size_t i) { return slice[i] == border; });
  }
  return nucleus_floor(pool, maxima.value, above, target);
}

}  // namespace

bool truncates(const Params& params, std::size_t vocab) {
  return uses_top_p(params) || uses_min_p(params) || uses_top_k(params, vocab);
}

std::vector<Candidate> most_likely(std::span<const float> logits, const Maxima& maxima, std::size_t count) {
  count = std::min(count, logits.size());
  if (count == 0) return {};
  std::vector<Candidate> pool = gather(logits, maxima, floor_for(maxima, count));
  const auto end = pool.begin() + static_cast<std::ptrdiff_t>(count);
  if (end != pool.end()) std::nth_element(pool.begin(), end, pool.end(), more_likely);
  pool.resize(count);
  std::sort(pool.begin(), pool.end(), more_likely);
  return pool;
}

std::vector<Candidate> truncate(std::span<const float> logits, const Maxima& maxima, const Params& params) {
  float floor = -std::numeric_limits<float>::infinity();
  if (uses_min_p(params)) floor = std::max(floor, maxima.value + std::log(std::min(params.min_p, 1.0F)));
  const bool top_k = uses_top_k(params, logits.size());
  const auto k = static_cast<std::size_t>(std::max(params.top_k, 0));
  if (uses_top_p(params)) floor = std::max(floor, top_p_floor(logits, maxima, params.top_p, top_k ? k : 0));
  if (top_k) floor = std::max(floor, floor_for(maxima, k));  // still leaves all of the top k
  std::vector<Candidate> kept = gather(logits, maxima, floor);
  if (top_k && kept.size() > k) {
    std::vector<Candidate> order = kept;
    const auto nth = order.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(order.begin(), nth, order.end(), more_likely);
    const Candidate last = *nth;
    std::erase_if(kept, [&](const Candidate& candidate) { return more_likely(last, candidate); });
  }
  return kept;
}

}  // namespace galley::sample
