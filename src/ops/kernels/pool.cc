#include "ops/kernels/pool.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string>
#include <utility>

#include "ops/error.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace galley::kernels {
namespace {

#ifdef __linux__
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<std::uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
bool thread_clock(std::thread& thread, clockid_t& clock) {
  return pthread_getcpuclockid(thread.native_handle(), &clock) == 0;
}
constexpr bool kWatchesNeighbours = true;
#else
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) { word.wait(value); }
void futex_wake(std::atomic<std::uint32_t>& word, int) { word.notify_all(); }
bool thread_clock(std::thread&, clockid_t&) { return false; }
constexpr bool kWatchesNeighbours = false;  // needs CPU clocks of other threads
#endif

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

std::uint64_t cpu_ns(clockid_t clock) {
  timespec t{};
  if (clock_gettime(clock, &t) != 0) return 0;
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<std::uint64_t>(t.tv_nsec);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

int checked(int threads) {
  if (threads < 1)
    throw Error(400, "threads must be at least 1, not " + std::to_string(threads), "bad_threads", "--threads");
  return threads;
}

constexpr std::uint64_t kMicrosecond = 1000;
constexpr std::uint64_t kPause = 2000 * kMicrosecond;   // a gap between runs that makes an observation void
constexpr std::uint64_t kWindow = 6000 * kMicrosecond;  // length of an observation

}  // namespace

Pool::Pool(int threads, int spin_us)
    : threads_(checked(threads)),
      spin_ns_(static_cast<std::uint64_t>(std::max(0, spin_us)) * kMicrosecond),
      ranges_(static_cast<std::size_t>(threads)),
      sleep_(static_cast<std::size_t>(threads)) {
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int t = 1; t < threads; ++t) {
      workers_.emplace_back([this, t] { loop(t); });
      thread_clock(workers_.back(), sleep_[static_cast<std::size_t>(t)].clock);
    }
  } catch (...) {  // the system is out of threads: end those already started
    stop_ = true;
    epoch_.fetch_add(1);
    futex_wake(epoch_, 1 << 20);
    for (auto& w : workers_) w.join();
    throw;
  }
}

Pool::~Pool() {
  stop_ = true;
  epoch_.fetch_add(1);
  futex_wake(epoch_, 1 << 20);
  for (auto& w : workers_) w.join();
}

Pool::Statistics Pool::statistics() const { return {parks_.load(), waits_.load(), solos_.load()}; }

void Pool::work(int self) {
  for (int i = 0; i < threads_; ++i) {
    Range& range = ranges_[static_cast<std::size_t>((self + i) % threads_)];
    const int end = range.end.load(std::memory_order_relaxed);
    while (range.next.load(std::memory_order_relaxed) < end) {
      const int begin = range.next.fetch_add(grain_, std::memory_order_relaxed);
      if (begin >= end) break;
      function_(context_, begin, std::min(begin + grain_, end), self);
    }
  }
}

