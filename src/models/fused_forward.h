// The fused forward: one ragged pass a step over decode rows and prompt pieces alike, on a paged KV pool. The same
// object serves the batched lane and, with one row, the serial lane.
#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "kv/paged.h"
#include "kv/prefix_archive.h"
#include "kv/prefix_index.h"
#include "kv/prefix_store.h"
#include "models/forward.h"
#include "models/model.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {

struct FusedForwardOptions {
  std::size_t kv_budget_bytes = 0;
  kernels::KvElement kv_element = kernels::KvElement::f16;  ///< of layers that are not quantized
  /// Bytes of the budget that blocks held by no row may keep for prompts to come. Absent: all; 0: none.
  std::optional<std::size_t> prompt_cache_bytes = {};
  /// Not 0: contiguous KV. A row's is one piece with room for so many tokens (a multiple of 16), nothing is shared, and
  /// a row reserves all it may need when it joins.
  int contiguous_tokens = 0;
  /// Where blocks outlive the process; its block_bytes are those of this forward's pool.
  std::optional<kv::PrefixStore> prefix_store = {};
  std::vector<ops::KvFormat> kv_formats = {};  ///< one a layer; empty: nothing is quantized
  int prefill_step = 2048;                     ///< tokens of the longest prompt part
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
  Reuse reuse(RowId row) override;
  void leave(RowId row) override;
  [[nodiscard]] bool fits(const StepPlan& plan) const override;
  void launch(const StepPlan& plan) override;
  [[nodiscard]] int in_flight() const override { return static_cast<int>(flying_.size()); }
  std::vector<Emission> collect() override;
  bool tidy() override;

  /// Logits [n, vocab] of every token of a prompt, for measuring quality. No rows may be active.
  std::vector<float> prompt_logits(std::span<const std::int32_t> tokens);

 private:
  struct Row {
    kv::PagedRow kv;
    sample::RowSampler* sampler = nullptr;
    std::int32_t last_token = 0;
    bool left = false;

    // Sharing. A row without a prompt of its own takes no part in it.
    std::span<const std::int32_t> prompt;
    std::vector<std::int32_t> tokens;  ///< [kv.length()] what its blocks hold
    std::size_t known = 0;             ///< of its blocks, those in the index
    std::int64_t asked_at = -1;        ///< length at which the store was asked last: a row that waits asks once
    std::size_t told = 0;              ///< tokens of the prompt that were fed or said to be reused
    RowId leader = kNobody;            ///< an earlier row whose prompt begins alike and is being computed
    std::size_t lead = 0;              ///< tokens that prompt and the leader's have in common
  };
  static constexpr RowId kNobody = -1;
  struct Flight {
    std::shared_ptr<const ops::RaggedStep> step;
    std::vector<RowId> rows;      ///< by the step's row index
    std::vector<RowId> emitting;  ///< by the step's `emit`
    ops::FusedOps::Result result;
    bool failed = false;  ///< could not even be started
  };
  using RowMap = std::map<RowId, Row>;

  [[nodiscard]] std::size_t bytes(int units) const;
  void add_tokens(ops::RaggedStep& step, Row& row, std::span<const std::int32_t> tokens) const;
  void fill_tables(ops::RaggedStep& step, std::span<const Row* const> rows) const;
  void start(Flight& flight);
  std::vector<Emission> sample(Flight& flight);
  std::vector<Emission> rerun(const Flight& lost);
  void drop_left_rows();

  /// Tokens whose blocks a row reserves when it joins: those it is sure to need. What it generates grows step by step,
  /// as most rows end well before max_tokens. A row that says nothing of its prompt reserves everything.
  [[nodiscard]] int reserved_tokens(const RowSpec& spec) const;
  [[nodiscard]] bool shares(const RowSpec& spec) const { return sharing_ && !spec.prompt.empty(); }
  [[nodiscard]] std::vector<std::int32_t> shared_blocks(const RowSpec& spec) const;
  /// Puts the blocks that a collected step filled into the index.
  void remember(Row& row);
  void load_stored(Row& row);
  void copy_part(RowId id, Row& row);
  [[nodiscard]] bool awaits_leader(RowId id, Row& row);
  void elect_leader(RowId id, Row& row) const;

  std::shared_ptr<ops::FusedOps> ops_;
  std::shared_ptr<const Model> model_;
  bool contiguous_;
  bool sharing_;  ///< rows can begin with others' blocks
  kv::PagedKv kv_;
  kv::Sliding sliding_;
  kv::PrefixIndex index_;
  std::unique_ptr<kv::PrefixArchive> archive_;  ///< may be null
  ForwardTraits traits_;
  RowMap rows_;
  RowId next_row_ = 0;
  std::deque<Flight> flying_;
};

}  // namespace galley::models
