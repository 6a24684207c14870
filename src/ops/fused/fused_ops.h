// The fused backend: composite ops recorded as phases of CPU kernels and run by one MLX primitive a step.
//
// Hidden states are ragged, [T, D] in fp32: decode rows and pieces of several prompts side by side. Every result is
// invariant in who shares the step (see ops/kernels/kernels.h). Single ops can be switched off; they then run as their
// stock expansion on MLX arrays between two programs, and invariance is lost.
#pragma once
#include <mlx/mlx.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/fused/paged_layer.h"
#include "ops/fused/program.h"
#include "ops/fused/ragged_step.h"
#include "ops/ops.h"
#include "ops/stock/stock_ops.h"

namespace galley::ops {

/// Which composite ops run fused.
struct FusedSwitches {
  bool embed = true;
  bool norm_linear = true;
  bool attend = true;
  bool linear_residual = true;
  bool gated_mlp = true;
  bool moe = true;
  bool per_layer = true;
  bool logits = true;

  [[nodiscard]] bool all() const {
    return embed && norm_linear && attend && linear_residual && gated_mlp && moe && per_layer && logits;
  }
};

class FusedOps final : public Ops {
 public:
  FusedOps(kernels::Isa isa, int threads, FusedSwitches switches = {});
  ~FusedOps() override;

  [[nodiscard]] bool invariant() const { return switches_.all(); }
  [[nodiscard]] const kernels::Isa& isa() const { return machine_->context.isa(); }
  [[nodiscard]] int threads() const { return machine_->context.threads(); }
  /// Bytes of all packed weights so far.
  [[nodiscard]] std::size_t weight_bytes() const { return weight_bytes_; }

  std::vector<LinearPtr> load_linears(const std::vector<const MatrixSource*>& group,
                                      const std::vector<const VectorSource*>& biases) override;
  GatedMlp load_mlp(const MatrixSource& gate, const MatrixSource& up, const MatrixSource& down,
                    Activation activation) override;
  Moe load_moe(const MatrixSource& router, const MatrixSource& gate, const MatrixSource& up, const MatrixSource& down,
               const MoeSpec& spec, const VectorSource* factors) override;
  LinearPtr load_embedding(const MatrixSource& table) override;
  NormPtr load_norm(const VectorSource& weight, float eps) override;
  NormPtr plain_norm(int size, float eps) override;
  FactorPtr load_factor(const VectorSource& one_number) override;

  /// Forgets a step that failed, while it was recorded or while it ran. The next one starts afresh.
  void recover();

  /// Starts recording a step.
  void begin(std::shared_ptr<const RaggedStep> step);

  Value embed(const LinearPtr& table, float scale = 1.0F) override;
  std::vector<Value> norm_linear(const Value& x, const NormPtr& norm, const std::vector<LinearPtr>& group) override;
  /// `kv` must be a PagedLayerKv.
  Value attend(const Value& q, const Value& k, const Value& v, const AttentionSpec& spec, LayerKv& kv) override;
  Value attend_shared(const Value& q, const AttentionSpec& spec, LayerKv& kv) override;
  Value linear_residual(const Value& x, const LinearPtr& linear, const Value& residual) override;
  Value linear_norm_residual(const Value& x, const LinearPtr& linear, const NormPtr& norm,
                             const Value& residual) override;
  Value gated_mlp(const Value& x, const NormPtr& norm, const GatedMlp& mlp) override;
  Value moe(const Value& x, const NormPtr& norm, const Moe& moe) override;
  Value mlp_beside_moe(const Value& x, const MlpBesideMoe& both) override;
  Value per_layer_inputs(const Value& x, const PerLayerInputs& inputs) override;
  Value per_layer_gate(const Value& x, const PerLayerGate& gate, const Value& inputs, int layer) override;
  Value logits(const Value& x, const NormPtr& norm, const LinearPtr& head, float softcap = 0.0F) override;

