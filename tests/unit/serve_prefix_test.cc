// Prompts that begin alike are computed and stored once, rows that must make room go on later, and nobody can tell from
// the answers.
#include <gtest/gtest.h>

#include <vector>

#include "serve_fused.h"

namespace galley::testing {
namespace {

TEST(PrefixReuse, AnAnswerIsTheSameColdOrFromTheCache) {
  const auto forward = make_forward();
  Server server(*forward);
  const Tokens system = text(100, 1), question = system + text(20, 2);
  server.ask(question, 40);
  server.run();
  const Tokens& said = server.answers[0]->tokens;
  // The same again, another question, and the next turn of the same conversation.
  const std::vector<Tokens> prompts{question, system + text(33, 3), question + said + text(9, 4), text(70, 5)};
  // All but the last token; all that is common; the whole blocks of 32 of a conversation that went on; nothing.
  const std::vector<int> cached{119, 100, 128, 0};
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const std::size_t n = server.ask(prompts[i], 30);
    server.run();
    EXPECT_TRUE(server.answers[n]->says(alone(prompts[i], 30))) << i;
    EXPECT_EQ(server.answers[n]->usage.cached_tokens, cached[i]) << i;
    EXPECT_EQ(server.answers[n]->usage.prompt_tokens, static_cast<int>(prompts[i].size()));
  }
  EXPECT_EQ(forward->kv().used_bytes, 0U);
  EXPECT_EQ(forward->kv().reserved_bytes, 0U);
  EXPECT_GT(forward->kv().cached_bytes, 0U);
}

TEST(PrefixReuse, ContiguousRowsShareNothingAndSayTheSame) {
  const auto forward = make_forward(kBudget, std::nullopt, 400);
  Server server(*forward);
  const Tokens prompt = text(100, 1);
  EXPECT_EQ(forward->max_row_tokens(), 400);
  for (int i = 0; i < 3; ++i) server.ask(prompt + text(20 + i, 2), 30);
  for (int i = 0; i < 8; ++i) server.scheduler.tick();
  EXPECT_EQ(forward->kv().used_bytes, 3 * forward->bytes_for(1));
  EXPECT_EQ(forward->bytes_for(1), forward->bytes_for(400));
  server.run();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(server.answers[static_cast<std::size_t>(i)]->says(alone(prompt + text(20 + i, 2), 30)));
    EXPECT_EQ(server.answers[static_cast<std::size_t>(i)]->usage.cached_tokens, 0);
  }
  EXPECT_EQ(forward->kv().used_bytes + forward->kv().cached_bytes, 0U);
}

TEST(PrefixReuse, AtLeastTheLastTokenIsComputed) {
  const auto forward = make_forward();
  Server server(*forward);
  const Tokens prompt = text(64, 1);  // exactly two blocks
  server.ask(prompt, 5);
  server.run();
  server.ask(prompt, 5);
  server.run();
  EXPECT_EQ(server.answers[1]->usage.cached_tokens, 63);
  EXPECT_TRUE(server.answers[1]->says(*server.answers[0]));
}

TEST(PrefixReuse, APartOfABlockIsCopiedAndTheOriginalStays) {
  const auto forward = make_forward();
  Server server(*forward);
  const Tokens first = text(50, 1) + text(30, 2), second = text(50, 1) + text(30, 3);  // they part within a block
  for (const Tokens& prompt : {first, second, first, second}) {
    const std::size_t n = server.ask(prompt, 20);
    server.run();
    EXPECT_TRUE(server.answers[n]->says(alone(prompt, 20)));
  }
  EXPECT_EQ(server.answers[1]->usage.cached_tokens, 50);
  EXPECT_EQ(server.answers[2]->usage.cached_tokens, 79);
  // Of a row that still runs, too: its block is not full yet.
  server.ask(text(40, 7), 30);
  server.scheduler.tick();
  const std::size_t n = server.ask(text(36, 7) + text(9, 8), 30);
  server.run();
  EXPECT_EQ(server.answers[n]->usage.cached_tokens, 36);
  EXPECT_TRUE(server.answers[n]->says(alone(text(36, 7) + text(9, 8), 30)));
  EXPECT_TRUE(server.answers[n - 1]->says(alone(text(40, 7), 30)));
}

TEST(PrefixReuse, ManyRowsUnderOneLongPromptCostLittleMoreThanOne) {
  const Tokens system = text(1000, 1);
  const auto forward = make_forward(40'000'000);
  Server server(*forward, 32, 256);
  std::size_t own = 0;
  for (int i = 0; i < 32; ++i) {
    const Tokens question = text(20 + i, 10 + i);
    own += question.size();
    server.ask(system + question, 10);
  }
  std::size_t most = 0;
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    most = std::max(most, forward->kv().used_bytes);
  }
  EXPECT_EQ(server.tally.prompt_tokens, system.size() + own);
  // Of each row, a part of a block is not used, and the beginning of its first own block is a copy.
  const std::size_t tokens = system.size() + own + 32U * 10U;
  EXPECT_LE(most, forward->bytes_for(static_cast<int>(tokens)) * 115 / 100 + forward->bytes_for(32 * 32));
}

