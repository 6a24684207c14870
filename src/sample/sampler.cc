#include "sample/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "sample/logits_math.h"
#include "sample/philox.h"
#include "sample/truncate.h"

namespace galley::sample {
namespace {

std::uint64_t fresh_seed() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32U) | device();
}

float inverse_temperature(const Params& params) {
  constexpr float kColdest = 1e-5F;  // colder is the arg-max to any float, and 1/T must stay finite
  return 1.0F / std::max(params.temperature, kColdest);
}

/// The entry at which the running sum of weights passes `target`; entries without weight are never it.
std::size_t pick(std::span<const float> entries, double target) {
  double sum = 0.0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] <= 0.0F) continue;
    sum += static_cast<double>(entries[i]);
    last = i;
    if (sum > target) break;
  }
  return last;
}

std::int32_t draw_from_all(std::span<const float> logits, const Maxima& maxima, float scale, double u) {
  std::vector<double> sums(maxima.blocks.size());
  double target = u * block_weights(logits, maxima.value, scale, sums);
  std::size_t chosen = 0;
  for (std::size_t b = 0; b < sums.size(); ++b) {
    if (sums[b] <= 0.0) continue;
    chosen = b;
    if (target < sums[b]) break;
    target -= sums[b];
  }
  std::array<float, kLogitsBlock> block{};
  const std::size_t begin = chosen * kLogitsBlock;
  const std::size_t n = std::min(kLogitsBlock, logits.size() - begin);
  weights(logits.subspan(begin, n), maxima.value, scale, std::span(block).first(n));
  return static_cast<std::int32_t>(begin + pick(std::span<const float>(block).first(n), target));
}

std::int32_t draw_from_some(std::span<const Candidate> candidates, float max, float scale, double u) {
  std::vector<float> weight(candidates.size());
  for (std::size_t i = 0; i < candidates.size(); ++i) weight[i] = candidates[i].logit;
  weights(weight, max, scale, weight);
  double total = 0.0;
  for (const float w : weight) total += static_cast<double>(w);
  return candidates[pick(weight, u * total)].token;
}

}  // namespace

RowSampler::RowSampler(const Params& params)
    : params_(params), seed_(params.seed.has_value() ? *params.seed : fresh_seed()) {}

Choice RowSampler::choose(std::span<const float> logits, bool normalized) {
  const std::uint64_t draw = draws_++;
  const Maxima maxima = find_maxima(logits);
  Choice choice;
  choice.finite = maxima.finite;
  if (!choice.finite) return choice;

  if (params_.greedy()) {
    choice.token = maxima.token;
  } else {
    const double u = uniform_draw(seed_, draw);
    const float scale = inverse_temperature(params_);
    choice.token = truncates(params_, logits.size())
                       ? draw_from_some(truncate(logits, maxima, params_), maxima.value, scale, u)
                       : draw_from_all(logits, maxima, scale, u);
  }
  if (!params_.logprobs) return choice;

  float log_total = 0.0F;  // what turns a logit into a log-probability
  if (!normalized) {
    std::vector<double> sums(maxima.blocks.size());
    log_total = maxima.value + static_cast<float>(std::log(block_weights(logits, maxima.value, 1.0F, sums)));
  }
  choice.logprob = logits[static_cast<std::size_t>(choice.token)] - log_total;
  if (params_.top_logprobs > 0) {
    const auto top = most_likely(logits, maxima, static_cast<std::size_t>(params_.top_logprobs));
    choice.top.reserve(top.size());
    for (const Candidate& candidate : top) choice.top.push_back({candidate.token, candidate.logit - log_total});
  }
  return choice;
}

}  // namespace galley::sample
