// Forwards on the stock backend, step for step as mlx-lm 0.32.2 runs them:
//
//  serial   each row has caches of its own and runs at B = 1, as generate_step does.
//  batched  rows share left-padded caches, as BatchGenerator does: a prompt batch P that prefills ragged pieces
//           together, a separate L = 1 forward for prompts that reached their last token, and a generation batch G
//           they then join.
//
// Every layer gets the kind of cache that its AttentionSpec asks for (kv/cache_kinds.h). With quantized KV they run as
// mlx-optiq 0.7.7 makes those two run.
//
// Both look ahead: launch() feeds the tokens of the previous step straight from the device. That holds for sampled rows
// too, since they are sampled by a task of the MLX stream (stock_forward_sampling.h).
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kv/cache_kinds.h"
#include "kv/prompt_cache.h"
#include "models/checkpoint.h"
#include "models/forward.h"
#include "models/kv_quant.h"
#include "models/model.h"
#include "models/stock_forward_sampling.h"
#include "ops/stock/stock_ops.h"

namespace galley::models {

/// Weights that several forwards (the lanes) share.
struct StockModel {
  std::unique_ptr<ops::StockOps> ops;
  std::unique_ptr<Model> model;
  std::vector<ops::KvFormat> kv_formats;  ///< by attention layer
  struct TokenBytes {
    std::size_t plain = 0;   ///< as it comes
    std::size_t stored = 0;  ///< in the layer's format
  };
  std::vector<TokenBytes> kv_bytes;  ///< of one token's KV, by attention layer

  [[nodiscard]] std::vector<std::unique_ptr<kv::RowCache>> row_caches() const;
  [[nodiscard]] std::vector<std::unique_ptr<kv::BatchCache>> batch_caches(int rows) const;
  /// Rows' own caches (as many layers each) side by side.
  [[nodiscard]] std::vector<std::unique_ptr<kv::BatchCache>> merged(
      const std::vector<std::vector<std::unique_ptr<kv::RowCache>>>& rows) const;
  /// Most bytes that the KV of a row of `tokens` tokens takes when its prompt comes in pieces of at most `piece`: with
  /// what full layers grow ahead, and no more than a window and a piece for sliding ones.
  [[nodiscard]] std::size_t row_bytes(std::size_t tokens, std::size_t piece, bool batched) const;
};

/// Loads `checkpoint` for the stock backend. GGUF files compute in float32, MLX folders in their stored types.
/// `dense`: expand quantized matrices at load (see ops::StockNumerics). Throws ModelError, and Error for a `kv_quant`
/// that does not fit the layers.
std::shared_ptr<StockModel> load_stock_model(const Checkpoint& checkpoint, bool dense = false,
                                             const KvQuant& kv_quant = {});

struct StockOptions {
  std::size_t kv_budget = 0;  ///< bytes that rows may reserve
  int max_rows = 1;           ///< rows at a time
  int prefill_step = 2048;    ///< tokens of the longest prompt part, which decides how wide a ring can get
  /// What finished rows leave for prompts that begin alike, out of the same budget; null: nothing. Lanes share it.
  std::shared_ptr<kv::PromptCache> prompt_cache = nullptr;
};

/// Sees every row's log-probabilities [vocab], evaluated, in the model's own type, at the collect() that reports them.
using LogprobProbe = std::function<void(RowId row, const mlx::core::array& logprobs)>;

/// Sees every forward as it is built: rows, tokens a row, and the cache columns that were there before.
using ShapeProbe = std::function<void(int rows, int length, int columns)>;

/// What both kinds share: rows, the KV budget, and steps in flight.
///
/// Budget: a contiguous batch is as wide as its longest row, so B rows reserve B x the longest (prompt + max_tokens),
/// projected anew at each join; serial rows reserve each their own length. Copies while a batch is merged, split or
/// filtered are not counted. The prompt cache has what rows don't reserve.
///
/// Prompt cache: as in mlx-lm's server, a row that has spoken leaves its KV behind, last token included, and a row that
/// joins takes the best there is. KV that was computed in other steps has other last bits, so a row that samples with a
/// seed of its own takes none: its answer must not depend on what was asked before.
class StockForward : public Forward {
 public:
  [[nodiscard]] const ForwardTraits& traits() const override { return traits_; }
  [[nodiscard]] KvUsage kv() const override;
  [[nodiscard]] std::size_t bytes_for(int tokens) const override;
  [[nodiscard]] int max_row_tokens() const override;
  [[nodiscard]] bool can_join(const RowSpec& spec) const override;

