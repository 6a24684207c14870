// The stock backend: every composite op expands to exactly the MLX ops, in exactly the order, that mlx-lm 0.32.2 uses,
// so that results agree bit for bit. Hidden states are [B, L, D].
#pragma once
#include <mlx/mlx.h>

#include <functional>
#include <map>
#include <vector>

#include "ops/ops.h"
#include "ops/stock/stock_kv.h"
#include "ops/stock/stock_moe.h"
#include "ops/stock/stock_weights.h"

namespace galley::ops {

class StockOps final : public Ops {
 public:
  explicit StockOps(StockNumerics numerics = {});

  /// Starts a forward pass over `tokens`, integers [B, L].
  void begin(mlx::core::array tokens);
  /// The MLX array inside a value of this backend.
  static const mlx::core::array& array_of(const Value& value);
  /// A value of this backend around an array [B, L, D].
  static Value value_of(mlx::core::array a);

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

  Value embed(const LinearPtr& table, float scale = 1.0F) override;
  std::vector<Value> norm_linear(const Value& x, const NormPtr& norm, const std::vector<LinearPtr>& group) override;
  /// `kv` must be a StockLayerKv.
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
  /// Logits [B, L, vocab] of every position; lazy, so that a prefill which never looks at them never computes them.
  Value logits(const Value& x, const NormPtr& norm, const LinearPtr& head, float softcap = 0.0F) override;

 private:
  using Compiled = std::function<std::vector<mlx::core::array>(const std::vector<mlx::core::array>&)>;

  /// activation(gate) * up
  [[nodiscard]] mlx::core::array gated(const mlx::core::array& gate, const mlx::core::array& up,
                                       Activation activation) const;
  [[nodiscard]] mlx::core::array switch_glu(const mlx::core::array& x, const mlx::core::array& picks,
                                            const StockExperts& experts, Activation activation) const;
  /// Which experts each token is sent to, and with which weights, both [B, L, picks].
  struct Routing {
    mlx::core::array picks, weights;
  };
  [[nodiscard]] static Routing route(const mlx::core::array& normed, const Moe& moe);
  [[nodiscard]] mlx::core::array gated_product(const mlx::core::array& normed, const GatedMlp& mlp) const;
  [[nodiscard]] mlx::core::array saturating_sum(const mlx::core::array& a, const mlx::core::array& b) const;

  StockNumerics numerics_;
  Compiled swiglu_;
  Compiled gelu_;
  Compiled geglu_;
  Compiled clipped_sum_;
  std::map<float, Compiled> softcaps_;
  mlx::core::array tokens_;
  std::map<int, AttentionMask> masks_;            ///< of the pass in flight, by window: mlx-lm makes one for all layers
  std::map<const LayerKv*, RopeOffset> offsets_;  ///< of the pass in flight, for layers that share these
};

}  // namespace galley::ops
