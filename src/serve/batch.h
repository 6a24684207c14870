// The rows that share steps: who is in, what the next step contains, who gets what it yields.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "models/forward.h"
#include "serve/row.h"

namespace galley::serve {

/// Rows that joined a Forward. Rows that leave are kept until every step launched before has been collected, because
/// the Forward borrows their samplers.
class Batch {
 public:
  Batch(models::Forward& forward, Tally* tally) : forward_(&forward), tally_(tally) {}

  [[nodiscard]] int prefilling() const { return static_cast<int>(prompts_.size()); }
  [[nodiscard]] int decoding() const { return static_cast<int>(generating_.size()); }
  [[nodiscard]] int rows() const { return prefilling() + decoding(); }

  /// Joins the row to the forward; a refusal (galley::Error) ends that row and no other.
  void join(std::unique_ptr<Row> row);
  /// Cancelled rows leave, in whatever state.
  void drop_cancelled();

  /// Every decoding row advances by a token, in the order in which they began. Unless `all`, rows whose last allowed
  /// token is already on its way sit out.
  void add_decode(models::StepPlan& plan, bool all) const;
  /// Up to `budget` prompt tokens, shared by share_prefill(); a prompt's last piece emits.
  void add_shared_prompts(models::StepPlan& plan, std::size_t budget);
  /// mlx-lm's pieces: a row with one token left emits from it alone; the others give up to `step` tokens each and keep
  /// the last one. Emitting parts first.
  void add_split_prompts(models::StepPlan& plan, std::size_t step);

  /// The row that arrived last leaves the forward and is handed back, to join again later. No step in flight.
  std::unique_ptr<Row> preempt_youngest();

  /// Launches unless the plan is empty; tells whether it did.
  bool launch(const models::StepPlan& plan);
  /// Collects until at most `in_flight` steps are; finished rows leave.
  void collect(int in_flight);

  /// All rows, for the forward has forgotten them. They can join again.
  std::vector<std::unique_ptr<Row>> take_all();
  /// Whether a row that arrived by then is here.
  [[nodiscard]] bool any_arrived_by(std::uint64_t arrival) const;

  /// Ends all rows without touching the forward, which is lost.
  void abandon(const Error& error);
  /// Ends all rows; each leaves the forward, and the steps in flight are collected.
  void stop(const Error& error);

 private:
  Row* find(models::RowId id) const;
  void begin_decoding();
  void remove_finished();
  void leave(std::unique_ptr<Row> row);

  struct Departed {
    std::uint64_t launched = 0;  ///< number of launches when it left
    std::unique_ptr<Row> row;
  };
  models::Forward* forward_;
  Tally* tally_;
  std::vector<std::unique_ptr<Row>> prompts_;     ///< by arrival
  std::vector<std::unique_ptr<Row>> generating_;  ///< in the order in which they began to decode
  std::deque<Departed> departed_;
  std::uint64_t launched_ = 0, collected_ = 0;
};

}  // namespace galley::serve
