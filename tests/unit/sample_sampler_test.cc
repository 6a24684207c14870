#include "sample/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>

#include "sample/logits_math.h"
#include "sample/philox.h"
#include "sample/truncate.h"

namespace galley::sample {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::size_t vocab, unsigned seed, float deviation = 3.0F, float grid = 0.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> logits(vocab);
  for (float& x : logits) {
    x = normal(generator);
    if (grid > 0.0F) x = std::round(x / grid) * grid;  // many equals
  }
  return logits;
}

/// mlx-lm 0.32.2 sample_utils.py, literally: top_p, then min_p, then top_k (equals by id), on log-probabilities.
std::set<std::int32_t> reference_kept(const std::vector<float>& logits, const Params& params) {
  const double max = static_cast<double>(*std::ranges::max_element(logits));
  std::vector<double> probabilities(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) probabilities[i] = std::exp(static_cast<double>(logits[i]) - max);
  std::vector<std::int32_t> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  const auto logit = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
  std::ranges::stable_sort(order, [&](auto a, auto b) { return logit(a) > logit(b); });
  float threshold = -kInfinity;
  if (params.top_p > 0.0F && params.top_p < 1.0F) {
    double total = 0.0;
    for (const double p : probabilities) total += p;
    double above = 0.0;
    for (const auto id : order) {
      if (above >= static_cast<double>(params.top_p) * total) break;
      threshold = logit(id);
      above += probabilities[static_cast<std::size_t>(id)];
    }
  }
  if (params.min_p > 0.0F) threshold = std::max(threshold, logit(order[0]) + std::log(params.min_p));
  std::set<std::int32_t> kept;
  for (const auto id : order) {
    if (logit(id) < threshold) break;
    if (params.top_k > 0 && kept.size() == static_cast<std::size_t>(params.top_k)) break;
    kept.insert(id);
  }
  return kept;
}

TEST(Philox, KnownAnswers) {
  // Random123's kat_vectors.
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(LogitsMath, ExpIsAccurate) {
  for (float x = 0.0F; x > -87.0F; x -= 0.0137F) {
    const double expected = std::exp(static_cast<double>(x));
    ASSERT_NEAR(static_cast<double>(exp_nonpositive(x)) / expected, 1.0, 3e-7) << x;
  }
  EXPECT_EQ(exp_nonpositive(0.0F), 1.0F);
  EXPECT_EQ(exp_nonpositive(-88.0F), 0.0F);
  EXPECT_EQ(exp_nonpositive(-kInfinity), 0.0F);
}

TEST(Sampler, GreedyTakesTheFirstOfEquals) {
  for (const std::size_t vocab : {5U, 255U, 256U, 257U, 1000U}) {
    std::vector<float> logits(vocab, -1.0F);
    logits[3] = logits[vocab - 1] = 2.0F;
    EXPECT_EQ(RowSampler(Params{}).choose(logits).token, 3) << vocab;
    logits[vocab - 1] = 2.5F;
    EXPECT_EQ(RowSampler(Params{}).choose(logits).token, static_cast<std::int32_t>(vocab - 1)) << vocab;
  }
}

TEST(Sampler, EqualSeedAndDrawGiveEqualChoices) {
  Params params{.temperature = 0.9F, .top_k = 40, .top_p = 0.9F, .seed = 1234};
  RowSampler a(params);
  RowSampler b(params);
  RowSampler noise({.temperature = 1.0F, .seed = 5});
  std::set<std::int32_t> seen;
  for (unsigned i = 0; i < 200; ++i) {
    const auto logits = random_logits(1000, i % 3);
    const auto first = a.choose(logits);
    noise.choose(logits);
    EXPECT_EQ(first.token, b.choose(logits).token);
    seen.insert(first.token);
  }
  EXPECT_EQ(a.draws(), 200U);
  EXPECT_GT(seen.size(), 20U);
  // Draw i depends on (seed, i) alone, however the draws before were made.
  RowSampler skipped(params);
  for (int i = 0; i < 7; ++i) skipped.note_argmax();
  RowSampler walked(params);
  const auto logits = random_logits(1000, 9);
  for (unsigned i = 0; i < 7; ++i) walked.choose(random_logits(500, i));
  EXPECT_EQ(skipped.choose(logits).token, walked.choose(logits).token);
}

TEST(Sampler, AbsentSeedsAreFreshAndPresentOnesKept) {
  EXPECT_EQ(RowSampler({.temperature = 1.0F, .seed = 77}).seed(), 77U);
  std::set<std::uint64_t> seeds;
  for (int i = 0; i < 50; ++i) seeds.insert(RowSampler({.temperature = 1.0F}).seed());
  EXPECT_EQ(seeds.size(), 50U);
}

TEST(Sampler, FrequenciesFollowTheDistribution) {
  const std::vector<float> logits{1.0F, 0.0F, -1.0F, 2.0F, -kInfinity, 0.5F};
  for (const float temperature : {0.5F, 1.0F, 2.0F}) {
    std::vector<double> expected(logits.size());
    double total = 0.0;
    for (std::size_t i = 0; i < logits.size(); ++i)
      total += expected[i] = std::exp(static_cast<double>(logits[i] / temperature));
    RowSampler sampler({.temperature = temperature, .seed = 42});
    constexpr int kDraws = 60000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < kDraws; ++i) ++counts[static_cast<std::size_t>(sampler.choose(logits).token)];
    EXPECT_EQ(counts[4], 0);
    double chi2 = 0.0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (i == 4) continue;
      const double mean = kDraws * expected[i] / total;
      chi2 += (counts[i] - mean) * (counts[i] - mean) / mean;
    }
    EXPECT_LT(chi2, 18.5) << temperature;  // 4 degrees of freedom, p = 0.001; the seed is fixed
  }
}

