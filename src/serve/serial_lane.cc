#include "serve/serial_lane.h"

#include <algorithm>
#include <utility>

namespace galley::serve {

SerialLane::SerialLane(models::Forward& forward, int prefill_step, Tally* tally)
    : forward_(&forward), prefill_step_(static_cast<std::size_t>(std::max(prefill_step, 1))), tally_(tally) {}

void SerialLane::start(std::unique_ptr<Row> row) {
  try {
    row->joined(forward_->join(row->spec()));
  } catch (const Error& error) {
    row->fail(error);
    return;
  }
  row_ = std::move(row);
}

void SerialLane::step() {
  if (!busy()) return;
  try {
    advance();
  } catch (const std::exception& exception) {
    if (!forward_->recover()) throw;
    row_->fail(Error(500, std::string("generation failed for this request: ") + exception.what(), "row_fault"));
    row_.reset();
  }
}

void SerialLane::advance() {
  if (row_->cancel_requested()) row_->cancel();
  if (!row_->finished()) {
    if (row_->state() == Row::State::prefilling) {
      prefill();
    } else {
      const bool more = row_->wants_decode();
      if (more) {
        row_->note_launch();
        launch({{row_->id()}, {}});
      }
      collect(more && forward_->traits().look_ahead ? 1 : 0);
    }
  }
  if (row_->finished()) release();
}

void SerialLane::prefill() {
  const models::ForwardTraits& traits = forward_->traits();
  row_->skip(forward_->reuse(row_->id()).tokens);
  const std::size_t left = row_->prompt_left();
  std::size_t tokens = std::min(left, prefill_step_);
  if (traits.split_forwards && left > 1) tokens = std::min(left - 1, prefill_step_);
  const bool emits = tokens == left;
  models::StepPlan plan;
  plan.prompt.push_back(row_->feed(tokens, emits));
  launch(plan);
  collect(emits && traits.look_ahead ? 1 : 0);
}

void SerialLane::launch(const models::StepPlan& plan) {
  forward_->launch(plan);
  if (tally_ != nullptr) ++tally_->steps;
}

void SerialLane::collect(int in_flight) {
  while (forward_->in_flight() > in_flight) {
    for (models::Emission& emission : forward_->collect()) row_->take(std::move(emission));
  }
}

void SerialLane::release() {
  forward_->leave(row_->id());
  while (forward_->in_flight() > 0) forward_->collect();  // a step it rode in borrows its sampler
  row_.reset();
}

void SerialLane::abandon(const Error& error) {
  if (row_) row_->fail(error);
}

void SerialLane::stop(const Error& error) {
  if (!row_) return;
  row_->fail(error);
  release();
}

}  // namespace galley::serve
