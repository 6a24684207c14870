#include "sample/truncate.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

double mass_of(const Candidate& candidate, float max) {
  return static_cast<double>(exp_nonpositive(candidate.logit - max));
}

/// The least likely candidate's logit that top_p keeps: the smallest v whose more likely candidates weigh less than
/// `target`. A selection by weight, expected linear: halves are dropped by their mass. `pool` is reordered.
float nucleus_floor(std::vector<Candidate>& pool, float max, double target) {
  auto begin = pool.begin();
  auto end = pool.end();
  double above = 0.0;  // mass of everything more likely than [begin, end)
  float kept = max;
  while (begin != end) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, more_likely);
    double upper = 0.0;
    for (auto it = begin; it != middle; ++it) upper += mass_of(*it, max);
    if (above + upper < target) {  // the middle one is kept: go on below it
      kept = middle->logit;
      above += upper + mass_of(*middle, max);
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return kept;
}

float top_p_floor(std::span<const float> logits, const Maxima& maxima, float top_p) {
  std::vector<double> sums(maxima.blocks.size());
  const double total = block_weights(logits, maxima.value, 1.0F, sums);
  const double target = static_cast<double>(top_p) * total;
  // Mostly a few tokens hold the mass; only when they don't, take all that can matter: the tokens further than `reach`
  // below the maximum weigh less than (1 - top_p) * total together.
  constexpr std::size_t kFirstTry = 64;
  std::vector<Candidate> pool = gather(logits, maxima, floor_for(maxima, kFirstTry));
  double mass = 0.0;
  for (const Candidate& candidate : pool) mass += mass_of(candidate, maxima.value);
  if (mass < target) {
    const double outside = (total - target) / static_cast<double>(logits.size());
    const double reach = -std::log(std::max(outside, 1e-30)) + 1e-3;
    pool = gather(logits, maxima, static_cast<float>(static_cast<double>(maxima.value) - reach));
  }
  return nucleus_floor(pool, maxima.value, target);
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
