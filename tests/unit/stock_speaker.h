// A tiny model for the stock forwards, and rows with a prompt cache driven through one as the lanes drive them.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "memory_checkpoint.h"
#include "models/stock_forward.h"

namespace galley::testing {

constexpr std::size_t kPlenty = 1U << 30;

inline std::shared_ptr<models::StockModel> tiny_stock_model() {
  static const auto model = models::load_stock_model(MemoryCheckpoint(MemoryCheckpoint::tiny_llama()));
  return model;
}

struct Speaker {
  Speaker(std::vector<std::int32_t> its_prompt, int its_tokens, sample::Params params = {})
      : prompt(std::move(its_prompt)), tokens(its_tokens), sampler(params) {}

  std::vector<std::int32_t> prompt;
  int tokens;
  sample::RowSampler sampler;
  std::vector<std::int32_t> said = {};
  std::size_t reused = 0;
  models::RowId id = -1;

  /// Prompt and answer.
  [[nodiscard]] std::vector<std::int32_t> text() const {
    std::vector<std::int32_t> all = prompt;
    all.insert(all.end(), said.begin(), said.end());
    return all;
  }
  void speak(models::Forward& forward, bool batched);
};

/// Prompts in one piece and the last token; then steps for all of them until each has said its tokens. On the batched
/// lane a row rides on in the step launched before its end is seen; on the serial one there is no such step.
inline void speak_together(models::Forward& forward, const std::vector<Speaker*>& speakers, bool batched) {
  models::StepPlan pieces, last;
  for (Speaker* speaker : speakers) {
    const std::vector<std::int32_t>& prompt = speaker->prompt;
    speaker->id = forward.join({static_cast<int>(prompt.size()), speaker->tokens, &speaker->sampler, speaker->prompt});
    speaker->reused = forward.reuse(speaker->id).tokens;
    const auto rest = std::span(prompt).subspan(speaker->reused);
    if (rest.size() > 1) pieces.prompt.push_back({speaker->id, rest.first(rest.size() - 1), false});
    last.prompt.push_back({speaker->id, rest.last(1), true});
  }
  const auto collect = [&](int in_flight) {
    while (forward.in_flight() > in_flight) {
      for (models::Emission& emission : forward.collect()) {
        for (Speaker* speaker : speakers) {
          if (speaker->id == emission.row) speaker->said.push_back(emission.choice.token);
        }
      }
    }
  };
  if (!pieces.prompt.empty()) forward.launch(pieces);
  collect(0);
  forward.launch(last);
  std::vector<Speaker*> speaking = speakers;
  while (!speaking.empty()) {
    models::StepPlan step;
    for (const Speaker* speaker : speaking) {
      const auto launched = static_cast<int>(speaker->said.size()) + forward.in_flight();
      if (batched || launched < speaker->tokens) step.decode.push_back(speaker->id);
    }
    if (!step.decode.empty()) forward.launch(step);
    collect(step.decode.empty() ? 0 : 1);
    std::erase_if(speaking, [&](Speaker* speaker) {
      if (static_cast<int>(speaker->said.size()) < speaker->tokens) return false;
      forward.leave(speaker->id);
      return true;
    });
  }
  collect(0);
}

inline void Speaker::speak(models::Forward& forward, bool batched) { speak_together(forward, {this}, batched); }

}  // namespace galley::testing
