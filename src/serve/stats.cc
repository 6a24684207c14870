#include "serve/stats.h"

namespace galley::serve {

void ThroughputWindow::add(Clock::time_point now, Clock::duration busy, std::uint64_t prefill_tokens,
                           std::uint64_t decode_tokens) {
  constexpr std::chrono::milliseconds kBucket{250};
  while (!buckets_.empty() && now - buckets_.front().begin > kSpan) buckets_.pop_front();
  if (buckets_.empty() || now - buckets_.back().begin >= kBucket) buckets_.push_back({now, {}, 0, 0});
  Bucket& bucket = buckets_.back();
  bucket.busy += busy;
  bucket.prefill_tokens += prefill_tokens;
  bucket.decode_tokens += decode_tokens;
}

ThroughputWindow::Rates ThroughputWindow::rates(Clock::time_point now) const {
  Clock::duration busy{};
  std::uint64_t prefill = 0;
  std::uint64_t decode = 0;
  for (const Bucket& bucket : buckets_) {
    if (now - bucket.begin > kSpan) continue;
    busy += bucket.busy;
    prefill += bucket.prefill_tokens;
    decode += bucket.decode_tokens;
  }
  const double seconds = std::chrono::duration<double>(busy).count();
  if (seconds <= 0.0) return {};
  return {static_cast<double>(prefill) / seconds, static_cast<double>(decode) / seconds};
}

}  // namespace galley::serve
