#include "serve/prefill_pace.h"

#include <algorithm>

namespace galley::serve {
namespace {

constexpr std::size_t kLeast = 1;   // the weights are read for the running rows anyway
constexpr std::size_t kFirst = 32;  // until a token's time is known
constexpr int kRefresh = 50;        // steps with prompts after which one without shows anew what that takes
// Weights of the latest step: times change with the context and the neighbours. Steps without prompts are rare.
constexpr double kNewsDecode = 0.5, kNewsToken = 0.25;

void learn(double& value, double news, double weight) { value = value == 0 ? news : value + weight * (news - value); }

}  // namespace

std::size_t PrefillPace::budget(std::size_t decoding, std::size_t prompts) const {
  if (decoding == 0 || stretch_ <= 1) return most_;
  const double step = decode_seconds(decoding);
  if (step == 0 || with_prompts_ >= kRefresh) return 0;
  if (per_token_ == 0) return std::min(kFirst, most_);
  const double share = static_cast<double>(std::max<std::size_t>(prompts, 1)) / static_cast<double>(decoding);
  const double seconds = (stretch_ - 1) * step * std::max(1.0, share);
  const double tokens = std::min(seconds / per_token_, static_cast<double>(most_));
  return std::min(most_, std::max(kLeast, static_cast<std::size_t>(tokens)));
}

void PrefillPace::note(std::size_t decoding, std::size_t prompt_tokens, Duration taken) {
  if (decoding == 0) return;  // a step without running rows holds nobody up, and is cheaper by the token
  if (prompt_tokens == 0) {
    if (decode_.size() <= decoding) decode_.resize(decoding + 1, 0);
    learn(decode_[decoding], taken.count(), kNewsDecode);
    with_prompts_ = 0;
    return;
  }
  ++with_prompts_;
  if (const double step = decode_seconds(decoding); step > 0) {
    const double rest = std::max(taken.count() - step, 0.01 * taken.count());
    learn(per_token_, rest / static_cast<double>(prompt_tokens), kNewsToken);
  }
}

/// Of as many rows, or else of the nearest number below, or above.
double PrefillPace::decode_seconds(std::size_t rows) const {
  for (std::size_t n = std::min(rows + 1, decode_.size()); n-- > 0;) {
    if (decode_[n] > 0) return decode_[n];
  }
  const auto above = std::ranges::find_if(decode_, [](double seconds) { return seconds > 0; });
  return above == decode_.end() ? 0 : *above;
}

}  // namespace galley::serve
