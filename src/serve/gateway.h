// Picks the lane of every request, in order of arrival.
//
// Requests that can batch go to the Scheduler. One that cannot stops admission at the head of the queue: the running
// rows finish, it runs alone on the serial lane, admission resumes. So the lanes never run at the same time.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "models/forward.h"
#include "serve/engine.h"
#include "serve/row.h"
#include "serve/scheduler.h"
#include "serve/serial_lane.h"

namespace galley::serve {

/// Engine thread only.
class Gateway {
 public:
  /// `tally` outlives the gateway. Throws galley::Error when a lane that the options call for is missing.
  Gateway(Lanes lanes, const EngineOptions& options, Tally& tally);

  void enqueue(std::unique_ptr<Row> row) { queue_.push_back(std::move(row)); }
  /// One step of whichever lane has work. Throws what the Forward throws; the engine is lost then.
  void step();
  /// No request is left in any state.
  [[nodiscard]] bool idle() const;

  /// One piece of the forwards' work that can wait; false: there is none. Only while idle.
  bool tidy();

  /// Gauges, lanes and KV; not throughput and requests, which the engine counts.
  void report(Stats& stats) const;

  void abandon(const Error& error);  ///< ends all requests without touching the forwards, which are lost
  void stop(const Error& error);     ///< ends all requests and what is in flight

 private:
  /// Why a request can't batch; empty: it can.
  [[nodiscard]] std::optional<std::string> serial_reason(const Row& row) const;
  void drop_cancelled();
  void route();
  [[nodiscard]] int pending() const;

  EngineOptions options_;
  std::deque<std::unique_ptr<Row>> queue_;  ///< by arrival; not yet given to a lane
  std::optional<Scheduler> scheduler_;      ///< absent at batch size 1
  std::optional<SerialLane> serial_;
  std::uint64_t serial_count_ = 0;
  std::map<std::string, std::uint64_t> serial_reasons_;
  int peak_rows_ = 0;
  Lanes lanes_;  ///< last, so that the forwards go first: they borrow the rows' samplers
};

}  // namespace galley::serve
