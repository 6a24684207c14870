#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "ops/error.h"
#include "ops/kernels/pool.h"

namespace galley::kernels {
namespace {

TEST(Pool, RunsEveryUnitOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    Pool pool(threads);
    for (int round = 0; round < 300; ++round) {
      const int count = round % 67, grain = 1 + round % 4;
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
      std::atomic<bool> thread_ok{true};
      pool.for_each(count, grain, [&](int begin, int end, int thread) {
        if (thread < 0 || thread >= threads) thread_ok = false;
        for (int i = begin; i < end; ++i) seen[static_cast<std::size_t>(i)].fetch_add(1);
      });
      for (const auto& s : seen) ASSERT_EQ(s.load(), 1);
      ASSERT_TRUE(thread_ok);
    }
  }
}

TEST(Pool, WakesParkedWorkersAndServesAnyCaller) {
  Pool pool(2, 0);  // parks at once
  std::atomic<int> total{0};
  const auto add = [&](int begin, int end, int) { total.fetch_add(end - begin); };
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (pool.statistics().parks == 0 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  EXPECT_GT(pool.statistics().parks, 0U);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    pool.for_each(10, 1, add);
  }
  std::thread other([&] { pool.for_each(10, 1, add); });
  other.join();
  EXPECT_EQ(total.load(), 210);
}

TEST(Pool, SpreadsWorkOverItsThreads) {
  Pool pool(2);
  // The caller's units last until a worker took one: only true concurrency ends this (or the time limit).
  std::atomic<bool> helped{false};
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  pool.for_each(2, 1, [&](int, int, int thread) {
    if (thread != 0) helped = true;
    while (thread == 0 && !helped && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  });
  EXPECT_TRUE(helped);
}

TEST(Pool, RethrowsWhatAUnitThrewAndGoesOn) {
  for (const int threads : {1, 2, 4}) {
    Pool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> ran{0};
      const auto work = [&](int begin, int end, int) {
        for (int i = begin; i < end; ++i) {
          ++ran;
          if (i % 16 == round % 16) throw std::runtime_error("unit failed");
        }
      };
      EXPECT_THROW(pool.for_each(64, 1, work), std::runtime_error);
      EXPECT_GT(ran.load(), 0);
      ran = 0;
      pool.for_each(64, 1, [&](int begin, int end, int) { ran += end - begin; });
      EXPECT_EQ(ran.load(), 64);
    }
  }
}

TEST(Pool, RefusesNoThreads) { EXPECT_THROW(Pool(0), Error); }

}  // namespace
}  // namespace galley::kernels
