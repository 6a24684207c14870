// Two thousand requests of random lengths with random cancels, on a budget that keeps pushing rows out: every answer is
// the one the request gets alone, and in the end nothing is held but the cache.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "serve_fused.h"

namespace galley::testing {
namespace {

struct Asked {
  std::size_t answer;
  int prompt;
  int max_tokens;
  std::optional<std::uint64_t> seed;
  std::shared_ptr<serve::Ticket> ticket;
};

/// `forward`: with too little room for all; `solo` answers without a cache.
void soak(models::FusedForward& forward, models::FusedForward& solo, int requests) {
  constexpr int kPrompts = 40, kRows = 8;
  std::mt19937 random(20);
  const auto up_to = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
  // Prompts that share beginnings of all lengths, with whole blocks and parts of blocks.
  std::vector<Tokens> prompts;
  for (int i = 0; i < kPrompts; ++i) prompts.push_back(text(up_to(90), up_to(3)) + text(1 + up_to(60), 10 + i));

  // A long answer begins with each shorter one, so one run alone a prompt (and seed) tells what all must be.
  constexpr int kLongest = 60;
  std::map<std::pair<int, std::optional<std::uint64_t>>, Answer> known;
  const auto expected = [&](int prompt, std::optional<std::uint64_t> seed) -> const Answer& {
    const auto [at, added] = known.try_emplace({prompt, seed});
    if (added) at->second = alone_on(solo, prompts[static_cast<std::size_t>(prompt)], kLongest, seed);
    return at->second;
  };

  Server server(forward, kRows, 48);
  std::vector<Asked> asked;
  int cancelled = 0;
  while (static_cast<int>(asked.size()) < requests || !server.scheduler.idle()) {
    while (static_cast<int>(asked.size()) < requests && server.scheduler.pending() < 4) {
      Asked next{0, up_to(kPrompts - 1), 1 + up_to(kLongest - 1), std::nullopt, std::make_shared<serve::Ticket>()};
      if (up_to(3) == 0) next.seed = static_cast<std::uint64_t>(up_to(2));
      next.answer = server.ask(prompts[static_cast<std::size_t>(next.prompt)], next.max_tokens, next.ticket, next.seed);
      asked.push_back(next);
    }
    if (up_to(30) == 0) {
      Asked& victim = asked[asked.size() - 1 - static_cast<std::size_t>(up_to(9)) % asked.size()];
      if (!victim.ticket->cancelled() && !server.answers[victim.answer]->ended) ++cancelled;
      victim.ticket->cancel();
    }
    server.scheduler.tick();
    const models::KvUsage kv = forward.kv();
    ASSERT_LE(kv.used_bytes + kv.cached_bytes, kv.budget_bytes);
    ASSERT_LE(kv.reserved_bytes, kv.budget_bytes);
  }

  for (const Asked& request : asked) {
    const Answer& answer = *server.answers[request.answer];
    const Answer& whole = expected(request.prompt, request.seed);
    ASSERT_TRUE(answer.ended || request.ticket->cancelled());
    if (answer.ended && !request.ticket->cancelled()) {
      ASSERT_EQ(answer.tokens.size(), static_cast<std::size_t>(request.max_tokens));
    }
    // What a cancelled request got before it ended is right, too.
    for (std::size_t i = 0; i < answer.tokens.size(); ++i) {
      ASSERT_EQ(answer.tokens[i], whole.tokens[i]) << "prompt " << request.prompt << ", token " << i;
      ASSERT_EQ(answer.bits[i], whole.bits[i]) << "prompt " << request.prompt << ", token " << i;
    }
  }
  EXPECT_GT(server.tally.preempted, static_cast<unsigned>(requests) / 100);
  EXPECT_GT(cancelled, requests / 40);
  const models::KvUsage kv = forward.kv();
  EXPECT_EQ(kv.used_bytes, 0U);
  EXPECT_EQ(kv.reserved_bytes, 0U);
  EXPECT_EQ(kv.unused_bytes, 0U);
  EXPECT_GT(kv.cached_bytes, 0U);
  EXPECT_EQ(server.scheduler.active(), 0);
  EXPECT_EQ(server.scheduler.pending(), 0);
}

TEST(Soak, TwoThousandRequestsUnderPressure) {
  const std::size_t block = make_forward()->bytes_for(32);
  soak(*make_forward(9 * block), *make_forward(kBudget, 0), 2000);  // a row needs up to 7, and there are 8
}

TEST(Soak, OfAModelWithSlidingLayers) {
  // A row needs up to 17 units, of which 7 are for the whole text.
  soak(*make_sliding(24 * kSlidingUnit), *make_sliding(kBudget, 0), 800);
}

}  // namespace
}  // namespace galley::testing
