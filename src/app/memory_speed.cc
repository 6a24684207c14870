#include "app/memory_speed.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace galley::app {

namespace {

std::uint64_t sum_of(const std::uint64_t* begin, const std::uint64_t* end) {
  constexpr std::size_t kApart = 16;  // independent sums, so that loads and not additions are waited for
  std::array<std::uint64_t, kApart> sums{};
  for (; end - begin >= static_cast<std::ptrdiff_t>(kApart); begin += kApart) {
    for (std::size_t i = 0; i < kApart; ++i) sums[i] += begin[i];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace

double memory_read_speed(int threads) {
  constexpr std::size_t kWords = std::size_t{256} * 1000 * 1000 / sizeof(std::uint64_t);
  constexpr int kPasses = 7;
  const std::vector<std::uint64_t> words(kWords, 1);
  const std::size_t share = kWords / static_cast<std::size_t>(threads);
  std::atomic<std::uint64_t> sum = 0;  // used, so that the reads are not optimized away
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    {
      std::vector<std::jthread> readers;
      for (int t = 0; t < threads; ++t) {
        const std::uint64_t* begin = words.data() + static_cast<std::size_t>(t) * share;
        readers.emplace_back([&sum, begin, share] { sum += sum_of(begin, begin + share); });
      }
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const double bytes = static_cast<double>(share * static_cast<std::size_t>(threads) * sizeof(std::uint64_t));
    if (sum.load() > 0) best = std::max(best, bytes / taken.count());
  }
  return best;
}

}  // namespace galley::app
