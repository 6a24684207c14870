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

/// Every token with a logit of at least `floor`, by ascending id; blocks whose maximum is lower are skipped.
std::vector<Candidate> gather(std::span<const float> logits, const Maxima& maxima, float floor) {
  std::vector<Candidate> found;
  for (std::size_t b = 0; b < maxima.blocks.size(); ++b) {
    if (maxima.blocks[b] < floor) continue;
    const std::size_t end = std::min((b + 1) * kLogitsBlock, logits.size());
    for (std::size_t i = b * kLogitsBlock; i < end; ++i) {
      if (logits[i] >= floor) found.push_back({static_cast<std::int32_t>(i), logits[i]});
    }
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

/// Masses of slices of equal width below the maximum, so that only one slice has to be sorted.
class Slices {
 public:
  /// Tokens further than `reach` below `max` are left out.
  Slices(float max, float reach) : max_(max), scale_(static_cast<float>(kSlices) / reach) {}

  void add(std::span<const float> logits, std::span<const float> weight) {
    for (std::size_t i = 0; i < logits.size(); ++i) mass_[of(logits[i])] += static_cast<double>(weight[i]);
  }
  /// 0 at the maximum; kSlices: out of reach. Monotone in the logit, so slices are ordered by likelihood.
  [[nodiscard]] std::size_t of(float logit) const {
    const float slice = (max_ - logit) * scale_;
    return slice < static_cast<float>(kSlices) ? static_cast<std::size_t>(slice) : kSlices;
  }
  /// The slice in which the running mass reaches `target`, and the mass above it.
  [[nodiscard]] std::pair<std::size_t, double> border(double target) const {
    double above = 0.0;
    std::size_t slice = 0;
    while (slice + 1 < kSlices && above + mass_[slice] < target) above += mass_[slice++];
    return {slice, above};
  }

 private:
  static constexpr std::size_t kSlices = 2048;
  float max_;
  float scale_;
  std::vector<double> mass_ = std::vector<double>(kSlices + 1, 0.0);
};

float top_p_floor(std::span<const float> logits, const Maxima& maxima, float top_p) {
  std::vector<double> sums(maxima.blocks.size());
  const double total = block_weights(logits, maxima.value, 1.0F, sums);
  const double target = static_cast<double>(top_p) * total;
  // Mostly a few tokens hold the mass.
  constexpr std::size_t kFirstTry = 64;
  std::vector<Candidate> pool = gather(logits, maxima, floor_for(maxima, kFirstTry));
  if (pool.size() <= 16 * kFirstTry) {
    double mass = 0.0;
    for (const Candidate& candidate : pool) mass += static_cast<double>(exp_nonpositive(candidate.logit - maxima.value));
    if (mass >= target) return nucleus_floor(pool, maxima.value, 0.0, target);
  }
  // Tokens further than `reach` below the maximum weigh less than (1 - top_p) * total together, so the border is above.
  const double outside = (total - target) / static_cast<double>(logits.size());
  const auto reach = static_cast<float>(-std::log(std::max(outside, 1e-30)) + 1e-3);
  Slices slices(maxima.value, reach);
  std::array<float, kLogitsBlock> weight{};
  for (std::size_t b = 0; b < maxima.blocks.size(); ++b) {
    if (maxima.blocks[b] < maxima.value - reach) continue;
    const std::size_t begin = b * kLogitsBlock;
    const auto block = logits.subspan(begin, std::min(kLogitsBlock, logits.size() - begin));
    weights(block, maxima.value, 1.0F, std::span(weight).first(block.size()));
    slices.add(block, weight);
  }
  const auto [slice, above] = slices.border(target);
  pool.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (slices.of(logits[i]) == slice) pool.push_back({static_cast<std::int32_t>(i), logits[i]});
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
  if (uses_top_p(params)) floor = top_p_floor(logits, maxima, params.top_p);
  if (uses_min_p(params)) floor = std::max(floor, maxima.value + std::log(std::min(params.min_p, 1.0F)));
  const bool top_k = uses_top_k(params, logits.size());
  const auto k = static_cast<std::size_t>(std::max(params.top_k, 0));
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
