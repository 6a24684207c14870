// A request's life on the engine thread: queued, prefilling, decoding, finished.
//
// A Row owns all that belongs to the request alone (prompt, sampler, incremental decoder, stop matcher, event sink) and
// knows nothing of the rows around it. Whatever ends it, it sends exactly one last event.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/forward.h"
#include "serve/engine.h"
#include "serve/request.h"
#include "text/tokenizer.h"

namespace galley::serve {

/// Counters that rows and steps add to. Written by the engine thread only; `live` is also read by submit().
struct Tally {
  std::uint64_t finished = 0, cancelled = 0, failed = 0;
  std::uint64_t prompt_tokens = 0;      ///< fed to the forward
  std::uint64_t completion_tokens = 0;  ///< taken from it
  std::uint64_t steps = 0;              ///< launches
  std::uint64_t preempted = 0;          ///< times a row had to make room
  std::atomic<int> live{0};             ///< requests accepted and not yet ended
};

/// What all rows of an engine share; outlives them.
struct RowContext {
  const text::Tokenizer* tokenizer = nullptr;  ///< null: tokens only, no text (parity runs)
  std::span<const std::int32_t> end_ids;       ///< end of generation
  Tally* tally = nullptr;                      ///< may be null
  /// Told of every row that fails through no fault of its client; null: nobody is.
  const std::function<void(const std::string&)>* on_fault = nullptr;
};

class Row {
 public:
  enum class State { queued, prefilling, decoding, finished };

  /// `sink` and `ticket` may be null.
  Row(const RowContext& context, GenerationRequest request, std::shared_ptr<EventSink> sink,
      std::shared_ptr<Ticket> ticket);
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  ~Row() = default;

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool finished() const { return state_ == State::finished; }
  [[nodiscard]] bool cancel_requested() const { return ticket_ && ticket_->cancelled(); }
  /// Without its prompt, which the row keeps elsewhere.
  [[nodiscard]] const GenerationRequest& request() const { return request_; }
  [[nodiscard]] const Usage& usage() const { return usage_; }
  [[nodiscard]] models::RowId id() const { return id_; }

  /// What the row needs of a Forward. The sampler in it lives as long as the row.
  [[nodiscard]] models::RowSpec spec();
  /// The row has joined a Forward under this id and begins to prefill.
  void joined(models::RowId id);
  /// The row has left its Forward, or that has forgotten it, to join one again later, where it goes on as if nothing
  /// had happened: what it has said is fed again after the prompt, never sampled again; sampler, decoder and stop
  /// matcher stay as they are.
  void preempt();
  /// Its place among all rows of a Scheduler.
  std::uint64_t arrival = 0;

  /// Tokens of the prompt, and of what was said before a preemption, not yet handed to a step.
  [[nodiscard]] std::size_t prompt_left() const { return input_.size() - fed_; }
  /// The next `tokens` of the prompt are in the KV already.
  void skip(std::size_t tokens);
  /// The next `tokens` of the prompt as a part of a plan.
  [[nodiscard]] models::PromptPart next(std::size_t tokens, bool emits) const {
    return {id_, std::span<const std::int32_t>(input_).subspan(fed_, tokens), emits};
  }
  /// The same, and they are fed with that; when the part emits, the row decodes from now on.
  models::PromptPart feed(std::size_t tokens, bool emits);

  /// A step that samples a token for this row has been launched.
  void note_launch() { ++sampling_; }
  /// Whether a further step would sample a token that max_tokens still allows.
  [[nodiscard]] bool wants_decode() const {
    return !finished() && usage_.completion_tokens + sampling_ < request_.max_tokens;
  }

  /// Takes what a step yielded: text, stop strings, end of generation, length, a fault of the row. May finish it. What
  /// goes wrong here ends this row and no other.
  void take(models::Emission emission) noexcept;

  /// Ends the row with an event; nothing happens when it has ended already.
  void cancel();
  void fail(Error error);

  /// Called with every token taken, end-of-generation tokens included. For tests and parity runs.
  void observe(std::function<void(const sample::Choice&)> observer) { observer_ = std::move(observer); }

 private:
  struct HeldToken {
    TokenInfo info;
    std::size_t begin = 0, end = 0;  ///< its bytes in the decoded text
  };
  void take_emission(models::Emission emission);
  void take_token(sample::Choice choice);
  bool is_end(std::int32_t token) const;
  void hold(sample::Choice choice, std::size_t text_bytes);
  /// Tokens whose text has been released; at the end of the answer also one that released text ends within.
  std::vector<TokenInfo> release_tokens(bool last);
  void send(std::string text);
  void finish(FinishReason reason, std::string text);
  void end(TokenEvent event, std::uint64_t Tally::*counter);

  const RowContext* context_;
  GenerationRequest request_;
  std::shared_ptr<EventSink> sink_;
  std::shared_ptr<Ticket> ticket_;
  sample::RowSampler sampler_;
  std::unique_ptr<text::StreamDecoder> decoder_;
  text::StopMatcher matcher_;
  std::function<void(const sample::Choice&)> observer_;

  State state_ = State::queued;
  models::RowId id_ = -1;
  std::vector<std::int32_t> input_;  ///< what is to be fed: the prompt; after a preemption also what was said
  std::vector<std::int32_t> said_;   ///< tokens taken since; those before are in input_
  bool preempted_ = false;
  std::size_t fed_ = 0;  ///< of input_, handed to steps
  int sampling_ = 0;     ///< tokens launched and not yet taken
  Usage usage_;
  std::deque<HeldToken> held_;  ///< tokens whose text is still held back; only with logprobs
  std::size_t decoded_ = 0;     ///< bytes out of the decoder
  std::size_t released_ = 0;    ///< of these, bytes sent
};

}  // namespace galley::serve