  RowId join(const RowSpec& spec) override;
  Reuse reuse(RowId row) override;
  void leave(RowId row) override;
  void launch(const StepPlan& plan) override;
  [[nodiscard]] int in_flight() const override { return static_cast<int>(steps_.size()); }
  std::vector<Emission> collect() override;
  bool recover() override;

  /// For the parity suite. Set before the first launch.
  void set_probe(LogprobProbe probe) { probe_ = std::move(probe); }
  void set_shape_probe(ShapeProbe probe) { shape_probe_ = std::move(probe); }

 protected:
  StockForward(std::shared_ptr<StockModel> model, const StockOptions& options, bool batched);

  /// Runs the step's forwards; returns what each sampled.
  virtual std::vector<SampledRows> run(const StepPlan& plan) = 0;
  /// The row is gone from rows().
  virtual void on_leave(RowId row) = 0;
  /// The KV of a row that leaves, all it has said included. `unfed`: its last token is still to be fed to the model.
  /// Empty: that can't be had.
  virtual kv::PromptCache::Layers give_up(RowId row, bool unfed) = 0;
  /// All rows are gone, and a step of theirs has failed.
  virtual void on_recover() = 0;
  [[nodiscard]] virtual std::size_t used_bytes() const = 0;
  /// Bytes reserved by rows that come to hold so many tokens each.
  [[nodiscard]] virtual std::size_t projected_bytes(const std::vector<std::size_t>& tokens) const = 0;

  [[nodiscard]] const StockModel& model() const { return *model_; }
  [[nodiscard]] std::size_t row_bytes(std::size_t tokens) const {
    return model_->row_bytes(tokens, static_cast<std::size_t>(options_.prefill_step), batched_);
  }
  [[nodiscard]] bool joined(RowId row) const { return rows_.contains(row); }
  [[nodiscard]] sample::RowSampler* sampler(RowId row) const { return rows_.at(row).spec.sampler; }
  /// The caches a joined row begins with: what it took out of the prompt cache, or empty ones. To be asked once.
  [[nodiscard]] kv::PromptCache::Layers first_caches(RowId row);
  /// Whether those hold anything.
  [[nodiscard]] bool took(RowId row) const { return !rows_.at(row).taken.empty(); }
  /// One forward over tokens [B, L] -> logits [B, L, vocab], lazy. `caches`: one a layer, `columns` wide so far.
  mlx::core::array forward(mlx::core::array tokens, std::vector<ops::LayerKv*> caches, int columns);

 private:
  struct Step {
    std::vector<SampledRows> sampled;
    std::vector<RowId> order;  ///< of its emissions
  };
  struct Row {
    RowSpec spec;
    kv::PromptCache::Layers taken;     ///< until first_caches() is asked
    std::size_t reused = 0;            ///< tokens of the prompt that these hold, until reuse() has told
    std::vector<std::int32_t> tokens;  ///< of the prompt, as far as it is there, and what was said since
    std::size_t fed = 0;               ///< of these, those that the forward was fed
    int said = 0;
    bool spoiled = false;  ///< a step of its went wrong
  };
  [[nodiscard]] std::size_t reserved_with(const RowSpec* another) const;
  [[nodiscard]] int kind() const;
  /// Puts the KV of a row that leaves into the prompt cache, if it is fit for that.
  void leave_behind(RowId id, Row& row);
  /// The prompt cache keeps to what rows don't reserve.
  void make_room();

  std::shared_ptr<StockModel> model_;
  StockOptions options_;
  bool batched_;
  ForwardTraits traits_;
  std::unordered_map<RowId, Row> rows_;
  RowId next_row_ = 0;
  std::deque<Step> steps_;
  LogprobProbe probe_;
  ShapeProbe shape_probe_;
};

/// generate_step's numerics, row by row.
std::unique_ptr<StockForward> make_serial_stock_forward(std::shared_ptr<StockModel> model, const StockOptions& options);

/// BatchGenerator's numerics. A plan's decode list is expected to name every row of G, as mlx-lm's tick does; rows it
/// omits sit the step out, which changes B and with it the last bits of the others.
std::unique_ptr<StockForward> make_batched_stock_forward(std::shared_ptr<StockModel> model,
                                                         const StockOptions& options);

}  // namespace galley::models
