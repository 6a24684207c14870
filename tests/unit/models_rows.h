// Rows driven through a forward as the scheduler drives them, and all that they say: for tests of invariance.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "models/forward.h"

namespace galley::testing {

/// What a row said: tokens, and the bits of every log-probability it reported.
struct Said {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint32_t> bits;
  friend bool operator==(const Said&, const Said&) = default;
};

struct Script {
  std::vector<std::int32_t> prompt;
  sample::Params params;
  int tokens = 0;
  int arrival = 0;  ///< step at which it joins
};

/// Drives rows through ragged steps as the scheduler does: joins at their arrival, prompts in chunks beside decodes.
inline std::vector<Said> run(models::Forward& forward, const std::vector<Script>& scripts, int chunk) {
  struct State {
    models::RowId row = -1;
    std::size_t fed = 0;
    std::unique_ptr<sample::RowSampler> sampler;
    bool done = false;
  };
  std::vector<State> states(scripts.size());
  std::vector<Said> said(scripts.size());
  for (int step = 0;; ++step) {
    models::StepPlan plan;
    std::map<models::RowId, std::size_t> who;
    bool waiting = false;
    for (std::size_t i = 0; i < scripts.size(); ++i) {
      State& s = states[i];
      if (s.done) continue;
      if (scripts[i].arrival > step) {
        waiting = true;
        continue;
      }
      if (s.row < 0) {
        s.sampler = std::make_unique<sample::RowSampler>(scripts[i].params);
        s.row = forward.join({static_cast<int>(scripts[i].prompt.size()), scripts[i].tokens, s.sampler.get()});
      }
      who[s.row] = i;
      if (s.fed == scripts[i].prompt.size()) {
        plan.decode.push_back(s.row);
        continue;
      }
      const std::size_t n = std::min(scripts[i].prompt.size() - s.fed, static_cast<std::size_t>(chunk));
      plan.prompt.push_back(
          {s.row, std::span(scripts[i].prompt).subspan(s.fed, n), s.fed + n == scripts[i].prompt.size()});
      s.fed += n;
    }
    if (who.empty()) {
      if (!waiting) return said;
      continue;
    }
    forward.launch(plan);
    for (const models::Emission& e : forward.collect()) {
      const std::size_t i = who.at(e.row);
      EXPECT_FALSE(e.fault.has_value());
      said[i].tokens.push_back(e.choice.token);
      said[i].bits.push_back(std::bit_cast<std::uint32_t>(e.choice.logprob));
      for (const auto& top : e.choice.top) {
        said[i].bits.push_back(static_cast<std::uint32_t>(top.token));
        said[i].bits.push_back(std::bit_cast<std::uint32_t>(top.logprob));
      }
      if (static_cast<int>(said[i].tokens.size()) == scripts[i].tokens) {
        forward.leave(e.row);
        states[i].done = true;
      }
    }
  }
}

inline sample::Params greedy_with_logprobs() {
  sample::Params params;
  params.logprobs = true;
  params.top_logprobs = 5;
  return params;
}

inline sample::Params seeded(std::uint64_t seed) {
  sample::Params params = greedy_with_logprobs();
  params.temperature = 0.9F;
  params.top_p = 0.95F;
  params.top_k = 40;
  params.seed = seed;
  return params;
}

}  // namespace galley::testing
