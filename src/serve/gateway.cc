#include "serve/gateway.h"

#include <algorithm>
#include <utility>

namespace galley::serve {
namespace {

models::KvUsage usage_of(const Lanes& lanes) {
  models::KvUsage usage = (lanes.batched ? lanes.batched : lanes.serial)->kv();
  if (lanes.batched && lanes.serial && lanes.batched != lanes.serial) {
    const models::KvUsage serial = lanes.serial->kv();
    usage.used_bytes += serial.used_bytes;
    usage.reserved_bytes += serial.reserved_bytes;
  }
  return usage;
}

}  // namespace

Gateway::Gateway(Lanes lanes, const EngineOptions& options, Tally& tally) : options_(options) {
  if (!lanes.serial) throw Error(500, "the loader made no forward for the serial lane", "engine_setup");
  if (options_.batch > 1) {
    if (!lanes.batched) throw Error(500, "the loader made no forward for the batched lane", "engine_setup");
    scheduler_.emplace(*lanes.batched,
                       SchedulerOptions{options_.batch, options_.prompt_concurrency, options_.prefill_step, 0,
                                        options_.prefill_stretch},
                       &tally);
  }
  serial_.emplace(*lanes.serial, options_.prefill_step, &tally);
  lanes_ = std::move(lanes);
}

std::optional<std::string> Gateway::serial_reason(const Row& row) const {
  if (!scheduler_) return "batch_size_1";
  const sample::Params& sampling = row.request().sampling;
  if (sampling.seed && !sampling.greedy() && !lanes_.batched->traits().invariant) return "seeded_on_stock";
  return std::nullopt;
}

void Gateway::step() {
  drop_cancelled();
  route();
  if (serial_->busy()) {
    peak_rows_ = std::max(peak_rows_, 1);
    serial_->step();
  } else if (scheduler_ && !scheduler_->idle()) {
    scheduler_->tick();
    peak_rows_ = std::max(peak_rows_, scheduler_->peak());
  }
}

void Gateway::drop_cancelled() {
  for (auto& row : queue_) {
    if (!row->cancel_requested()) continue;
    row->cancel();
    row.reset();
  }
  std::erase(queue_, nullptr);
}

void Gateway::route() {
  while (!queue_.empty() && !serial_->busy()) {
    const std::optional<std::string> reason = serial_reason(*queue_.front());
    if (reason && scheduler_ && !scheduler_->idle()) return;  // drain first
    std::unique_ptr<Row> row = std::move(queue_.front());
    queue_.pop_front();
    if (reason) {
      ++serial_count_;
      ++serial_reasons_[*reason];
      serial_->start(std::move(row));
    } else {
      scheduler_->enqueue(std::move(row));
    }
  }
}

bool Gateway::idle() const { return queue_.empty() && !serial_->busy() && (!scheduler_ || scheduler_->idle()); }

int Gateway::pending() const { return static_cast<int>(queue_.size()) + (scheduler_ ? scheduler_->pending() : 0); }

bool Gateway::tidy() {
  if (lanes_.batched && lanes_.batched->tidy()) return true;
  return lanes_.serial && lanes_.serial != lanes_.batched && lanes_.serial->tidy();
}

void Gateway::report(Stats& stats) const {
  stats.batch.configured = options_.batch;
  stats.batch.active_rows = (serial_->busy() ? 1 : 0) + (scheduler_ ? scheduler_->active() : 0);
  stats.batch.prefilling_rows = (serial_->prefilling() ? 1 : 0) + (scheduler_ ? scheduler_->prefilling() : 0);
  stats.batch.pending_rows = pending();
  stats.batch.peak_rows = peak_rows_;
  stats.kv = usage_of(lanes_);
  stats.lanes.serial = serial_count_;
  stats.lanes.batched = scheduler_ ? scheduler_->admitted() : 0;
  stats.lanes.serial_reasons = serial_reasons_;
}

void Gateway::abandon(const Error& error) {
  for (auto& row : queue_) {
    if (row) row->fail(error);
  }
  queue_.clear();
  if (scheduler_) scheduler_->abandon(error);
  serial_->abandon(error);
}

void Gateway::stop(const Error& error) {
  for (auto& row : queue_) row->fail(error);
  queue_.clear();
  if (scheduler_) scheduler_->stop(error);
  serial_->stop(error);
}

}  // namespace galley::serve