void Pool::work_safely(int self) noexcept {
  for (bool done = false; !done;) {
    try {
      work(self);
      done = true;
    } catch (...) {
      if (!threw_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
    }
  }
}

void Pool::open_window(std::uint64_t now) {
  window_ = now;
  caller_slept_ = 0;
  caller_ = pthread_self();
  caller_cpu_start_ = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
  for (std::size_t t = 1; t < sleep_.size(); ++t) {
    Sleep& s = sleep_[t];
    const std::uint64_t since = s.since.load();
    s.cpu_start = cpu_ns(s.clock);
    s.sleep_start = s.total.load() + (since != 0 && since < now ? now - since : 0);
  }
}

// Wall time that is neither CPU time nor parked time was taken by somebody else.
void Pool::review(std::uint64_t now) {
  if (window_ == 0 || now - last_ > kPause || pthread_equal(caller_, pthread_self()) == 0) {
    open_window(now);
    return;
  }
  const std::uint64_t wall = now - window_;
  if (wall < kWindow) return;
  const auto stolen = [wall](std::uint64_t cpu, std::uint64_t slept) {
    const std::uint64_t used = cpu + slept;
    return used < wall && (wall - used) * 5 > wall;  // over 20 %
  };
  bool bad = stolen(cpu_ns(CLOCK_THREAD_CPUTIME_ID) - caller_cpu_start_, caller_slept_);
  for (std::size_t t = 1; t < sleep_.size(); ++t) {
    const Sleep& s = sleep_[t];
    const std::uint64_t since = s.since.load();
    const std::uint64_t slept = s.total.load() + (since != 0 && since < now ? now - since : 0);
    bad = bad || stolen(cpu_ns(s.clock) - s.cpu_start, slept - s.sleep_start);
  }
  bad_windows_ = bad ? bad_windows_ + 1 : 0;
  if (bad_windows_ >= (backoff_us_ != 0 ? 1 : 2)) {
    backoff_us_ = std::clamp<std::uint64_t>(backoff_us_ * 2, 50000, 1000000);
    solo_until_ = now + backoff_us_ * kMicrosecond;
    solos_.fetch_add(1, std::memory_order_relaxed);
  } else if (!bad) {
    backoff_us_ = backoff_us_ > 60000 ? backoff_us_ / 4 : 0;
  }
  open_window(now);
}

void Pool::run(Function function, const void* context, int count, int grain) {
  if (count <= 0) return;
  if (threads_ == 1 || count <= grain) {
    function(context, 0, count, 0);
    return;
  }
  if (kWatchesNeighbours) {
    const std::uint64_t start = now_ns();
    if (start < solo_until_) {
      function(context, 0, count, 0);
      window_ = 0;
      return;
    }
    review(start);
  }
  function_ = function;
  context_ = context;
  grain_ = std::max(1, grain);
  for (int t = 0; t < threads_; ++t) {
    Range& range = ranges_[static_cast<std::size_t>(t)];
    range.next.store(static_cast<int>(std::int64_t{count} * t / threads_), std::memory_order_relaxed);
    range.end.store(static_cast<int>(std::int64_t{count} * (t + 1) / threads_), std::memory_order_relaxed);
  }
  generation_ = (generation_ + 1) & 0x7fffffff;
  state_.store(kOpen | generation_ << 32, std::memory_order_seq_cst);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) futex_wake(epoch_, threads_ - 1);
  work_safely(0);
  // Close the door: who isn't inside by now finds nothing to do and isn't waited for.
  std::uint64_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (std::uint64_t first = 0; (state & kInside) != 0; state = state_.load(std::memory_order_acquire)) {
    relax();
    const std::uint64_t now = now_ns();
    if (first == 0) first = now;
    if (now - first > spin_ns_ / 2) {  // the worker lost its core: leave ours to it
      const std::uint32_t seen = done_.load();
      if ((state_.fetch_or(kCallerParked) & kInside) != 0) {
        waits_.fetch_add(1, std::memory_order_relaxed);
        futex_wait(done_, seen);
        caller_slept_ += now_ns() - now;
      }
      state_.fetch_and(~kCallerParked);
    }
  }
  last_ = now_ns();
  if (threw_.load(std::memory_order_relaxed)) {
    threw_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

void Pool::loop(int self) {
  std::uint64_t seen = 0;
  std::uint64_t idle_since = now_ns();
  const auto pending = [&seen](std::uint64_t s) { return (s & kOpen) != 0 && (s >> 32 & 0x7fffffff) != seen; };
  for (;;) {
    std::uint64_t state = state_.load(std::memory_order_acquire);
    if (pending(state)) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      seen = state >> 32 & 0x7fffffff;
      work_safely(self);
      state = state_.fetch_sub(1, std::memory_order_acq_rel);
      if ((state & kCallerParked) != 0 && (state & kInside) == 1) {
        done_.fetch_add(1);
        futex_wake(done_, 1);
      }
      idle_since = now_ns();
      continue;
    }
    if (stop_.load(std::memory_order_relaxed)) return;
    relax();
    if (now_ns() - idle_since <= spin_ns_) continue;
    const std::uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
    parked_.fetch_add(1, std::memory_order_seq_cst);
    if (!pending(state_.load(std::memory_order_seq_cst)) && !stop_) {
      Sleep& sleep = sleep_[static_cast<std::size_t>(self)];
      const std::uint64_t start = now_ns();
      sleep.since = start;
      parks_.fetch_add(1, std::memory_order_relaxed);
      futex_wait(epoch_, epoch);
      const std::uint64_t end = now_ns();
      sleep.since = 0;
      sleep.total += end - start;
    }
    parked_.fetch_sub(1, std::memory_order_seq_cst);
    idle_since = now_ns();
  }
}

}  // namespace galley::kernels
