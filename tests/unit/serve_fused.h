// A scheduler over a real fused forward of a tiny model, for tests of what rows do to each other.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory_checkpoint.h"
#include "models/fused_forward.h"
#include "models/model.h"
#include "ops/fused/fused_ops.h"
#include "serve/scheduler.h"

namespace galley::testing {

using Tokens = std::vector<std::int32_t>;

constexpr std::size_t kBudget = 4'000'000;

using KvFormats = std::vector<ops::KvFormat>;

/// For the two layers of the tiny model.
inline KvFormats mixed_kv() { return {{4, 64}, {8, 32}}; }

inline std::unique_ptr<models::FusedForward> make_forward_of(const models::Config& config,
                                                             models::FusedForwardOptions options) {
  MemoryCheckpoint checkpoint(config);
  auto ops = std::make_shared<ops::FusedOps>(kernels::select_isa("best"), 2);
  std::shared_ptr<const models::Model> model = models::load_model(checkpoint, *ops);
  return std::make_unique<models::FusedForward>(std::move(ops), std::move(model), std::move(options));
}

/// `kv`: of each layer, whose heads are then wide enough for groups; empty: nothing is quantized.
inline std::unique_ptr<models::FusedForward> make_forward(std::size_t budget = kBudget,
                                                          std::optional<std::size_t> prompt_cache = std::nullopt,
                                                          int contiguous_tokens = 0, const KvFormats& kv = {}) {
  models::Config config = MemoryCheckpoint::tiny_llama();
  config.head_dim = kv.empty() ? 16 : 64;
  return make_forward_of(config, {budget, kernels::KvElement::f16, prompt_cache, contiguous_tokens, std::nullopt, kv,
                                  /*prefill_step=*/256});
}

/// Six layers, of which every third sees the whole text and the others 40 tokens of it. A text block is one unit, its
/// window block two.
inline models::Config sliding_config(const KvFormats& kv = {}) {
  models::Config config = MemoryCheckpoint::tiny_llama();
  config.family = "gemma3";
  config.layers = 6;
  config.head_dim = kv.empty() ? 16 : 64;
  config.context = 2048;
  config.norm_eps = 1e-6F;
  config.query_scalar = 16.0F;
  config.sliding = {.window = 40, .pattern = 3, .rope_base = 1e4F};
  return config;
}
constexpr std::size_t kSlidingUnit = std::size_t{2} * 2 * 2 * 16 * 32 * 2;  ///< two layers' keys and values, f16

inline std::unique_ptr<models::FusedForward> make_sliding(std::size_t budget = kBudget,
                                                          std::optional<std::size_t> prompt_cache = std::nullopt,
                                                          std::optional<kv::PrefixStore> store = std::nullopt,
                                                          const KvFormats& kv = {}) {
  return make_forward_of(sliding_config(kv), {budget, kernels::KvElement::f16, prompt_cache, 0, std::move(store), kv,
                                              /*prefill_step=*/64});
}

inline Tokens text(int length, int salt) {
  Tokens tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((i * 31 + salt * 7 + i / 9) % 96);
  return tokens;
}
inline Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Answer {
  Tokens tokens;
  std::vector<std::uint32_t> bits;
  serve::Usage usage;
  bool ended = false;
  [[nodiscard]] bool says(const Answer& other) const { return tokens == other.tokens && bits == other.bits; }
};

class Sink final : public serve::EventSink {
 public:
  explicit Sink(Answer& answer) : answer_(&answer) {}
  void push(serve::TokenEvent event) noexcept override {
    EXPECT_FALSE(event.error) << event.error->what();
    answer_->usage = event.usage;
    answer_->ended = event.finish.has_value();
  }

 private:
  Answer* answer_;
};

/// A scheduler over a forward; answers by number.
struct Server {
  explicit Server(models::FusedForward& f, int batch = 8, int prefill_step = 64)
      : forward(&f), scheduler(f, {batch, batch, prefill_step, 0}, &tally), context{nullptr, {}, &tally} {}

