#include "serve/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace galley::serve {

Scheduler::Scheduler(models::Forward& forward, const SchedulerOptions& options, Tally* tally)
    : forward_(&forward),
      options_(options),
      batch_(forward, tally),
      pace_(options.prefill_stretch, static_cast<std::size_t>(std::max(options.prefill_step, 1))) {
  options_.batch = std::max(options_.batch, 1);
  options_.prefill_step = std::max(options_.prefill_step, 1);
  options_.prompt_concurrency = std::clamp(options_.prompt_concurrency, 1, options_.batch);
  if (options_.max_rows <= 0) options_.max_rows = options_.batch;
}

void Scheduler::tick() {
  drop_cancelled();
  try {
    if (forward_->traits().split_forwards) {
      tick_split();
    } else {
      tick_ragged();
    }
  } catch (const std::exception& exception) {
    if (!forward_->recover()) throw;
    rerun_alone(exception);
  }
}

void Scheduler::rerun_alone(const std::exception& exception) {
  std::vector<std::unique_ptr<Row>> rows = batch_.take_all();
  if (rows.size() == 1 && rows.front()->arrival <= alone_until_) {
    rows.front()->fail(Error(500, std::string("generation failed for this request: ") + exception.what(), "row_fault"));
    return;
  }
  for (std::unique_ptr<Row>& row : rows) {
    alone_until_ = std::max(alone_until_, row->arrival);
    requeue(std::move(row));
  }
}

void Scheduler::requeue(std::unique_ptr<Row> row) {
  const auto place = std::ranges::find_if(queue_, [&](const auto& other) { return other->arrival > row->arrival; });
  queue_.insert(place, std::move(row));
}

void Scheduler::enqueue(std::unique_ptr<Row> row) {
  row->arrival = ++arrivals_;
  queue_.push_back(std::move(row));
}

void Scheduler::tick_ragged() {
  // Running rows come first: only what they leave is there for those that wait.
  models::StepPlan plan = plan_decode();
  admit(options_.max_rows - batch_.rows());
  batch_.add_shared_prompts(plan, pace_.budget(plan.decode.size(), static_cast<std::size_t>(batch_.prefilling())));
  const auto start = std::chrono::steady_clock::now();
  const bool launched = batch_.launch(plan);
  const bool look_ahead = forward_->traits().look_ahead;
  batch_.collect(launched && look_ahead ? 1 : 0);
  if (!launched || look_ahead) return;
  std::size_t prompt_tokens = 0;
  for (const models::PromptPart& part : plan.prompt) prompt_tokens += part.tokens.size();
  pace_.note(plan.decode.size(), prompt_tokens, std::chrono::steady_clock::now() - start);
}

/// A step of all decoding rows, after those had to go for which there is no KV.
models::StepPlan Scheduler::plan_decode() {
  for (;;) {
    models::StepPlan plan;
    batch_.add_decode(plan, /*all=*/false);
    if (forward_->fits(plan)) return plan;
    requeue(batch_.preempt_youngest());
  }
}

void Scheduler::tick_split() {
  const bool look_ahead = forward_->traits().look_ahead;
  models::StepPlan decode;
  batch_.add_decode(decode, /*all=*/look_ahead);  // as in mlx-lm, a row rides on until its end has been seen
  const bool launched = batch_.launch(decode);
  batch_.collect(launched && look_ahead ? 1 : 0);
  if (batch_.decoding() >= options_.batch) return;

  admit(std::min(options_.batch - batch_.decoding(), options_.max_rows - batch_.rows()));
  models::StepPlan prompts;
  batch_.add_split_prompts(prompts, static_cast<std::size_t>(options_.prefill_step));
  if (batch_.launch(prompts) && !look_ahead) batch_.collect(0);
}

void Scheduler::drop_cancelled() {
  for (auto& row : queue_) {
    if (!row->cancel_requested()) continue;
    row->cancel();
    row.reset();
  }
  std::erase(queue_, nullptr);
  batch_.drop_cancelled();
}

void Scheduler::admit(int limit) {
  limit = std::min(limit, options_.prompt_concurrency - batch_.prefilling());
  for (; limit > 0 && !queue_.empty(); --limit) {
    // The head waits for memory, and everyone behind it: first come, first served. When nothing else holds any, waiting
    // is no use: join() then says why it can't be.
    const bool alone = batch_.rows() == 0 && forward_->in_flight() == 0;
    if (!alone && (queue_.front()->arrival <= alone_until_ || batch_.any_arrived_by(alone_until_))) return;
    if (!alone && !forward_->can_join(queue_.front()->spec())) return;
    std::unique_ptr<Row> row = std::move(queue_.front());
    queue_.pop_front();
    ++admitted_;
    batch_.join(std::move(row));
    peak_ = std::max(peak_, batch_.rows());
  }
}

void Scheduler::abandon(const Error& error) {
  for (auto& row : queue_) row->fail(error);
  queue_.clear();
  batch_.abandon(error);
}

void Scheduler::stop(const Error& error) {
  for (auto& row : queue_) row->fail(error);
  queue_.clear();
  batch_.stop(error);
}

}  // namespace galley::serve
