// Rows on quantized KV, one layer at 4 bits and one at 8: they share blocks and make room for each other, and nobody
// can tell from the answers.
#include <gtest/gtest.h>

#include <vector>

#include "serve_fused.h"

namespace galley::testing {
namespace {

TEST(QuantizedKv, AnAnswerIsTheSameColdOrFromTheCache) {
  const auto forward = make_forward(kBudget, std::nullopt, 0, mixed_kv());
  Server server(*forward);
  const Tokens system = text(100, 1), question = system + text(20, 2);
  server.ask(question, 40);
  server.run();
  const Tokens& said = server.answers[0]->tokens;
  EXPECT_FALSE(server.answers[0]->says(alone(question, 40, std::nullopt, KvFormats(2))))
      << "quantized KV leaves no trace: is it quantized?";
  // The same again, another question, the next turn of the conversation, and one that parts within a block.
  const std::vector<Tokens> prompts{question, system + text(33, 3), question + said + text(9, 4),
                                    text(50, 1) + text(30, 3)};
  const std::vector<int> cached{119, 100, 128, 50};
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const std::size_t n = server.ask(prompts[i], 30);
    server.run();
    EXPECT_TRUE(server.answers[n]->says(alone(prompts[i], 30, std::nullopt, mixed_kv()))) << i;
    EXPECT_EQ(server.answers[n]->usage.cached_tokens, cached[i]) << i;
  }
}

TEST(QuantizedKv, RowsThatMadeRoomAnswerAsIfTheyHadNot) {
  const std::size_t block = make_forward(kBudget, std::nullopt, 0, mixed_kv())->bytes_for(32);
  // Of 128 bytes a head, token and layer, 64 codes of 4 bits and one group's scale and bias, or 64 of 8 and two
  // groups'.
  EXPECT_EQ(block * (128 + 128), make_forward(kBudget, std::nullopt, 0, KvFormats(2))->bytes_for(32) * (36 + 72));
  const auto forward = make_forward(10 * block, std::nullopt, 0, mixed_kv());
  Server server(*forward);
  std::vector<Tokens> prompts;
  const auto seed_of = [](int i) { return i % 2 == 0 ? std::nullopt : std::optional<std::uint64_t>(100 + i); };
  for (int i = 0; i < 6; ++i) {
    prompts.push_back(text(20 + 5 * i, 3 + i));
    server.ask(prompts.back(), 100, nullptr, seed_of(i));
  }
  while (!server.scheduler.idle()) {
    server.scheduler.tick();
    ASSERT_LE(forward->kv().used_bytes + forward->kv().cached_bytes, 10 * block);
  }
  EXPECT_GT(server.tally.preempted, 0U);
  for (int i = 0; i < 6; ++i) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_TRUE(server.answers[at]->says(alone(prompts[at], 100, seed_of(i), mixed_kv()))) << i;
  }
  EXPECT_EQ(forward->kv().used_bytes, 0U);
}

}  // namespace
}  // namespace galley::testing
