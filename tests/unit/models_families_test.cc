// Every family on tiny random checkpoints: on the fused rung a row's bits don't depend on who shares its steps, the
// chunks or the threads; and the fused numbers are those of the stock rung, with all ops fused and with each one off.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory_checkpoint.h"
#include "models/fused_forward.h"
#include "models/model.h"
#include "models/runtime.h"
#include "models_rows.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {
namespace {

using galley::testing::greedy_with_logprobs;
using galley::testing::MemoryCheckpoint;
using galley::testing::run;
using galley::testing::Said;
using galley::testing::Script;
using galley::testing::seeded;

struct Family {
  std::string name;
  std::optional<ops::AffineFormat> weights;  ///< nullopt: plain float32
};

void PrintTo(const Family& family, std::ostream* out) {
  *out << family.name;
  if (family.weights) *out << " " << family.weights->bits << "-bit, groups of " << family.weights->group;
}

MemoryCheckpoint checkpoint_of(const Family& family) {
  Config config;
  config.family = family.name;
  config.hidden = 128;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = family.name == "qwen2" ? 32 : 48;
  config.intermediate = 192;
  config.vocab = 160;
  config.context = 512;
  config.norm_eps = 1e-6F;
  config.rope_base = 1e5F;
  config.tied_head = family.name != "qwen3";
  if (family.name == "qwen3_moe") {
    config.experts.count = 12;
    config.experts.per_token = 3;
    config.experts.intermediate = 64;
    config.experts.normalized = true;
    config.experts.dense_layers = {1};
  }
  if (family.name == "gemma3") {
    config.sliding = {.window = 24, .pattern = 3, .rope_base = 1e4F};
    config.query_scalar = 40.0F;
  }
  MemoryCheckpoint checkpoint(config);
  checkpoint.quantized = family.weights;
  return checkpoint;
}

std::vector<std::int32_t> prompt_of(int length, int salt) {
  std::vector<std::int32_t> ids;
  for (int i = 0; i < length; ++i) ids.push_back((i * 31 + i * i * 7 + salt * 53) % 160);
  return ids;
}

class Families : public ::testing::TestWithParam<Family> {
 protected:
  static std::unique_ptr<FusedForward> forward(const Family& family, const std::string& isa, int threads) {
    const MemoryCheckpoint checkpoint = checkpoint_of(family);
    auto ops = std::make_shared<ops::FusedOps>(kernels::select_isa(isa), threads);
    std::shared_ptr<const Model> model = load_model(checkpoint, *ops);
    return std::make_unique<FusedForward>(std::move(ops), std::move(model),
                                          FusedForwardOptions{40'000'000, kernels::KvElement::f16});
  }
};

TEST_P(Families, AloneInABatchChunkedAndThreaded) {
  for (const std::string& isa : kernels::supported_isas()) {
    const bool slow = isa == "scalar";  // a hundred times: shorter texts, the same cases
    std::vector<Script> all;
    const std::vector<int> lengths = slow ? std::vector<int>{37, 1, 18, 5} : std::vector<int>{37, 1, 18, 90, 5, 64, 23};
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto salt = static_cast<int>(i);
      all.push_back({prompt_of(lengths[i], salt), i % 2 == 0 ? greedy_with_logprobs() : seeded(70 + i),
                     slow ? 3 : 8 + salt * 2, salt / 3 * 4});
    }
    const auto one = forward(GetParam(), isa, 1);
    std::vector<Said> alone;
    for (Script script : all) {
      script.arrival = 0;
      alone.push_back(run(*one, {script}, 512).front());
      ASSERT_EQ(static_cast<int>(alone.back().tokens.size()), script.tokens);
    }
    ASSERT_NE(alone[0], alone[2]) << "different rows say different things, else this test shows nothing";
    const auto two = forward(GetParam(), isa, 2);
    for (FusedForward* f : {one.get(), two.get()}) {
      for (const int chunk : slow ? std::vector<int>{7} : std::vector<int>{512, 16, 7, 1}) {
        const std::vector<Said> together = run(*f, all, chunk);
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_EQ(together[i], alone[i]) << "row " << i << ", " << isa << ", chunks of " << chunk << ", "
                                           << (f == one.get() ? "one thread" : "two threads");
        }
      }
    }
  }
}

/// Mean KL divergence of `other` from `right`, both logits [n, vocab].
double divergence(const std::vector<float>& right, const std::vector<float>& other, std::size_t vocab) {
  EXPECT_EQ(right.size(), other.size());
  double total = 0;
  for (std::size_t at = 0; at < right.size(); at += vocab) {
    const auto normalizer = [&](const std::vector<float>& x) {
      double sum = 0;
      for (std::size_t i = at; i < at + vocab; ++i) sum += std::exp(static_cast<double>(x[i]));
      return std::log(sum);
    };
    const double a = normalizer(right), b = normalizer(other);
    for (std::size_t i = at; i < at + vocab; ++i) {
      const double p = static_cast<double>(right[i]) - a, q = static_cast<double>(other[i]) - b;
      total += std::exp(p) * (p - q);
    }
  }
  return total / static_cast<double>(right.size() / vocab);
}

TEST_P(Families, FusedIsCloseToStockWithEachOpOnAndOff) {
  const MemoryCheckpoint checkpoint = checkpoint_of(GetParam());
  const auto prompt = prompt_of(80, 3);
  const auto vocab = static_cast<std::size_t>(checkpoint.config().vocab);
  RuntimeOptions options;
  options.kv_dtype = "f32";
  options.fused = false;
  const std::vector<float> stock = prompt_logits(checkpoint, options, prompt);
  options.fused = true;
  // Plain weights multiply fp32 activations: rounding alone. Quantized ones multiply int8 activations.
  const double bound = GetParam().weights ? 0.02 : 1e-6;
  std::vector<std::vector<std::string>> cases{{}, kFusedOpNames};
  for (const std::string& op : kFusedOpNames) cases.push_back({op});
  for (const std::string& isa : kernels::supported_isas()) {
    options.isa = isa;
    for (const auto& off : cases) {
      options.switched_off = off;
      const double kl = divergence(stock, prompt_logits(checkpoint, options, prompt), vocab);
      EXPECT_LT(kl, bound) << isa << " without " << (off.empty() ? "nothing" : off.front()) << " (" << off.size()
                           << ")";
      EXPECT_GE(kl, -1e-9);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, Families,
                         ::testing::Values(Family{"gemma3", std::nullopt}, Family{"gemma3", {{4, 32}}},
                                           Family{"gemma3", {{8, 64}}}, Family{"llama", std::nullopt},
                                           Family{"llama", {{4, 32}}}, Family{"qwen2", std::nullopt},
                                           Family{"qwen2", {{4, 32}}}, Family{"qwen2", {{8, 64}}},
                                           Family{"qwen3", std::nullopt}, Family{"qwen3", {{4, 64}}},
                                           Family{"qwen3", {{8, 32}}}, Family{"qwen3_moe", std::nullopt},
                                           Family{"qwen3_moe", {{4, 32}}}, Family{"qwen3_moe", {{8, 64}}}),
                         [](const auto& p) {
                           const auto& w = p.param.weights;
                           return p.param.name + (w ? "_" + std::to_string(w->bits) + "bit_g" + std::to_string(w->group)
                                                    : std::string("_f32"));
                         });

}  // namespace
}  // namespace galley::models
