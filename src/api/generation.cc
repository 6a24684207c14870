#include "api/generation.h"

#include "ops/error.h"

namespace galley::api {

class Generation::Sink final : public serve::EventSink {
 public:
  Sink(std::shared_ptr<Generation> generation, std::size_t choice)
      : generation_(std::move(generation)), choice_(choice) {}
  void push(serve::TokenEvent event) noexcept override { generation_->push(choice_, std::move(event)); }

 private:
  std::shared_ptr<Generation> generation_;
  std::size_t choice_;
};

void Generation::start(serve::Engine& engine, std::vector<serve::GenerationRequest> requests) {
  std::vector<serve::Submission> together;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    together.push_back({std::move(requests[i]), std::make_shared<Sink>(shared_from_this(), i)});
  }
  const auto tickets = std::make_shared<const Tickets>(engine.submit_all(std::move(together)));
  tickets_ = tickets;
  responder_->on_disconnect([tickets] {
    for (const auto& ticket : *tickets) ticket->cancel();
  });
  bool waiting = false;
  {
    const std::lock_guard lock(mutex_);
    open_ = true;
    waiting = scheduled_ = !queue_.empty();
  }
  if (waiting) schedule();
}

void Generation::push(std::size_t choice, serve::TokenEvent event) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({choice, std::move(event)});
    if (!open_ || scheduled_) return;
    scheduled_ = true;
  }
  schedule();
}

void Generation::schedule() {
  responder_->post([self = shared_from_this()] { self->deliver(); });
}

void Generation::deliver() {
  std::vector<Queued> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(queue_);
    scheduled_ = false;
  }
  for (Queued& queued : events) {
    if (abandoned_) return;
    if (queued.event.finish == serve::FinishReason::cancelled) continue;
    on_event(queued.choice, queued.event);
  }
}

void Generation::abandon() {
  abandoned_ = true;
  for (const auto& ticket : *tickets_) ticket->cancel();
}

}  // namespace galley::api
