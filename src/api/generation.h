// One client's request in the making: its rows' events, brought to the connection's thread in order.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "api/exchange.h"
#include "serve/engine.h"

namespace galley::api {

/// Base of the dialects' answers. Rows ("choices") share one responder. The engine thread only appends to a queue;
/// the answer is formatted on the connection's thread. Lives as long as the engine holds a row of it or an event waits.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  virtual ~Generation() = default;
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  /// Submits one row a request: all of them or, throwing what submit() threw, none. Once only.
  void start(serve::Engine& engine, std::vector<serve::GenerationRequest> requests);

 protected:
  explicit Generation(std::shared_ptr<Responder> responder) : responder_(std::move(responder)) {}

  /// An event of row `choice`, on the connection's thread. A row that was cancelled reports nothing here.
  virtual void on_event(std::size_t choice, serve::TokenEvent& event) = 0;
  /// Takes no more events and cancels every row that still runs.
  void abandon();

  [[nodiscard]] Responder& responder() { return *responder_; }

 private:
  class Sink;
  struct Queued {
    std::size_t choice;
    serve::TokenEvent event;
  };
  using Tickets = std::vector<std::shared_ptr<serve::Ticket>>;

  void push(std::size_t choice, serve::TokenEvent event);
  void deliver();
  void schedule();  ///< posts deliver()

  std::shared_ptr<Responder> responder_;
  std::shared_ptr<const Tickets> tickets_;  ///< set by start(), before anything is delivered
  bool abandoned_ = false;                  ///< connection's thread only
  std::mutex mutex_;
  std::vector<Queued> queue_;  ///< guarded by mutex_, like the next two
  bool open_ = false;          ///< every row is submitted; events may be delivered
  bool scheduled_ = false;     ///< a deliver() is on its way
};

}  // namespace galley::api
