// Which tokens may be drawn: top_p, min_p and top_k as mlx-lm 0.32.2 applies them.
//
// All three look at the model's own distribution, before temperature, and each keeps the upper end of it by value. So
// whatever the order (mlx-lm's is top_p, min_p, top_k), their combination is an upper end too, found here by partial
// selection and never by sorting the vocabulary.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "sample/logits_math.h"
#include "sample/sampler.h"

namespace galley::sample {

struct Candidate {
  std::int32_t token = 0;
  float logit = 0.0F;
};

/// More likely first; of equals the lower token id.
[[nodiscard]] constexpr bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

/// Whether these parameters exclude any token of a vocabulary of this size.
[[nodiscard]] bool truncates(const Params& params, std::size_t vocab);

/// The `count` most likely tokens, most likely first.
[[nodiscard]] std::vector<Candidate> most_likely(std::span<const float> logits, const Maxima& maxima,
                                                 std::size_t count);

/// The tokens that may be drawn, by ascending token id; never empty when maxima.finite.
///   top_p  keeps a token while the mass of all strictly more likely ones is below top_p (so equals stay together)
///   min_p  keeps a token at least min_p times as likely as the most likely one
///   top_k  keeps exactly the top_k most likely of the rest; of equals at the border the lower ids
[[nodiscard]] std::vector<Candidate> truncate(std::span<const float> logits, const Maxima& maxima,
                                              const Params& params);

}  // namespace galley::sample
