// The prompt cache of contiguous caches: which of them a prompt gets, cut to what is common, and what goes to make
// room. Every column holds its token's number, so what is handed out can be read back.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <random>
#include <vector>

#include "kv/contiguous.h"
#include "kv/prompt_cache.h"
#include "kv/rotating.h"

namespace galley::kv {
namespace {

namespace mx = mlx::core;
using Tokens = std::vector<std::int32_t>;

constexpr std::size_t kPlenty = 1U << 30;
constexpr int kWindow = 8;

mx::array numbers(const Tokens& tokens) {
  const std::vector<float> values(tokens.begin(), tokens.end());
  return mx::array(values.data(), {1, 1, static_cast<int>(tokens.size()), 1});
}

/// Two layers that were fed `tokens`: a full one, and with `window` a ring.
PromptCache::Layers fed(const Tokens& tokens, bool window) {
  PromptCache::Layers layers;
  layers.push_back(std::make_unique<KvCache>());
  if (window) layers.push_back(std::make_unique<RotatingKvCache>(kWindow));
  for (const auto& layer : layers) layer->update_and_fetch(numbers(tokens), numbers(tokens));
  return layers;
}

Tokens read(const RowCache& layer) {
  mx::array keys = mx::contiguous(layer.buffer()->slice(0, layer.size()).keys);
  keys.eval();
  return {keys.data<float>(), keys.data<float>() + keys.size()};
}

void put(PromptCache& cache, const Tokens& tokens, bool window = false, int kind = 0) {
  cache.put(kind, tokens, fed(tokens, window));
}

/// How many tokens of the prompt are reused; what is handed out must be these.
std::size_t taken(PromptCache& cache, const Tokens& prompt, int kind = 0) {
  const auto hit = cache.take(kind, prompt);
  if (!hit) return 0;
  EXPECT_LT(hit->tokens, prompt.size());
  const Tokens reused(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(hit->tokens));
  EXPECT_EQ(read(*hit->layers.front()), reused);
  return hit->tokens;
}

TEST(PromptCache, AnEmptyOneHasNothing) {
  PromptCache cache(kPlenty);
  EXPECT_EQ(taken(cache, {1, 2, 3}), 0U);
  EXPECT_EQ(cache.nbytes(), 0U);
}

TEST(PromptCache, APromptGoesOnWhereATextEnded) {
  PromptCache cache(kPlenty);
  put(cache, {1, 2, 3, 4});
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5, 6}), 4U);
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5, 6}), 4U) << "it stays";
}

TEST(PromptCache, TheLastTokenIsAlwaysComputed) {
  PromptCache cache(kPlenty);
  put(cache, {1, 2, 3, 4});
  EXPECT_EQ(taken(cache, {1, 2, 3, 4}), 3U);
  EXPECT_EQ(taken(cache, {1, 2, 3}), 2U);
  EXPECT_EQ(taken(cache, {1}), 0U);
}

TEST(PromptCache, WhatDiffersIsCutOff) {
  PromptCache cache(kPlenty);
  put(cache, {1, 2, 3, 4, 5});
  put(cache, {1, 2, 9, 9, 9, 9});
  EXPECT_EQ(taken(cache, {1, 2, 3, 7, 7}), 3U);
  EXPECT_EQ(taken(cache, {1, 2, 8}), 2U);
  EXPECT_EQ(taken(cache, {2, 2, 8}), 0U);
}

TEST(PromptCache, ALongerTextReplacesItsBeginnings) {
  PromptCache cache(kPlenty);
  put(cache, {1, 2});
  put(cache, {1, 2, 3});
  put(cache, {1, 2, 4});
  EXPECT_EQ(cache.size(), 2U);
  put(cache, {1, 2, 4});
  EXPECT_EQ(cache.size(), 2U);
  EXPECT_EQ(taken(cache, {1, 2, 4, 5}), 3U);
}

