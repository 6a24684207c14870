// Continuous batching: at every tick finished rows leave, waiting ones join, every decoding row advances by a token.
//
// The server's engine thread calls tick() in a loop; a parity run or a test makes a Scheduler of its own over any
// Forward, enqueues rows when it likes and calls tick() by hand. The Forward's traits choose the policy:
//
//   ragged (split_forwards = false)  one launch a tick: all decoding rows, and up to prefill_step prompt tokens (fewer
//       while rows decode, see PrefillPace) shared by up to prompt_concurrency prompts. A prompt's last piece emits its
//       first token. When the KV that the decoding rows need can't be had, the rows that arrived last are preempted:
//       they return to their place in the queue.
//   split (split_forwards = true)    mlx-lm's BatchGenerator, tick for tick: decode all of G; collect what was launched
//       before; drop the finished; return when G is full; admit min(prompt_concurrency - P, batch - G, queue); then one
//       launch with the prompts' parts: a prompt that has one token left emits from it, the others give up to
//       prefill_step tokens each.
//
// With look_ahead the newest launch (ragged) or the tick's launches (split) stay in flight until the next tick.
#pragma once
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>

#include "models/forward.h"
#include "serve/batch.h"
#include "serve/prefill_pace.h"
#include "serve/row.h"

namespace galley::serve {

struct SchedulerOptions {
  int batch = 1;               ///< rows that decode together (mlx-lm: completion batch)
  int prompt_concurrency = 8;  ///< prompts prefilled together, at most `batch`
  int prefill_step = 512;      ///< prompt tokens a tick: of all prompts (ragged) or of each (split)
  /// Rows in both states together. 0: `batch`, never more. mlx-lm lets G overshoot by prompt_concurrency - 1, because
  /// it doesn't subtract P when it admits; batch + prompt_concurrency reproduces that.
  int max_rows = 0;
  /// Ragged: what a prompt may do to the steps of running rows, see PrefillPace. 0: no bound.
  double prefill_stretch = 0;
};

/// When a step throws and the forward recovers, its rows run again, one by one: each goes on where it was, and the one
/// that fails again, alone, has failed. One thread at a time. Throws what Forward::launch and collect throw when the
/// forward doesn't recover; it is lost then.
class Scheduler {
 public:
  /// `forward` and `tally` (may be null) outlive the scheduler.
  Scheduler(models::Forward& forward, const SchedulerOptions& options, Tally* tally = nullptr);

  /// Adds a row to the end of the queue.
  void enqueue(std::unique_ptr<Row> row);
  void tick();

  [[nodiscard]] int pending() const { return static_cast<int>(queue_.size()); }
  [[nodiscard]] int prefilling() const { return batch_.prefilling(); }
  [[nodiscard]] int active() const { return batch_.rows(); }
  /// Most rows that were active at a time.
  [[nodiscard]] int peak() const { return peak_; }
  /// Nothing queued, nothing running, nothing in flight.
  [[nodiscard]] bool idle() const { return queue_.empty() && batch_.rows() == 0 && forward_->in_flight() == 0; }
  /// Rows that have been admitted so far.
  [[nodiscard]] std::uint64_t admitted() const { return admitted_; }

  void abandon(const Error& error);  ///< see Batch
  void stop(const Error& error);

 private:
  void drop_cancelled();
  void admit(int limit);
  void requeue(std::unique_ptr<Row> row);
  void rerun_alone(const std::exception& exception);
  [[nodiscard]] models::StepPlan plan_decode();
  void tick_ragged();
  void tick_split();

  models::Forward* forward_;
  SchedulerOptions options_;
  std::deque<std::unique_ptr<Row>> queue_;  ///< by arrival, preempted rows too
  Batch batch_;
  PrefillPace pace_;
  std::uint64_t arrivals_ = 0;
  std::uint64_t alone_until_ = 0;  ///< rows that arrived by then run alone: a step that failed was theirs
  std::uint64_t admitted_ = 0;
  int peak_ = 0;
};

}  // namespace galley::serve
