// Stand-ins below and beside the serving room, for tests: a Forward that follows a script, a byte-level tokenizer.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "models/forward.h"
#include "serve/engine.h"
#include "text/tokenizer.h"

namespace galley::test {

/// Ids 0 to 255 are bytes; the rest are special.
inline constexpr std::int32_t kBos = 256;
inline constexpr std::int32_t kEos = 257;
inline constexpr std::int32_t kTurnStart = 258;  ///< <|im_start|>
inline constexpr std::int32_t kTurnEnd = 259;    ///< <|im_end|>
inline constexpr int kVocab = 260;

/// One token a byte, so that any character beyond ASCII, and any stop string, is split across tokens. Special tokens:
/// <s>, </s>, <|im_start|>, <|im_end|>. Decoding holds back incomplete UTF-8.
std::shared_ptr<const text::Tokenizer> byte_tokenizer();
std::vector<std::int32_t> bytes_of(std::string_view text);

/// Fills in the logits that follow `history` (prompt and generated tokens so far). Must depend on nothing else.
using Script = std::function<void(std::span<const std::int32_t> history, int prompt_tokens, std::span<float> logits)>;

/// Every prompt is answered with `text`, then end of sequence.
Script say(std::string text);
/// Every prompt is answered with its own words, then end of sequence.
Script echo();
/// A pseudo-random distribution over letters and spaces, from a hash of the whole history; ends with about one token
/// in `mean_length` (0: never).
Script babble(int mean_length = 0);

/// Lets a test decide when steps run. Open at first.
class StepGate {
 public:
  void close();       ///< steps wait from now on
  void allow(int n);  ///< lets n more pass
  void open();
  void pass();  ///< the step's side: waits until it may

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int allowed_ = 0;
};

struct ScriptedOptions {
  models::ForwardTraits traits{.split_forwards = false, .look_ahead = false, .invariant = true, .vocab = kVocab};
  Script script = babble();
  int budget_tokens = 1 << 20;  ///< tokens that rows may reserve together
  int bytes_per_token = 1000;
  int max_rows = 1 << 20;     ///< most rows joined at a time; more is a violation
  int max_prompt_tokens = 0;  ///< most prompt tokens a launch (ragged) or a part (split); 0: any
  std::chrono::microseconds step_time{0};
  /// A message when the row with this history (prompt included) fails in this step.
  std::function<std::optional<std::string>(std::span<const std::int32_t> history, int prompt_tokens)> fault = {};
  bool recovers = false;  ///< from what on_launch throws
  /// Called at every launch, before it does anything; may wait (StepGate) or throw (engine death unless `recovers`).
  std::function<void(const models::StepPlan& plan, int launch)> on_launch = {};
};

/// Deterministic: a row's tokens depend on its own history, sampler and script alone. Checks the contract of
/// models::Forward at every call and throws std::logic_error (which kills the engine) where it is broken.
class ScriptedForward final : public models::Forward {
 public:
  explicit ScriptedForward(ScriptedOptions options) : options_(std::move(options)) {}

  [[nodiscard]] const models::ForwardTraits& traits() const override { return options_.traits; }
  [[nodiscard]] models::KvUsage kv() const override;
  [[nodiscard]] std::size_t bytes_for(int tokens) const override;
  [[nodiscard]] int max_row_tokens() const override { return options_.budget_tokens; }
  [[nodiscard]] bool can_join(const models::RowSpec& spec) const override;
  models::RowId join(const models::RowSpec& spec) override;
  void leave(models::RowId row) override;
  void launch(const models::StepPlan& plan) override;
  [[nodiscard]] int in_flight() const override { return static_cast<int>(steps_.size()); }
  std::vector<models::Emission> collect() override;
  bool recover() override;

  // What tests look at, once the engine is quiet.
  [[nodiscard]] int launches() const { return launches_; }
  [[nodiscard]] int joins() const { return joins_; }
  [[nodiscard]] int rows() const { return static_cast<int>(rows_.size()); }
  [[nodiscard]] int peak_rows() const { return peak_rows_; }
  [[nodiscard]] int peak_reserved_tokens() const { return peak_reserved_; }
  [[nodiscard]] int dropped() const { return dropped_; }  ///< emissions of rows that had left

 private:
  struct Row {
    models::RowSpec spec;
    std::vector<std::int32_t> history;
    int generated = 0;
    bool failed = false;
  };
  struct Step {
    std::vector<models::Emission> emissions;
    std::vector<sample::RowSampler*> samplers;  ///< borrowed by the step until it has been collected
  };
  void check_plan(const models::StepPlan& plan) const;
  Row& row(models::RowId id);
  void sample(models::RowId id, Step& step);

  ScriptedOptions options_;
  std::unordered_map<models::RowId, Row> rows_;
  std::deque<Step> steps_;
  models::RowId next_id_ = 0;
  int reserved_ = 0;
  int launches_ = 0, joins_ = 0, peak_rows_ = 0, peak_reserved_ = 0, dropped_ = 0;
};

/// Keeps what a row hears; waiting is possible from any thread.
class RecordingSink final : public serve::EventSink {
 public:
  void push(serve::TokenEvent event) noexcept override;

  /// Waits for the last event. False: it did not come in time.
  bool wait(std::chrono::milliseconds timeout = std::chrono::seconds(20));
  /// Waits until at least `n` events have come, or the last one.
  bool wait_events(std::size_t n, std::chrono::milliseconds timeout = std::chrono::seconds(20));

  // A copy of the state at the time of the call.
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::vector<serve::TokenEvent> events() const;
  [[nodiscard]] std::optional<serve::FinishReason> finish() const;
  [[nodiscard]] std::optional<Error> error() const;
  [[nodiscard]] serve::Usage usage() const;
  [[nodiscard]] int last_events() const;  ///< events with finish or error: one, when all is right

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<serve::TokenEvent> events_;
  int last_events_ = 0;
};

/// An engine over one ScriptedForward that serves both lanes. `forward`, when given, receives it.
std::unique_ptr<serve::Engine> scripted_engine(const serve::EngineOptions& engine, const ScriptedOptions& options,
                                               std::shared_ptr<ScriptedForward>* forward = nullptr);

}  // namespace galley::test
