#include "serve/engine.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "serve/gateway.h"
#include "serve/row.h"
#include "serve/stats.h"

namespace galley::serve {
namespace {

/// How long the end of the process waits for work that could wait until then.
constexpr std::chrono::seconds kLastTidying{10};

/// Facts of the loaded forwards that admission needs on any thread.
struct Limits {
  int max_row_tokens = 0;
  std::size_t budget_bytes = 0;
  std::shared_ptr<models::Forward> forward;  ///< for bytes_for(), a pure function of its configuration
};

std::string gigabytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f GB", static_cast<double>(bytes) * 1e-9);
  return text;
}

class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(const EngineOptions& options, std::shared_ptr<const text::Tokenizer> tokenizer,
                 std::vector<std::int32_t> end_ids)
      : options_(options), tokenizer_(std::move(tokenizer)), end_ids_(std::move(end_ids)) {
    context_ = {tokenizer_.get(), end_ids_, &tally_, &options_.on_fault};
    snapshot_.batch.configured = options_.batch;
  }

  ~ThreadedEngine() override {
    end();
    if (thread_.joinable()) thread_.join();
  }

  void start(Loader loader) {
    std::promise<void> loaded;
    std::future<void> ready = loaded.get_future();
    thread_ =
        std::thread([this, load = std::move(loader), promise = std::move(loaded)]() mutable { run(load, promise); });
    ready.get();
  }

  std::vector<std::shared_ptr<Ticket>> submit_all(std::vector<Submission> together) override {
    std::vector<std::shared_ptr<Ticket>> tickets;
    {
      const std::lock_guard lock(mutex_);
      try {
        check_state();
        for (std::size_t i = 0; i < together.size(); ++i) {
          check_size(together[i].request, together.size() == 1 ? "messages" : "messages[" + std::to_string(i) + "]");
        }
        check_queue(static_cast<int>(together.size()));
      } catch (const Error&) {
        ++refused_;
        throw;
      }
      for (Submission& submission : together) {
        tickets.push_back(std::make_shared<Ticket>());
        inbox_.push_back({std::move(submission), tickets.back()});
      }
      accepted_ += together.size();
      busy_ = true;
      tally_.live.fetch_add(static_cast<int>(together.size()), std::memory_order_acq_rel);
    }
    wake_.notify_all();
    return tickets;
  }

  [[nodiscard]] Stats stats() const override {
    const std::lock_guard lock(mutex_);
    Stats stats = snapshot_;
    stats.batch.pending_rows += static_cast<int>(inbox_.size());
    stats.requests.accepted = accepted_;
    stats.requests.refused = refused_;
    const auto rates = window_.rates(ThroughputWindow::Clock::now());
    stats.throughput.decode_tok_s = rates.decode_tok_s;
    stats.throughput.prefill_tok_s = rates.prefill_tok_s;
    return stats;
  }

  [[nodiscard]] bool healthy() const override {
    const std::lock_guard lock(mutex_);
    return !dead_;
  }

  bool drain(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    return quiet_.wait_for(lock, timeout, [this] { return !busy_; });
  }

  void stop() override { end(); }

 private:
  struct Arrival {
    Submission submission;
    std::shared_ptr<Ticket> ticket;
  };