TEST(Sampler, DrawsReachEveryBlockOfALargeVocabulary) {
  const std::vector<float> flat(5000, 0.25F);
  RowSampler sampler({.temperature = 1.0F, .seed = 3});
  std::map<std::int32_t, int> blocks;
  for (int i = 0; i < 20000; ++i) ++blocks[sampler.choose(flat).token / 250];
  EXPECT_EQ(blocks.size(), 20U);
  double chi2 = 0.0;
  for (const auto& [block, count] : blocks) chi2 += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi2, 43.8);  // 19 degrees of freedom, p = 0.001
}

TEST(Truncate, KeepsWhatMlxLmKeeps) {
  int cases = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    const std::size_t vocab = seed % 2 == 0 ? 3000 : 700;
    const bool grid = seed % 3 == 0;
    const auto logits = random_logits(vocab, seed, seed % 5 == 0 ? 0.05F : 2.5F, grid ? 0.25F : 0.0F);
    for (const float top_p : {1.0F, 0.999F, 0.95F, 0.5F, 0.01F}) {
      for (const float min_p : {0.0F, 0.05F, 0.5F}) {
        for (const int top_k : {0, 1, 7, 50, 400}) {
          const Params params{.temperature = 1.0F, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = 1};
          std::set<std::int32_t> kept;
          std::int32_t last = -1;
          for (const Candidate& candidate : truncate(logits, find_maxima(logits), params)) {
            EXPECT_GT(candidate.token, last);
            last = candidate.token;
            kept.insert(last);
          }
          // Sums in another order may tip a token that lies on the border to within rounding.
          Params less = params;
          Params more = params;
          if (top_p < 1.0F) {
            less.top_p = top_p * (1.0F - 1e-6F);
            more.top_p = std::min(top_p * (1.0F + 1e-6F), 0.99999994F);
          }
          const auto least = reference_kept(logits, less);
          const auto most = reference_kept(logits, more);
          ASSERT_TRUE(std::ranges::includes(kept, least) && std::ranges::includes(most, kept))
              << seed << " " << top_p << " " << min_p << " " << top_k << ": " << kept.size() << " of " << least.size()
              << " to " << most.size();
          ASSERT_LE(most.size() - least.size(), grid ? 200U : 2U);
          ++cases;
        }
      }
    }
  }
  EXPECT_EQ(cases, 40 * 5 * 3 * 5);
}

TEST(Truncate, ComesBeforeTemperature) {
  // The nucleus is that of the model's distribution: at any temperature only tokens 0 and 1 are in it.
  const std::vector<float> logits{std::log(0.6F), std::log(0.3F), std::log(0.06F), std::log(0.04F)};
  RowSampler hot({.temperature = 50.0F, .top_p = 0.85F, .seed = 8});
  std::map<std::int32_t, int> counts;
  for (int i = 0; i < 4000; ++i) ++counts[hot.choose(logits).token];
  EXPECT_EQ(counts.size(), 2U);
  EXPECT_NEAR(counts[0], 2000, 150);  // and within it the temperature flattens
}

