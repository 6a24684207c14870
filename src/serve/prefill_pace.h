// How many prompt tokens a step may take, so that running streams go on smoothly beside long prompts.
//
// A step's time is taken to be that of its decoding rows alone plus a time for each prompt token; both are learned from
// the steps that were made. Bits do not depend on how prompts are cut (DESIGN 4.2), so the clock may decide.
#pragma once
#include <chrono>
#include <cstddef>
#include <vector>

namespace galley::serve {

/// Engine thread only.
class PrefillPace {
 public:
  using Duration = std::chrono::duration<double>;

  /// `stretch`: with one prompt to prefill, a step takes at most this many times as long as one without. Each further
  /// prompt counts like a row that runs, and has its share of the time; 1 or less: no bound. `most`: tokens a step.
  PrefillPace(double stretch, std::size_t most) : stretch_(stretch), most_(most) {}

  /// Prompt tokens (now and then none) for a step in which `decoding` rows advance and `prompts` wait for theirs.
  [[nodiscard]] std::size_t budget(std::size_t decoding, std::size_t prompts) const;
  /// What a step was and took.
  void note(std::size_t decoding, std::size_t prompt_tokens, Duration taken);

 private:
  [[nodiscard]] double decode_seconds(std::size_t rows) const;

  double stretch_;
  std::size_t most_;
  std::vector<double> decode_;  ///< [rows] seconds of a step of so many rows and no prompt; 0: none was made
  double per_token_ = 0;        ///< seconds a prompt token adds; 0: not known
  int with_prompts_ = 0;        ///< steps since the last of running rows alone
};

}  // namespace galley::serve
