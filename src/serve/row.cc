#include "serve/row.h"

#include <algorithm>
#include <utility>

namespace galley::serve {

Row::Row(const RowContext& context, GenerationRequest request, std::shared_ptr<EventSink> sink,
         std::shared_ptr<Ticket> ticket)
    : context_(&context),
      request_(std::move(request)),
      sink_(std::move(sink)),
      ticket_(std::move(ticket)),
      sampler_(request_.sampling),
      decoder_(context.tokenizer != nullptr ? context.tokenizer->stream() : nullptr),
      matcher_(request_.stop),
      input_(std::move(request_.prompt)) {
  usage_.prompt_tokens = static_cast<int>(input_.size());
}

models::RowSpec Row::spec() {
  return {static_cast<int>(input_.size()), request_.max_tokens - usage_.completion_tokens, &sampler_, input_};
}

void Row::preempt() {
  input_.insert(input_.end(), said_.begin(), said_.end());
  said_.clear();
  preempted_ = true;
  state_ = State::queued;
  id_ = -1;
  fed_ = 0;
  sampling_ = 0;
}

void Row::skip(std::size_t tokens) {
  fed_ += tokens;
  if (!preempted_) usage_.cached_tokens += static_cast<int>(tokens);
}

void Row::joined(models::RowId id) {
  id_ = id;
  state_ = State::prefilling;
}

models::PromptPart Row::feed(std::size_t tokens, bool emits) {
  const models::PromptPart part = next(tokens, emits);
  fed_ += tokens;
  if (context_->tally != nullptr) context_->tally->prompt_tokens += tokens;
  if (emits) {
    state_ = State::decoding;
    note_launch();
  }
  return part;
}

void Row::take(models::Emission emission) noexcept {
  try {
    take_emission(std::move(emission));
  } catch (const std::exception& exception) {  // of the row's own decoder or stop matcher
    fail(Error(500, std::string("generation failed for this request: ") + exception.what(), "row_fault"));
  }
}

void Row::take_emission(models::Emission emission) {
  if (finished()) return;
  --sampling_;
  if (emission.fault) {
    fail(Error(500, "generation failed for this request: " + *emission.fault, "row_fault"));
  } else if (!emission.choice.finite) {
    fail(Error(500, "generation failed for this request: the model's logits are not finite", "non_finite_logits"));
  } else {
    take_token(std::move(emission.choice));
  }
}

bool Row::is_end(std::int32_t token) const {
  return !request_.ignore_eos && std::ranges::find(context_->end_ids, token) != context_->end_ids.end();
}

void Row::take_token(sample::Choice choice) {
  ++usage_.completion_tokens;
  if (context_->tally != nullptr) ++context_->tally->completion_tokens;
  said_.push_back(choice.token);
  if (observer_) observer_(choice);

  const bool ended = is_end(choice.token);
  const bool full = usage_.completion_tokens >= request_.max_tokens;
  std::string piece;
  if (!ended) {
    if (decoder_) piece = decoder_->push(choice.token);
    hold(std::move(choice), piece.size());
  }
  if ((ended || full) && decoder_) {
    const std::string rest = decoder_->flush();
    decoded_ += rest.size();
    if (!held_.empty()) held_.back().end = decoded_;
    piece += rest;
  }

  text::StopMatcher::Result matched = matcher_.push(piece);
  if (matched.stopped) {
    finish(FinishReason::stop, std::move(matched.text));
  } else if (ended || full) {
    matched.text += matcher_.flush();
    finish(ended ? FinishReason::stop : FinishReason::length, std::move(matched.text));
  } else {
    send(std::move(matched.text));
  }
}

void Row::hold(sample::Choice choice, std::size_t text_bytes) {
  const std::size_t begin = decoded_;
  decoded_ += text_bytes;
  if (!request_.sampling.logprobs) return;
  std::string bytes = context_->tokenizer != nullptr ? context_->tokenizer->token_bytes(choice.token) : std::string{};
  held_.push_back({{std::move(choice), std::move(bytes)}, begin, decoded_});
}

std::vector<TokenInfo> Row::release_tokens(bool last) {
  std::vector<TokenInfo> released;
  while (!held_.empty() && (held_.front().end <= released_ || (last && held_.front().begin < released_))) {
    released.push_back(std::move(held_.front().info));
    held_.pop_front();
  }
  return released;
}

void Row::send(std::string text) {
  released_ += text.size();
  TokenEvent event;
  event.tokens = release_tokens(false);
  if (text.empty() && event.tokens.empty()) return;
  event.text = std::move(text);
  event.usage = usage_;
  if (sink_) sink_->push(std::move(event));
}

void Row::finish(FinishReason reason, std::string text) {
  released_ += text.size();
  TokenEvent event;
  event.text = std::move(text);
  event.tokens = release_tokens(true);
  event.finish = reason;
  end(std::move(event), &Tally::finished);
}

void Row::cancel() {
  TokenEvent event;
  event.finish = FinishReason::cancelled;
  end(std::move(event), &Tally::cancelled);
}

void Row::fail(Error error) {
  const auto* told = context_->on_fault;
  if (error.status() == 500 && told != nullptr && *told) (*told)(request_.id + ": " + error.what());
  TokenEvent event;
  event.error = std::move(error);
  end(std::move(event), &Tally::failed);
}

void Row::end(TokenEvent event, std::uint64_t Tally::*counter) {
  if (finished()) return;
  state_ = State::finished;
  event.usage = usage_;
  if (Tally* tally = context_->tally; tally != nullptr) {
    ++(tally->*counter);
    // Before the event: whoever hears of the end and submits the next request finds room for it.
    tally->live.fetch_sub(1, std::memory_order_acq_rel);
  }
  if (sink_) sink_->push(std::move(event));
  sink_.reset();
}

}  // namespace galley::serve
