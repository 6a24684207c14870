// A small thread pool for kernels that run for microseconds and share the machine with others.
//
// A run's units are split statically among the threads and finished by stealing. Idle workers spin for a moment and
// then park in a futex. A worker that is late (parked, preempted) is never waited for; only one that holds units is.
// Every few milliseconds the pool compares wall time with CPU time: when a neighbour process took a thread's core away,
// the pool works alone for a while (a barrier between a running and a preempted thread costs whole scheduler slices)
// and then tries again.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace galley::kernels {

class Pool {
 public:
  /// Works on units [begin, end) as thread `thread` (0: the caller of run).
  using Function = void (*)(const void* context, int begin, int end, int thread);

  /// `threads` counts the caller of run(): 1 starts no thread and runs everything inline. `spin_us`: how long an idle
  /// worker spins before it parks. Throws galley::Error when `threads` < 1.
  explicit Pool(int threads, int spin_us = 40);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  [[nodiscard]] int threads() const { return threads_; }

  /// Calls `function` for all units [0, count), `grain` at a time, and returns when all are done. Which thread gets
  /// which unit is not fixed. One caller at a time, from any thread; not from inside a unit. When units throw, the
  /// others are run all the same (alone, on one thread, units after the one that threw are not) and one of the
  /// exceptions is rethrown at the end, on the caller's thread.
  void run(Function function, const void* context, int count, int grain = 1);

  /// The same for a callable (begin, end, thread).
  template <class F>
  void for_each(int count, int grain, const F& f) {
    run([](const void* c, int begin, int end, int thread) { (*static_cast<const F*>(c))(begin, end, thread); }, &f,
        count, grain);
  }

  struct Statistics {
    std::uint64_t parks = 0;  ///< times a worker went to sleep
    std::uint64_t waits = 0;  ///< times the caller slept because a worker lost its core
    std::uint64_t solos = 0;  ///< times the pool decided to work alone for a while
  };
  [[nodiscard]] Statistics statistics() const;

 private:
  struct alignas(64) Range {
    std::atomic<int> next{0};
    std::atomic<int> end{0};
  };
  struct alignas(64) Sleep {  // parked time of one worker, in nanoseconds
    std::atomic<std::uint64_t> total{0}, since{0};
    clockid_t clock{};
    std::uint64_t cpu_start = 0, sleep_start = 0;
  };

  void work(int self);
  void work_safely(int self) noexcept;
  void loop(int self);
  void review(std::uint64_t now);
  void open_window(std::uint64_t now);

  // State word: bit 63 open, bits 32..62 generation, bit 31 the caller is parked, bits 0..30 workers inside.
  static constexpr std::uint64_t kOpen = 1ULL << 63, kCallerParked = 1ULL << 31, kInside = kCallerParked - 1;
  alignas(64) std::atomic<std::uint64_t> state_{0};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};  // futex word of the workers
  std::atomic<int> parked_{0};
  alignas(64) std::atomic<std::uint32_t> done_{0};  // futex word of the caller
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> parks_{0}, waits_{0}, solos_{0};

  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> threw_{false};
  std::exception_ptr failure_;  // written by the thread that set threw_, read by the caller when all are done
  int grain_ = 1;
  int threads_;
  std::uint64_t spin_ns_;
  std::uint64_t generation_ = 0;
  std::vector<Range> ranges_;
  std::vector<Sleep> sleep_;

  // Neighbour detection; touched by the caller only.
  std::uint64_t window_ = 0, last_ = 0, caller_cpu_start_ = 0, caller_slept_ = 0, solo_until_ = 0, backoff_us_ = 0;
  int bad_windows_ = 0;
  pthread_t caller_{};

  std::vector<std::thread> workers_;
};

}  // namespace galley::kernels