  std::size_t ask(Tokens prompt, int max_tokens, std::shared_ptr<serve::Ticket> ticket = nullptr,
                  std::optional<std::uint64_t> seed = std::nullopt) {
    answers.push_back(std::make_unique<Answer>());
    Answer& answer = *answers.back();
    serve::GenerationRequest request;
    request.prompt = std::move(prompt);
    request.max_tokens = max_tokens;
    request.sampling.logprobs = true;
    if (seed) {
      request.sampling.seed = seed;
      request.sampling.temperature = 0.9F;
    }
    auto row = std::make_unique<serve::Row>(context, std::move(request), std::make_shared<Sink>(answer), ticket);
    row->observe([&answer](const sample::Choice& choice) {
      answer.tokens.push_back(choice.token);
      answer.bits.push_back(std::bit_cast<std::uint32_t>(choice.logprob));
    });
    scheduler.enqueue(std::move(row));
    return answers.size() - 1;
  }
  void run() {
    while (!scheduler.idle()) scheduler.tick();
  }

  models::FusedForward* forward;
  serve::Tally tally;
  serve::Scheduler scheduler;
  serve::RowContext context;
  std::vector<std::unique_ptr<Answer>> answers;
};

/// What a forward that keeps no cache answers to one request.
inline Answer alone_on(models::FusedForward& forward, const Tokens& prompt, int max_tokens,
                       std::optional<std::uint64_t> seed = std::nullopt) {
  Server server(forward);
  server.ask(prompt, max_tokens, nullptr, seed);
  server.run();
  EXPECT_EQ(forward.kv().cached_bytes, 0U);
  return *server.answers.front();
}

inline Answer alone(const Tokens& prompt, int max_tokens, std::optional<std::uint64_t> seed = std::nullopt,
                    const KvFormats& kv = {}) {
  return alone_on(*make_forward(kBudget, 0, 0, kv), prompt, max_tokens, seed);
}

/// Eight rows, every other one seeded, in a budget that holds some of them: rows make room for others, and answer as
/// `alone(prompt, tokens, seed)` does. Row i's prompt is `longer` tokens longer than the one's before; it says `most` -
/// 5 i.
template <class Alone>
void expect_that_preemption_changes_nothing(models::FusedForward& forward, std::size_t budget, int longer, int most,
                                            const Alone& alone) {
  Server server(forward);
  struct Asked {
    Tokens prompt;
    int tokens;
    std::optional<std::uint64_t> seed;
  };
  std::vector<Asked> asked;
  std::size_t tokens = 0;
  for (int i = 0; i < 8; ++i) {
    asked.push_back({text(20 + longer * i, 3 + i), most - 5 * i,
                     i % 2 == 0 ? std::nullopt : std::optional<std::uint64_t>(100 + i)});
    server.ask(asked.back().prompt, asked.back().tokens, nullptr, asked.back().seed);
    tokens += static_cast<std::size_t>(asked.back().tokens);
  }
  int together = 0;
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    together = std::max(together, server.scheduler.active());
    ASSERT_LE(forward.kv().used_bytes + forward.kv().cached_bytes, budget);
    ASSERT_LE(forward.kv().reserved_bytes, budget);
  }
  EXPECT_GT(server.tally.preempted, 0U);
  EXPECT_GT(together, 2) << "rows are admitted by what they need now";
  EXPECT_EQ(server.tally.completion_tokens, tokens) << "nothing is sampled twice";
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const Answer& answer = *server.answers[i];
    EXPECT_TRUE(answer.says(alone(asked[i].prompt, asked[i].tokens, asked[i].seed))) << i;
    EXPECT_EQ(answer.usage.prompt_tokens, static_cast<int>(asked[i].prompt.size()));
    EXPECT_EQ(answer.usage.completion_tokens, asked[i].tokens);
  }
  EXPECT_EQ(forward.kv().used_bytes, 0U);
  EXPECT_EQ(forward.kv().reserved_bytes, 0U);
}

}  // namespace galley::testing
