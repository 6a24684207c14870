// The front of the serving room: submit requests from any thread, watch, drain.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/forward.h"
#include "serve/request.h"
#include "text/tokenizer.h"

namespace galley::serve {

struct EngineOptions {
  int batch = 1;               ///< rows that may share a step; 1: serial lane only
  int prompt_concurrency = 8;  ///< prompts prefilled together
  int prefill_step = 512;      ///< prompt tokens a step, over all rows that prefill
  /// How much longer a prompt may make the steps of running rows (fused), see PrefillPace; 0: no bound.
  double prefill_stretch = 0;
  int max_queue = 256;                                    ///< waiting requests beyond which submit() refuses with 429
  int context = 0;                                        ///< tokens a row may hold (prompt + generated)
  std::function<void(const std::string&)> on_fault = {};  ///< told, on the engine thread, of rows that fail (500)
};

/// What the engine thread runs on; made on that thread by a Loader because MLX arrays belong to the thread that made
/// them. `serial` and `batched` may be the same object (fused).
struct Lanes {
  std::shared_ptr<models::Forward> serial;
  std::shared_ptr<models::Forward> batched;  ///< null when options.batch == 1
};
using Loader = std::function<Lanes()>;

/// A snapshot of gauges and counters.
struct Stats {
  struct Batch {
    int configured = 1, active_rows = 0, prefilling_rows = 0, pending_rows = 0, peak_rows = 0;
  } batch;
  models::KvUsage kv;
  struct Lane {
    std::uint64_t serial = 0, batched = 0;                ///< requests that ran there
    std::map<std::string, std::uint64_t> serial_reasons;  ///< why: "batch_size_1", "seeded_on_stock" …
  } lanes;
  struct Throughput {
    double decode_tok_s = 0, prefill_tok_s = 0;  ///< over the last ten seconds of work
    std::uint64_t prompt_tokens = 0, completion_tokens = 0, steps = 0;
  } throughput;
  struct Requests {
    std::uint64_t accepted = 0, finished = 0, cancelled = 0, failed = 0, refused = 0;
    std::uint64_t preempted = 0;  ///< times a running one had to make room and went on later
  } requests;
};

/// Shared by the client's side and the engine: cancelling frees the row within a step.
class Ticket {
 public:
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

/// A request and where its events go. The sink is kept alive until its last event.
struct Submission {
  GenerationRequest request;
  std::shared_ptr<EventSink> sink;
};

class Engine {
 public:
  virtual ~Engine() = default;  ///< stop(), and waits for the thread

  /// Queues requests, all of them or none; thread-safe. Throws galley::Error: 400 context_length_exceeded (names prompt
  /// and context token counts), 400 context_over_budget (needed and available bytes and tokens), 400 too_many_prompts
  /// when even an idle engine can't take so many, 429 when the queue is full, 503 while draining or after the engine
  /// died. What is wrong with one of several prompts names it: param "messages[1]".
  virtual std::vector<std::shared_ptr<Ticket>> submit_all(std::vector<Submission> together) = 0;
  std::shared_ptr<Ticket> submit(GenerationRequest request, std::shared_ptr<EventSink> sink);

  [[nodiscard]] virtual Stats stats() const = 0;
  /// False once the engine thread has died of something that was not one row's fault.
  [[nodiscard]] virtual bool healthy() const = 0;
  /// Takes no new work; waits until the running requests are done or `timeout` passed. True: all done.
  virtual bool drain(std::chrono::milliseconds timeout) = 0;
  /// Ends every request that is queued or running with an error event (503), soon after.
  virtual void stop() = 0;
};

/// Starts the engine thread, loads there, and returns when the model is ready. Rethrows what the loader threw.
std::unique_ptr<Engine> start_engine(const EngineOptions& options, std::shared_ptr<const text::Tokenizer> tokenizer,
                                     std::vector<std::int32_t> end_ids, Loader loader);

}  // namespace galley::serve