TEST(PromptCache, ARingThatHasWrappedCanOnlyBeContinued) {
  PromptCache cache(kPlenty);
  const Tokens text{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  put(cache, {1, 2, 3}, true);
  put(cache, text, true);
  EXPECT_EQ(cache.size(), 2U) << "the shorter text can't be cut out of the longer one";
  Tokens next = text;
  next.push_back(11);
  EXPECT_EQ(taken(cache, next), 10U);
  next[9] = 12;
  EXPECT_EQ(taken(cache, next), 3U);
  EXPECT_EQ(taken(cache, text), 3U);
  const auto hit = cache.take(0, Tokens{1, 2, 7});
  ASSERT_TRUE(hit);
  EXPECT_EQ(read(*hit->layers[1]), (Tokens{1, 2})) << "this one can be cut";
}

TEST(PromptCache, WritingToWhatWasTakenLeavesTheRestAsItWas) {
  PromptCache cache(kPlenty);
  put(cache, {1, 2, 3, 4});
  auto first = cache.take(0, Tokens{1, 2, 9, 9});
  ASSERT_TRUE(first);
  first->layers.front()->update_and_fetch(numbers({9, 9, 9}), numbers({9, 9, 9}));
  EXPECT_EQ(read(*first->layers.front()), (Tokens{1, 2, 9, 9, 9}));
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5}), 4U);
}

TEST(PromptCache, KindsAreKeptApart) {
  PromptCache cache(kPlenty);
  put(cache, {1, 2, 3, 4}, false, 1);
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5}, 0), 0U);
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5}, 2), 0U);
  put(cache, {1, 2}, false, 0);
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5}, 0), 2U);
  EXPECT_EQ(taken(cache, {1, 2, 3, 4, 5}, 1), 4U);
}

TEST(PromptCache, BytesAreBoundAndWhatWasUsedLongestAgoGoesFirst) {
  std::size_t each = 0;
  for (const auto& layer : fed({1, 2}, false)) each += layer->nbytes();
  PromptCache cache(3 * each);
  put(cache, {1, 1});
  put(cache, {2, 2});
  put(cache, {3, 3});
  EXPECT_EQ(cache.nbytes(), 3 * each);
  EXPECT_EQ(taken(cache, {1, 1, 1}), 2U);  // used again
  put(cache, {4, 4});
  EXPECT_EQ(cache.nbytes(), 3 * each);
  EXPECT_EQ(taken(cache, {2, 2, 2}), 0U);
  EXPECT_EQ(taken(cache, {1, 1, 1}), 2U);
  cache.shrink_to(each + 1);
  EXPECT_EQ(cache.size(), 1U);
  EXPECT_EQ(taken(cache, {1, 1, 1}), 2U);
  cache.shrink_to(each - 1);
  EXPECT_EQ(cache.size(), 0U);
  EXPECT_EQ(cache.nbytes(), 0U);
  put(cache, {5, 5});
  cache.clear();
  EXPECT_EQ(taken(cache, {5, 5, 5}), 0U);
  EXPECT_EQ(cache.nbytes(), 0U);
}

TEST(PromptCache, FindsWhatASearchThroughAllWouldFind) {
  std::mt19937 random(3);  // NOLINT: the same texts every time
  const auto text = [&] {
    Tokens tokens(2 + random() % 6);
    for (auto& token : tokens) token = static_cast<std::int32_t>(random() % 3);
    return tokens;
  };
  const auto common = [](const Tokens& a, const Tokens& b) {
    std::size_t n = 0;
    while (n < std::min(a.size(), b.size()) && a[n] == b[n]) ++n;
    return n;
  };
  for (int round = 0; round < 40; ++round) {
    PromptCache cache(kPlenty);
    std::vector<Tokens> texts;
    for (int i = 0; i < 12; ++i) put(cache, texts.emplace_back(text()));
    for (int i = 0; i < 20; ++i) {
      const Tokens prompt = text();
      std::size_t most = 0;
      for (const Tokens& known : texts) most = std::max(most, common(known, prompt));
      EXPECT_EQ(taken(cache, prompt), std::min(most, prompt.size() - 1));
    }
  }
}

}  // namespace
}  // namespace galley::kv
