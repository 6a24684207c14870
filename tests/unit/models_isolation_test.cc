// A step that throws costs the row at fault its answer, and nobody else anything: rows are rerun one by one.
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "memory_checkpoint.h"
#include "models/fused_forward.h"
#include "models/model.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {
namespace {

using galley::testing::MemoryCheckpoint;

/// A model whose forward throws while it is recorded, at the calls whose numbers are given.
class Failing final : public Model {
 public:
  Failing(std::shared_ptr<const Model> inner, std::vector<int> at) : inner_(std::move(inner)), at_(std::move(at)) {}
  [[nodiscard]] const Config& config() const override { return inner_->config(); }
  [[nodiscard]] std::span<const ops::AttentionSpec> attention_layers() const override {
    return inner_->attention_layers();
  }
  ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const override {
    ops::Value logits = inner_->forward(ops, kv);
    if (std::ranges::find(at_, calls_++) != at_.end()) throw std::runtime_error("planned failure");
    return logits;
  }

 private:
  std::shared_ptr<const Model> inner_;
  std::vector<int> at_;
  mutable int calls_ = 0;
};

struct Said {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint32_t> bits;
  std::string fault;
  friend bool operator==(const Said&, const Said&) = default;
};

class Isolation : public ::testing::Test {
 protected:
  std::unique_ptr<FusedForward> forward(std::vector<int> failing_calls = {}) {
    Config config = MemoryCheckpoint::tiny_llama();
    config.head_dim = 16;
    const MemoryCheckpoint checkpoint(config);
    auto ops = std::make_shared<ops::FusedOps>(kernels::select_isa("best"), 2);
    std::shared_ptr<const Model> model = load_model(checkpoint, *ops);
    model = std::make_shared<Failing>(std::move(model), std::move(failing_calls));
    return std::make_unique<FusedForward>(std::move(ops), std::move(model), FusedForwardOptions{4'000'000});
  }

  /// All prompts at once in chunks of four, then greedy steps; a row with a fault leaves.
  static std::vector<Said> run(FusedForward& forward, const std::vector<std::vector<std::int32_t>>& prompts,
                               int steps) {
    sample::Params params;
    params.logprobs = true;
    std::vector<std::unique_ptr<sample::RowSampler>> samplers;
    std::map<RowId, std::size_t> who;
    std::vector<std::size_t> fed(prompts.size(), 0);
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      samplers.push_back(std::make_unique<sample::RowSampler>(params));
      who[forward.join({static_cast<int>(prompts[i].size()), steps, samplers[i].get()})] = i;
    }
    std::vector<Said> said(prompts.size());
    while (!who.empty()) {
      StepPlan plan;
      for (const auto& [row, i] : who) {
        if (fed[i] == prompts[i].size()) {
          plan.decode.push_back(row);
          continue;
        }
        const std::size_t n = std::min<std::size_t>(4, prompts[i].size() - fed[i]);
        plan.prompt.push_back({row, std::span(prompts[i]).subspan(fed[i], n), fed[i] + n == prompts[i].size()});
        fed[i] += n;
      }
      forward.launch(plan);
      for (const Emission& e : forward.collect()) {
        Said& row = said[who.at(e.row)];
        if (e.fault) {
          row.fault = *e.fault;
        } else {
          row.tokens.push_back(e.choice.token);
          row.bits.push_back(std::bit_cast<std::uint32_t>(e.choice.logprob));
        }
        if (e.fault || static_cast<int>(row.tokens.size()) == steps) {
          forward.leave(e.row);
          who.erase(e.row);
        }
      }
    }
    EXPECT_EQ(forward.kv().used_bytes, 0U);
    EXPECT_EQ(forward.kv().reserved_bytes, 0U);
    return said;
  }

  const std::vector<std::vector<std::int32_t>> prompts_{
      {1, 2, 3, 4, 5, 6, 7, 8, 9}, {20, 21, 22}, {30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42}};
};

TEST_F(Isolation, AFailureThatDoesNotComeBackCostsNobodyAnything) {
  const auto expected = run(*forward(), prompts_, 10);
  for (const Said& row : expected) ASSERT_EQ(row.tokens.size(), 10U);
  for (const int call : {0, 1, 2, 5}) {
    const auto f = forward({call});
    EXPECT_EQ(run(*f, prompts_, 10), expected) << "call " << call;
    EXPECT_EQ(run(*f, prompts_, 10), expected) << "the forward is as good as new";
  }
}

TEST_F(Isolation, OnlyTheRowThatFailsAgainFails) {
  const auto expected = run(*forward(), prompts_, 10);
  // Step 4 fails; of the reruns (calls 5, 6, 7) the second does too.
  const auto said = run(*forward({4, 6}), prompts_, 10);
  EXPECT_EQ(said[0], expected[0]);
  EXPECT_EQ(said[2], expected[2]);
  EXPECT_EQ(said[1].fault, "planned failure");
  EXPECT_LT(said[1].tokens.size(), 10U);
}

TEST_F(Isolation, AnExceptionInsideTheStepIsTheCulpritsAlone) {
  const auto expected = run(*forward(), prompts_, 10);
  // A token id that the model has no embedding for throws on MLX's thread. In an early piece, which does not emit, and
  // in the last one, which does.
  for (const std::size_t at : {std::size_t{1}, prompts_[2].size() - 1}) {
    auto prompts = prompts_;
    prompts[2][at] = 4000;
    const auto f = forward();
    const auto said = run(*f, prompts, 10);
    EXPECT_EQ(said[0], expected[0]);
    EXPECT_EQ(said[1], expected[1]);
    EXPECT_TRUE(said[2].tokens.empty());
    EXPECT_NE(said[2].fault.find("token 4000 is out of range"), std::string::npos) << said[2].fault;
    EXPECT_EQ(run(*f, prompts_, 10), expected) << "the forward is as good as new";
  }
}

}  // namespace
}  // namespace galley::models
