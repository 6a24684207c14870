// How a row picks its next token from its logits.
//
// Every row owns one RowSampler: parameters, and a counter-based random stream (Philox4x32-10, Salmon et al. 2011,
// "Parallel random numbers: as easy as 1, 2, 3") keyed by the row's seed. Draw number i depends on (seed, i) alone, so
// neither the batch around the row nor a preemption can change what it samples.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace galley::sample {

/// What a request asks for. The neutral values leave the distribution as it is.
struct Params {
  float temperature = 0.0F;                          ///< 0: greedy (arg-max, first of equals).
  int top_k = 0;                                     ///< 0: off.
  float top_p = 1.0F;                                ///< 1: off. Keeps the smallest set whose mass reaches top_p.
  float min_p = 0.0F;                                ///< 0: off. Relative to the most likely token.
  std::optional<std::uint64_t> seed = std::nullopt;  ///< absent: a fresh one is drawn from the system.
  bool logprobs = false;                             ///< report the chosen token's log-probability
  int top_logprobs = 0;                              ///< and this many alternatives, most likely first

  [[nodiscard]] bool greedy() const { return temperature <= 0.0F || top_k == 1; }
};

struct TokenLogprob {
  std::int32_t token = 0;
  float logprob = 0.0F;
};

/// One draw. Log-probabilities are those of the model's distribution (before temperature and truncation).
struct Choice {
  std::int32_t token = 0;
  float logprob = 0.0F;           ///< set when Params::logprobs
  std::vector<TokenLogprob> top;  ///< Params::top_logprobs entries, descending; ties by token id
  bool finite = true;             ///< false: the logits held no finite maximum; the row is faulty
};

class RowSampler {
 public:
  explicit RowSampler(const Params& params);

  [[nodiscard]] const Params& params() const { return params_; }
  /// True when only the arg-max matters, so that a kernel may fuse it and never write the logits.
  [[nodiscard]] bool argmax_only() const { return params_.greedy() && !params_.logprobs; }
  /// Number of draws taken so far; also the position in the random stream.
  [[nodiscard]] std::uint64_t draws() const { return draws_; }
  [[nodiscard]] std::uint64_t seed() const { return seed_; }

  /// Picks the next token. `logits` is one row [vocab]; when `normalized` they are already log-probabilities and are
  /// reported as they are. Deterministic in (logits, params, seed, draws); advances the stream by one draw.
  Choice choose(std::span<const float> logits, bool normalized = false);
  /// Takes note of a token that a fused arg-max chose.
  void note_argmax() { ++draws_; }

 private:
  Params params_;
  std::uint64_t seed_ = 0;
  std::uint64_t draws_ = 0;
};

}  // namespace galley::sample