  /// What a step yields, row by row for RaggedStep::emit.
  class Result {
   public:
    /// Blocks until the step has run; rethrows what went wrong in it.
    void wait();
    [[nodiscard]] std::span<const std::int32_t> tokens() const;  ///< [emit] arg-max; -1: nothing finite. !want_logits
    [[nodiscard]] std::span<const float> logits() const;         ///< [emit * vocab]; want_logits
   private:
    friend class FusedOps;
    std::vector<mlx::core::array> outputs_;
    std::optional<std::size_t> tokens_, logits_;
  };
  /// Ends the recording and starts the step (MLX's async_eval).
  Result finish(const Value& logits);

  /// Calls f(i) for i in [0, n) on the kernels' threads; between steps only.
  void parallel(int n, const std::function<void(int)>& f);

 private:
  struct Next;
  struct Upcoming;
  struct Hidden;
  struct Projection;
  struct PackedLinear;
  struct PackedNorm;
  struct PackedFactor;
  struct PackedMlp;
  struct PackedExperts;

  [[nodiscard]] bool needs_stock() const { return !switches_.all(); }
  const Hidden& hidden(const Value& value) const;
  static NormPtr stock_norm(const NormPtr& norm);  ///< what a switched-off op takes; null for null
  static FactorPtr stock_factor(const FactorPtr& factor);
  static float factor_of(const FactorPtr& factor);  ///< 1 for null
  Value from_array(const mlx::core::array& a);
  mlx::core::array to_array(const Value& value);
  std::vector<mlx::core::array> to_arrays(std::span<const Value> values);
  std::shared_ptr<ActivationsHandle> consume(const Value& value, const PackedNorm* norm,
                                             const kernels::PackedMatrix& consumer);
  Value add_residual(const std::shared_ptr<ActivationsHandle>& input, const kernels::PackedMatrix& matrix,
                     const Value& residual);
  Value add_normed_residual(const std::shared_ptr<ActivationsHandle>& input, const kernels::PackedMatrix& matrix,
                            const PackedNorm& norm, const Value& residual, float whole = 1.0F);
  Value norm_and_add(const FloatsHandle& branch, const PackedNorm& norm, const Value& residual, int columns,
                     float whole);
  /// `qkv`: q, k and v, or q alone where the layer's keys and values are another's.
  Value attend_to(std::span<const Value> qkv, const AttentionSpec& spec, const PagedLayerKv& layer);
  void write_from_arrays(const std::vector<mlx::core::array>& qkv, const kernels::QkvOutput& to,
                         const AttentionSpec& spec, const PagedLayerKv& layer, int q_id);
  std::shared_ptr<const Hidden> in_floats(const Value& value);
  static kernels::MoeLayer moe_layer(const PackedExperts& experts, const PackedNorm& norm, const MoeSpec& spec);
  void flush();
  std::shared_ptr<const std::vector<float>> rope_table(const Rope& rope, int positions);
  /// Records the writes of k and v (if there are any in `qkv`), rotated as the spec says.
  void write_keys_values(const std::vector<mlx::core::array>& qkv, const AttentionSpec& spec,
                         const PagedLayerKv& layer);
  mlx::core::array stock_attend(const std::vector<mlx::core::array>& qkv, const AttentionSpec& spec,
                                const PagedLayerKv& layer);

  std::shared_ptr<Machine> machine_;
  FusedSwitches switches_;
  std::unique_ptr<StockOps> stock_;  ///< present when a switch is off
  std::size_t weight_bytes_ = 0;
  struct RopeEntry {
    Rope rope;
    std::shared_ptr<const std::vector<float>> table;
  };
  std::vector<RopeEntry> ropes_;

  std::shared_ptr<const RaggedStep> step_;
  std::shared_ptr<Program> program_;
  /// What the next attention will read, for the product before it; its recording fills it in.
  std::shared_ptr<Upcoming> upcoming_;
  mlx::core::array order_;
  std::vector<mlx::core::array> outputs_;  ///< of the program last flushed
};

}  // namespace galley::ops