TEST(Sampler, LogprobsAreTheModels) {
  const auto logits = random_logits(3000, 11);
  double total = 0.0;
  for (const float x : logits) total += std::exp(static_cast<double>(x));
  const Params params{.temperature = 2.0F, .top_k = 3, .seed = 4, .logprobs = true, .top_logprobs = 6};
  const Choice choice = RowSampler(params).choose(logits);
  const auto logprob = [&](std::int32_t id) {
    return static_cast<double>(logits[static_cast<std::size_t>(id)]) - std::log(total);
  };
  EXPECT_NEAR(static_cast<double>(choice.logprob), logprob(choice.token), 2e-6);
  ASSERT_EQ(choice.top.size(), 6U);
  std::vector<float> sorted = logits;
  std::ranges::sort(sorted, std::greater<>());
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(logits[static_cast<std::size_t>(choice.top[i].token)], sorted[i]);
    EXPECT_NEAR(static_cast<double>(choice.top[i].logprob), logprob(choice.top[i].token), 2e-6);
  }
  // Normalized input is reported bit for bit.
  std::vector<float> logprobs = logits;
  for (float& x : logprobs) x -= static_cast<float>(std::log(total));
  const Choice normalized = RowSampler(params).choose(logprobs, /*normalized=*/true);
  EXPECT_EQ(normalized.token, choice.token);
  EXPECT_EQ(normalized.logprob, logprobs[static_cast<std::size_t>(normalized.token)]);
  // All of them, and ties by token id.
  const Choice all = RowSampler({.logprobs = true, .top_logprobs = 9}).choose(std::vector<float>{1, 2, 2, 1});
  ASSERT_EQ(all.top.size(), 4U);
  EXPECT_EQ(all.top[0].token, 1);
  EXPECT_EQ(all.top[1].token, 2);
  EXPECT_EQ(all.top[2].token, 0);
  EXPECT_EQ(all.top[3].token, 3);
}

TEST(Sampler, NonFiniteLogitsAreAFault) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Params& params : {Params{}, Params{.temperature = 1.0F, .top_p = 0.9F, .seed = 1, .logprobs = true}}) {
    for (const std::size_t at : {0U, 300U, 598U}) {
      auto logits = random_logits(599, 1);
      logits[at] = nan;
      EXPECT_FALSE(RowSampler(params).choose(logits).finite);
      logits[at] = kInfinity;
      EXPECT_FALSE(RowSampler(params).choose(logits).finite);
      logits[at] = -kInfinity;  // a masked token is no fault
      EXPECT_TRUE(RowSampler(params).choose(logits).finite);
    }
    EXPECT_FALSE(RowSampler(params).choose(std::vector<float>(600, -kInfinity)).finite);
  }
}

TEST(Sampler, ExtremeTemperaturesStayFinite) {
  const auto logits = random_logits(2000, 5, 30.0F);
  const auto best = RowSampler(Params{}).choose(logits).token;
  for (const float temperature : {1e-38F, 1e-6F}) {
    RowSampler sampler({.temperature = temperature, .seed = 6});
    for (int i = 0; i < 20; ++i) EXPECT_EQ(sampler.choose(logits).token, best);
  }
  RowSampler hot({.temperature = 1e30F, .seed = 6});
  std::set<std::int32_t> seen;
  for (int i = 0; i < 200; ++i) seen.insert(hot.choose(logits).token);
  EXPECT_GT(seen.size(), 150U);
}

// Not a check: prints microseconds a row when GALLEY_SAMPLE_TIMES is set.
TEST(Sampler, Times) {
  if (std::getenv("GALLEY_SAMPLE_TIMES") == nullptr) GTEST_SKIP() << "set GALLEY_SAMPLE_TIMES to see times";
  const std::map<std::string, Params> cases{
      {"greedy", {}},
      {"greedy+logprobs", {.logprobs = true, .top_logprobs = 5}},
      {"temperature", {.temperature = 0.8F, .seed = 1}},
      {"top_k", {.temperature = 0.8F, .top_k = 40, .seed = 1}},
      {"top_p", {.temperature = 0.8F, .top_p = 0.95F, .seed = 1}},
      {"top_p+top_k+logprobs", {.temperature = 0.8F, .top_k = 40, .top_p = 0.95F, .seed = 1, .logprobs = true}},
  };
  for (const float deviation : {3.0F, 0.3F, 2.0F}) {
    auto logits = random_logits(49152, 1, deviation);
    for (std::size_t i = 0; deviation == 2.0F && i < 60; ++i) {  // as a language model's: a few tokens hold the mass
      logits[i * 700] = 16.0F - 0.15F * static_cast<float>(i);
    }
    for (const auto& [name, params] : cases) {
      RowSampler sampler(params);
      constexpr int kRounds = 100;
      const std::clock_t begin = std::clock();  // time of the processor: neighbours don't count
      for (int i = 0; i < kRounds; ++i) ASSERT_TRUE(sampler.choose(logits).finite);
      const double took = 1e6 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
      std::printf("%-22s deviation %.1f  %7.1f us\n", name.c_str(), static_cast<double>(deviation), took / kRounds);
    }
  }
}

}  // namespace
}  // namespace galley::sample
