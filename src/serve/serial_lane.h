// One request at a time over a Forward, without Scheduler and Batch: mlx-lm's generate_step.
#pragma once
#include <cstdint>
#include <memory>

#include "models/forward.h"
#include "serve/row.h"

namespace galley::serve {

/// Order of steps: the prompt in chunks of prefill_step, each collected before the next; with split_forwards the last
/// prompt token as a part of its own; then a token a step, with look_ahead launched before the one before is collected.
class SerialLane {
 public:
  /// `forward` and `tally` (may be null) outlive the lane.
  SerialLane(models::Forward& forward, int prefill_step, Tally* tally = nullptr);

  [[nodiscard]] bool busy() const { return row_ != nullptr; }
  [[nodiscard]] bool prefilling() const { return busy() && row_->state() == Row::State::prefilling; }

  /// Takes a row; not while busy. A forward that can't take it ends the row.
  void start(std::unique_ptr<Row> row);
  /// One step; not busy any more when the row has ended. Throws what a forward throws that doesn't recover.
  void step();

  void abandon(const Error& error);  ///< see Batch
  void stop(const Error& error);

 private:
  void advance();
  void launch(const models::StepPlan& plan);
  void prefill();
  void collect(int in_flight);
  void release();

  models::Forward* forward_;
  std::size_t prefill_step_;
  Tally* tally_;
  std::unique_ptr<Row> row_;
};

}  // namespace galley::serve
