#include "serve/batch.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "serve/prefill_plan.h"

namespace galley::serve {

void Batch::join(std::unique_ptr<Row> row) {
  try {
    row->joined(forward_->join(row->spec()));
  } catch (const Error& error) {
    row->fail(error);
    return;
  }
  prompts_.push_back(std::move(row));
}

void Batch::drop_cancelled() {
  for (auto* rows : {&prompts_, &generating_}) {
    for (auto& row : *rows) {
      if (row->cancel_requested()) row->cancel();
    }
  }
  remove_finished();
}

void Batch::add_decode(models::StepPlan& plan, bool all) const {
  for (const auto& row : generating_) {
    if (all || row->wants_decode()) plan.decode.push_back(row->id());
  }
}

std::unique_ptr<Row> Batch::preempt_youngest() {
  std::unique_ptr<Row>* youngest = nullptr;
  for (auto* rows : {&prompts_, &generating_}) {
    for (auto& row : *rows) {
      if (youngest == nullptr || row->arrival > (*youngest)->arrival) youngest = &row;
    }
  }
  if (youngest == nullptr) throw std::logic_error("no row is left to preempt");
  std::unique_ptr<Row> row = std::move(*youngest);
  for (auto* rows : {&prompts_, &generating_}) std::erase(*rows, nullptr);
  forward_->leave(row->id());
  row->preempt();
  if (tally_ != nullptr) ++tally_->preempted;
  return row;
}

void Batch::add_shared_prompts(models::StepPlan& plan, std::size_t budget) {
  std::vector<Row*> ready;
  std::vector<std::size_t> left;
  for (const auto& row : prompts_) {
    const models::Reuse reuse = forward_->reuse(row->id());
    row->skip(reuse.tokens);
    if (reuse.wait) continue;
    ready.push_back(row.get());
    left.push_back(row->prompt_left());
  }
  const std::vector<std::size_t> shares = share_prefill(left, budget);
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) continue;
    // A prompt has reserved its KV, but part of that may have to be waited for: of what it gave up others may still
    // hold a share. Before the next step rows are preempted if they must be.
    const bool emits = shares[i] == left[i];
    plan.prompt.push_back(ready[i]->next(shares[i], emits));
    if (forward_->fits(plan)) {
      ready[i]->feed(shares[i], emits);
    } else {
      plan.prompt.pop_back();
    }
  }
  begin_decoding();
}

void Batch::add_split_prompts(models::StepPlan& plan, std::size_t step) {
  std::vector<models::PromptPart> pieces;
  for (auto& row : prompts_) {
    row->skip(forward_->reuse(row->id()).tokens);
    const std::size_t left = row->prompt_left();
    if (left == 1) {
      plan.prompt.push_back(row->feed(1, true));
    } else {
      pieces.push_back(row->feed(std::min(left - 1, step), false));
    }
  }
  plan.prompt.insert(plan.prompt.end(), pieces.begin(), pieces.end());
  begin_decoding();
}

void Batch::begin_decoding() {
  for (auto& row : prompts_) {
    if (row->state() == Row::State::decoding) generating_.push_back(std::move(row));
  }
  std::erase(prompts_, nullptr);
}

bool Batch::launch(const models::StepPlan& plan) {
  if (plan.decode.empty() && plan.prompt.empty()) return false;
  for (const models::RowId id : plan.decode) find(id)->note_launch();
  forward_->launch(plan);
  ++launched_;
  if (tally_ != nullptr) ++tally_->steps;
  return true;
}

void Batch::collect(int in_flight) {
  while (forward_->in_flight() > in_flight) {
    std::vector<models::Emission> emissions = forward_->collect();
    ++collected_;
    for (models::Emission& emission : emissions) {
      if (Row* row = find(emission.row)) row->take(std::move(emission));
    }
    remove_finished();
    while (!departed_.empty() && departed_.front().launched <= collected_) departed_.pop_front();
  }
}

Row* Batch::find(models::RowId id) const {
  for (const auto* rows : {&generating_, &prompts_}) {
    const auto found = std::ranges::find_if(*rows, [id](const auto& row) { return row->id() == id; });
    if (found != rows->end()) return found->get();
  }
  return nullptr;
}

void Batch::remove_finished() {
  for (auto* rows : {&prompts_, &generating_}) {
    for (auto& row : *rows) {
      if (row->finished()) leave(std::move(row));
    }
    std::erase(*rows, nullptr);
  }
}

void Batch::leave(std::unique_ptr<Row> row) {
  forward_->leave(row->id());
  if (launched_ > collected_) departed_.push_back({launched_, std::move(row)});
}

std::vector<std::unique_ptr<Row>> Batch::take_all() {
  std::vector<std::unique_ptr<Row>> all;
  for (auto* rows : {&prompts_, &generating_}) {
    for (auto& row : *rows) {
      row->preempt();
      all.push_back(std::move(row));
    }
    rows->clear();
  }
  departed_.clear();
  collected_ = launched_;
  return all;
}

bool Batch::any_arrived_by(std::uint64_t arrival) const {
  const auto by_then = [arrival](const auto& row) { return row->arrival <= arrival; };
  return std::ranges::any_of(prompts_, by_then) || std::ranges::any_of(generating_, by_then);
}

void Batch::abandon(const Error& error) {
  for (auto* rows : {&prompts_, &generating_}) {
    for (auto& row : *rows) {
      if (row) row->fail(error);
    }
  }
}

void Batch::stop(const Error& error) {
  abandon(error);
  remove_finished();
  collect(0);
}

}  // namespace galley::serve
