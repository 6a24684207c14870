// Sliding throughput: tokens over the time the engine worked, in the last ten seconds.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>

namespace galley::serve {

/// One thread at a time.
class ThroughputWindow {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kSpan{10};

  /// A stretch of work that ended at `now` and took `busy`.
  void add(Clock::time_point now, Clock::duration busy, std::uint64_t prefill_tokens, std::uint64_t decode_tokens);

  struct Rates {
    double prefill_tok_s = 0, decode_tok_s = 0;
  };
  /// Tokens a second of work; zero when there was none in the last ten seconds.
  [[nodiscard]] Rates rates(Clock::time_point now) const;

 private:
  struct Bucket {  // the work of a quarter of a second, so that a fast engine doesn't keep thousands of steps
    Clock::time_point begin;
    Clock::duration busy{};
    std::uint64_t prefill_tokens = 0, decode_tokens = 0;
  };
  std::deque<Bucket> buckets_;
};

}  // namespace galley::serve
