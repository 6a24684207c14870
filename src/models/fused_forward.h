// The fused forward: one ragged pass a step over decode rows and prompt pieces alike, on a paged KV pool. The same
// object serves the batched lane and, with one row, the serial lane.
#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "kv/paged.h"
#include "models/forward.h"
#include "models/model.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {

struct FusedForwardOptions {
  std::size_t kv_budget_bytes = 0;
  kernels::KvElement kv_element = kernels::KvElement::f16;
};

class FusedForward final : public Forward {
 public:
  /// `model` was loaded through `ops`.
  FusedForward(std::shared_ptr<ops::FusedOps> ops, std::shared_ptr<const Model> model, FusedForwardOptions options);
  ~FusedForward() override;

  [[nodiscard]] const ForwardTraits& traits() const override { return traits_; }
  [[nodiscard]] KvUsage kv() const override;
  [[nodiscard]] std::size_t bytes_for(int tokens) const override;
  [[nodiscard]] int max_row_tokens() const override;
  [[nodiscard]] bool can_join(const RowSpec& spec) const override;
  RowId join(const RowSpec& spec) override;
  void leave(RowId row) override;
  void launch(const StepPlan& plan) override;
  [[nodiscard]] int in_flight() const override { return static_cast<int>(flying_.size()); }
  std::vector<Emission> collect() override;

  /// Logits [n, vocab] of every token of a prompt, for measuring quality. No rows may be active.
  std::vector<float> prompt_logits(std::span<const std::int32_t> tokens);

 private:
  struct Row {
    kv::PagedRow kv;
    sample::RowSampler* sampler = nullptr;
    std::int32_t last_token = 0;
    bool left = false;
  };
  struct Flight {
    std::vector<RowId> emitting;
    ops::FusedOps::Result result;
    bool logits = false;
  };
  using RowMap = std::map<RowId, Row>;

  void add_tokens(ops::RaggedStep& step, Row& row, std::span<const std::int32_t> tokens) const;
  void fill_tables(ops::RaggedStep& step, std::span<const Row* const> rows) const;
  void drop_left_rows();

  std::shared_ptr<ops::FusedOps> ops_;
  std::shared_ptr<const Model> model_;
  kv::PagedKv kv_;
  ForwardTraits traits_;
  RowMap rows_;
  RowId next_row_ = 0;
  std::deque<Flight> flying_;
};

}  // namespace galley::models