TEST(PrefixReuse, RowsThatArriveTogetherComputeTheirCommonBeginningOnce) {
  const Tokens system = text(200, 1);
  std::vector<Tokens> prompts;
  for (int i = 0; i < 8; ++i) prompts.push_back(system + text(10 + i, 10 + i));
  const auto forward = make_forward();
  Server server(*forward);
  std::size_t own = 0;
  for (const Tokens& prompt : prompts) {
    server.ask(prompt, 12);
    own += prompt.size() - system.size();
  }
  server.run();
  EXPECT_EQ(server.tally.prompt_tokens, system.size() + own);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_TRUE(server.answers[i]->says(alone(prompts[i], 12))) << i;
    EXPECT_EQ(server.answers[i]->usage.cached_tokens, i == 0 ? 0 : 200);
  }
}

TEST(PrefixReuse, WhenTheFirstOfThemLeavesAnotherGoesOn) {
  const Tokens system = text(300, 1);
  const auto forward = make_forward();
  Server server(*forward, 8, 32);
  const auto ticket = std::make_shared<serve::Ticket>();
  server.ask(system + text(5, 2), 10, ticket);
  server.ask(system + text(6, 3), 10);
  server.ask(system + text(7, 4), 10);
  for (int i = 0; i < 3; ++i) server.scheduler.tick();
  ticket->cancel();
  server.run();
  EXPECT_TRUE(server.answers[1]->says(alone(system + text(6, 3), 10)));
  EXPECT_TRUE(server.answers[2]->says(alone(system + text(7, 4), 10)));
  EXPECT_EQ(server.answers[2]->usage.cached_tokens, 300);
  EXPECT_EQ(forward->kv().used_bytes, 0U);
}

TEST(PrefixReuse, RowsThatComputedTheSameBlocksShareThemAfterwards) {
  // The second joins when the first has begun to decode; both then say the same, block by block.
  const auto forward = make_forward();
  Server server(*forward);
  const Tokens prompt = text(40, 1);
  server.ask(prompt, 80);
  server.ask(prompt, 80);
  for (int i = 0; i < 40; ++i) server.scheduler.tick();
  const auto block = forward->bytes_for(32);
  // 40 + some 38 tokens are three blocks for each; at least the full ones are one and the same.
  EXPECT_LE(forward->kv().used_bytes, 4 * block);
  server.run();
  EXPECT_TRUE(server.answers[0]->says(*server.answers[1]));
}

TEST(PrefixReuse, LiveRowsAreNeverEvictedAndTheBudgetHolds) {
  // Room for 12 blocks: texts of 3 to 5 blocks keep pushing each other out of the cache.
  const auto probe = make_forward();
  const std::size_t block = probe->bytes_for(32);
  const auto forward = make_forward(12 * block);
  Server server(*forward);
  std::vector<Tokens> prompts;
  for (int i = 0; i < 40; ++i) prompts.push_back(text(64, i / 3 % 4) + text(8 + i % 50, 100 + i % 11));
  for (const Tokens& prompt : prompts) server.ask(prompt, 6 + static_cast<int>(prompt.size()) % 9);
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    const models::KvUsage kv = forward->kv();
    ASSERT_LE(kv.used_bytes + kv.cached_bytes, 12 * block);
  }
  int cached = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const int asked = 6 + static_cast<int>(prompts[i].size()) % 9;
    EXPECT_TRUE(server.answers[i]->ended);
    EXPECT_TRUE(server.answers[i]->says(alone(prompts[i], asked))) << i;
    cached += server.answers[i]->usage.cached_tokens;
  }
  EXPECT_GT(cached, 0);
  EXPECT_EQ(forward->kv().used_bytes, 0U);
  EXPECT_EQ(forward->kv().reserved_bytes, 0U);
}

TEST(Preemption, RowsThatMadeRoomAnswerAsIfTheyHadNot) {
  // Eight rows that end with five blocks each, in a pool of fourteen.
  const std::size_t budget = 14 * make_forward()->bytes_for(32);
  const auto solo = [](const Tokens& prompt, int tokens, auto seed) { return alone(prompt, tokens, seed); };
  for (const std::optional<std::size_t> cache : {std::optional<std::size_t>(), std::optional<std::size_t>(0)}) {
    expect_that_preemption_changes_nothing(*make_forward(budget, cache), budget, 5, 150, solo);
  }
}

TEST(Preemption, TheYoungestGoesAndReturnsToItsPlace) {
  const std::size_t block = make_forward()->bytes_for(32);
  const auto forward = make_forward(7 * block, 0);
  Server server(*forward);
  for (int i = 0; i < 4; ++i) server.ask(text(30, i), 100);  // each ends with five blocks
  std::vector<std::size_t> order;
  std::vector<bool> seen(4, false);
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    for (std::size_t i = 0; i < 4; ++i) {
      if (server.answers[i]->ended && !seen[i]) {
        seen[i] = true;
        order.push_back(i);
      }
    }
  }
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 2, 3}));
  EXPECT_GT(server.tally.preempted, 0U);
}

TEST(PrefixReuse, ACapOnTheCacheIsKept) {
  const auto probe = make_forward();
  const std::size_t block = probe->bytes_for(32);
  const auto forward = make_forward(kBudget, 2 * block);
  Server server(*forward);
  server.ask(text(200, 1), 5);
  server.run();
  EXPECT_EQ(forward->kv().cached_bytes, 2 * block);
  server.ask(text(200, 1), 5);
  server.run();
  EXPECT_EQ(server.answers[1]->usage.cached_tokens, 64) << "a text's beginning is kept longest";
}

}  // namespace
}  // namespace galley::testing