  void end() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
  }

  // Admission, on the caller's thread, under the mutex.

  void check_state() const {
    if (dead_) throw Error(503, "the engine has stopped after an internal error; restart the server", "engine_dead");
    if (draining_ || stopping_) throw Error(503, "the server is shutting down and takes no new requests", "draining");
  }

  void check_size(const GenerationRequest& request, const std::string& param) const {
    if (request.prompt.empty()) throw Error(400, "the prompt is empty", "empty_prompt", param);
    if (request.max_tokens <= 0) {
      throw Error(400, "max_tokens must be at least 1, not " + std::to_string(request.max_tokens), "invalid_value",
                  "max_tokens");
    }
    const auto prompt = static_cast<long long>(request.prompt.size());
    const long long needed = prompt + request.max_tokens;
    if (options_.context > 0 && needed > options_.context) {
      throw Error(400,
                  "the context length is " + std::to_string(options_.context) + " tokens, but the prompt has " +
                      std::to_string(prompt) + " tokens and up to " + std::to_string(request.max_tokens) +
                      " more are asked for; shorten the prompt or lower max_tokens",
                  "context_length_exceeded", param);
    }
    if (needed > limits_.max_row_tokens) {
      const std::size_t bytes =
          needed <= std::numeric_limits<int>::max() ? limits_.forward->bytes_for(static_cast<int>(needed)) : 0;
      throw Error(400,
                  "the KV budget can't hold this request: " + std::to_string(needed) + " tokens (prompt " +
                      std::to_string(prompt) + " + max_tokens " + std::to_string(request.max_tokens) + ") need " +
                      gigabytes(bytes) + " (" + std::to_string(bytes) + " bytes), available are " +
                      gigabytes(limits_.budget_bytes) + " (" + std::to_string(limits_.budget_bytes) + " bytes, " +
                      std::to_string(limits_.max_row_tokens) +
                      " tokens); shorten the prompt, lower max_tokens or raise --kv-budget",
                  "context_over_budget", param);
    }
  }

  void check_queue(int arriving) const {
    const int most = options_.batch + options_.max_queue;
    if (arriving > most) {
      throw Error(400,
                  "one request with " + std::to_string(arriving) +
                      " prompts is more than this server takes at a time (" + std::to_string(options_.batch) +
                      " running and " + std::to_string(options_.max_queue) +
                      " waiting); send fewer, or raise --batch or --max-queue",
                  "too_many_prompts", "prompt");
    }
    // Counted from all live requests and not from the queue's length, so that a burst isn't refused while slots are
    // free only because the engine hasn't looked yet.
    const int live = tally_.live.load(std::memory_order_acquire);
    if (live + arriving > most) {
      throw Error(429,
                  "the queue is full: " + std::to_string(live) + " requests are running or waiting, " +
                      std::to_string(most) + " are the most; try again later",
                  "queue_full");
    }
  }

  // Everything below runs on the engine thread.

  void run(const Loader& loader, std::promise<void>& loaded) {
    std::optional<Gateway> gateway;
    try {
      Lanes lanes = loader();
      const std::shared_ptr<models::Forward> main = lanes.batched && options_.batch > 1 ? lanes.batched : lanes.serial;
      const std::shared_ptr<models::Forward> serial = lanes.serial;
      gateway.emplace(std::move(lanes), options_, tally_);
      limits_ = {main->max_row_tokens(), main->kv().budget_bytes, main};
      if (serial->max_row_tokens() < limits_.max_row_tokens) {
        limits_ = {serial->max_row_tokens(), serial->kv().budget_bytes, serial};
      }
      const std::lock_guard lock(mutex_);
      publish(*gateway, {});
    } catch (...) {
      limits_.forward.reset();
      loaded.set_exception(std::current_exception());
      return;
    }
    loaded.set_value();
    try {
      while (next(*gateway)) {
      }
      const Error error(503, "the server is shutting down", "shutting_down");
      gateway->stop(error);
      refuse_inbox(error);
      const auto deadline = std::chrono::steady_clock::now() + kLastTidying;
      while (gateway->tidy() && std::chrono::steady_clock::now() < deadline) {
      }
    } catch (const std::exception& exception) {
      die(*gateway, exception.what());
    } catch (...) {
      die(*gateway, "unknown exception");
    }
    const std::lock_guard lock(mutex_);
    limits_.forward.reset();
    gateway.reset();
    busy_ = false;
    quiet_.notify_all();
  }

  /// Waits for work, takes what has arrived, makes a step. False: stop.
  bool next(Gateway& gateway) {
    std::deque<Arrival> arrived;
    {
      std::unique_lock lock(mutex_);
      if (gateway.idle()) await_work(gateway, lock);
      if (stopping_) return false;
      arrived.swap(inbox_);
      snapshot_.batch.pending_rows += static_cast<int>(arrived.size());
    }
    const auto begin = ThroughputWindow::Clock::now();
    for (Arrival& arrival : arrived) accept(gateway, std::move(arrival));
    gateway.step();
    const std::lock_guard lock(mutex_);
    publish(gateway, begin);
    busy_ = !gateway.idle() || !inbox_.empty();
    if (!busy_) quiet_.notify_all();
    return true;
  }

  /// Waits for a request or the end, and does meanwhile what could wait until now, in small pieces.
  void await_work(Gateway& gateway, std::unique_lock<std::mutex>& lock) {
    const auto called = [this] { return stopping_ || !inbox_.empty(); };
    for (bool more = true; more && !called();) {
      lock.unlock();
      more = gateway.tidy();
      lock.lock();
    }
    wake_.wait(lock, called);
  }

  void accept(Gateway& gateway, Arrival arrival) {
    std::unique_ptr<Row> row;
    Submission& submission = arrival.submission;
    try {
      row = std::make_unique<Row>(context_, std::move(submission.request), submission.sink, arrival.ticket);
    } catch (const std::exception& exception) {  // of this request's own parts: nobody else's affair
      refuse(submission, Error(500, std::string("the request could not be set up: ") + exception.what(), "row_fault"));
      return;
    }
    gateway.enqueue(std::move(row));
  }

  void refuse(Submission& submission, const Error& error) {
    ++tally_.failed;
    tally_.live.fetch_sub(1, std::memory_order_acq_rel);
    TokenEvent event;
    event.error = error;
    event.usage.prompt_tokens = static_cast<int>(submission.request.prompt.size());
    if (submission.sink) submission.sink->push(std::move(event));
  }

  void refuse_inbox(const Error& error) {
    std::deque<Arrival> left;
    {
      const std::lock_guard lock(mutex_);
      left.swap(inbox_);
    }
    for (Arrival& arrival : left) refuse(arrival.submission, error);
  }

  void die(Gateway& gateway, const std::string& reason) {
    {
      const std::lock_guard lock(mutex_);
      dead_ = true;
    }
    const Error error(500, "the engine stopped: " + reason, "engine_dead");
    gateway.abandon(error);
    refuse_inbox(error);
    const std::lock_guard lock(mutex_);
    count();
    snapshot_.batch.active_rows = snapshot_.batch.prefilling_rows = snapshot_.batch.pending_rows = 0;
  }

  // Both under the mutex.

  void publish(const Gateway& gateway, std::optional<ThroughputWindow::Clock::time_point> begin) {
    gateway.report(snapshot_);
    const Stats::Throughput before = snapshot_.throughput;
    count();
    if (!begin) return;
    const auto now = ThroughputWindow::Clock::now();
    window_.add(now, now - *begin, tally_.prompt_tokens - before.prompt_tokens,
                tally_.completion_tokens - before.completion_tokens);
  }

  void count() {
    snapshot_.throughput.prompt_tokens = tally_.prompt_tokens;
    snapshot_.throughput.completion_tokens = tally_.completion_tokens;
    snapshot_.throughput.steps = tally_.steps;
    snapshot_.requests.finished = tally_.finished;
    snapshot_.requests.cancelled = tally_.cancelled;
    snapshot_.requests.failed = tally_.failed;
    snapshot_.requests.preempted = tally_.preempted;
  }

  const EngineOptions options_;
  const std::shared_ptr<const text::Tokenizer> tokenizer_;
  const std::vector<std::int32_t> end_ids_;
  RowContext context_;
  Tally tally_;    ///< engine thread; `live` any thread
  Limits limits_;  ///< written while loading, then read only

  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable wake_, quiet_;
  std::deque<Arrival> inbox_;
  Stats snapshot_;
  ThroughputWindow window_;
  std::uint64_t accepted_ = 0, refused_ = 0;
  bool busy_ = false;  ///< a request is queued, running, or has not yet given back its memory
  bool stopping_ = false, draining_ = false, dead_ = false;

  std::thread thread_;
};

}  // namespace

std::shared_ptr<Ticket> Engine::submit(GenerationRequest request, std::shared_ptr<EventSink> sink) {
  std::vector<Submission> one;
  one.push_back({std::move(request), std::move(sink)});
  return submit_all(std::move(one)).front();
}

std::unique_ptr<Engine> start_engine(const EngineOptions& options, std::shared_ptr<const text::Tokenizer> tokenizer,
                                     std::vector<std::int32_t> end_ids, Loader loader) {
  auto engine = std::make_unique<ThreadedEngine>(options, std::move(tokenizer), std::move(end_ids));
  engine->start(std::move(loader));
  return engine;
}

}  // namespace galley::serve
