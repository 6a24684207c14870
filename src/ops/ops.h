// Composite ops: the vocabulary in which model families are written, once, for every backend.
//
//  stock  expands each op to exactly the MLX ops, in exactly the order, that mlx-lm uses; hidden states are [B, L, D].
//  fused  records phases that one custom MLX primitive runs on the CPU kernels; hidden states are ragged, [T, D].
//
// Family code never reads leading dimensions and never looks inside a Value. Everything here runs on the engine thread.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/weights.h"

namespace galley::ops {

/// A hidden state in flight: an MLX array (stock) or a buffer of the phases being recorded (fused).
class Value {
 public:
  struct Impl {
    virtual ~Impl() = default;
  };
  Value() = default;
  explicit Value(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] const std::shared_ptr<const Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Prepared weights, in whatever layout the backend reads. Made by Ops::load_*, owned by the model.
struct Linear {
  virtual ~Linear() = default;
  int rows = 0;  ///< output features
  int cols = 0;  ///< input features
};
using LinearPtr = std::shared_ptr<const Linear>;

/// An RMS norm: x / sqrt(mean(x^2) + eps) * weight. Held as prepared weights for the same reason.
struct Norm {
  virtual ~Norm() = default;
  float eps = 1e-5F;
};
using NormPtr = std::shared_ptr<const Norm>;

/// A learned factor of a whole hidden state, one number.
struct Factor {
  virtual ~Factor() = default;
};
using FactorPtr = std::shared_ptr<const Factor>;

/// RoPE on the first `dims` of a head, pairs (i, i + dims/2) unless `traditional` (pairs (2i, 2i+1)).
struct Rope {
  int dims = 0;
  float base = 10000.0F;
  float scale = 1.0F;  ///< multiplies positions (1 / linear scaling factor)
  bool traditional = false;
  /// Wavelengths per pair (llama3, yarn, proportional scaling) as mx::fast::rope takes them; empty: from `base`.
  std::vector<float> frequencies;
};

/// Static facts of one attention layer.
struct AttentionSpec {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  float scale = 1.0F;  ///< of the scores
  Rope rope;
  int window = 0;          ///< sliding window in tokens; 0: full attention
  float softcap = 0.0F;    ///< 0: none
  NormPtr q_norm, k_norm;  ///< per-head norms before RoPE, or null
  NormPtr v_norm{};        ///< the same for values, which RoPE leaves alone
};

/// One layer's KV for the rows of the step in flight. The cache kind decides how to attend; see kv/.
struct LayerKv {
  virtual ~LayerKv() = default;
};

/// geglu: gelu_tanh, but where mlx-lm compiles the gate and the product after it as one.
enum class Activation { silu, gelu_tanh, geglu };

struct GatedMlp {
  LinearPtr gate, up, down;
  Activation activation = Activation::silu;
  NormPtr post_norm{};      ///< of the result, before it is added to the residual; null: none
  FactorPtr post_factor{};  ///< of the sum, where a post_norm is too; null: none
};

/// Static facts of a mixture of experts: gated MLPs of which a router picks a few for every token.
struct MoeSpec {
  int experts = 0;
  int per_token = 0;        ///< how many the router picks: those with the largest scores
  bool normalized = false;  ///< the picked ones' weights are scaled to a sum of 1
  Activation activation = Activation::silu;
  bool softmax_of_picked = false;  ///< weights are the softmax over the picked ones' scores alone
};

/// Prepared weights of all experts of one layer.
struct Experts {
  virtual ~Experts() = default;
};

struct Moe {
  LinearPtr router;
  std::shared_ptr<const Experts> experts;
  MoeSpec spec;
};

/// An MLP and a mixture of experts side by side. Each reads the hidden state through a norm of its own and is normed
/// before their sum is:
///   x + post_norm(mlp.post_norm(mlp(mlp_norm(x))) + moe_post_norm(moe(moe_norm(x)))), times post_factor
/// with the experts picked by router(router_norm(x)).
struct MlpBesideMoe {
  NormPtr mlp_norm;
  GatedMlp mlp;  ///< without post_factor
  NormPtr router_norm, moe_norm, moe_post_norm;
  Moe moe;
  NormPtr post_norm;
  FactorPtr post_factor;
};

/// A second embedding that gives every layer a vector of its own, mixed with a projection of the first:
///   scale * (norm(projection(x) * projection_scale) + table[token] * table_scale), normed layer by layer.
struct PerLayerInputs {
  LinearPtr table;       ///< from load_embedding, [vocab, layers * width]
  LinearPtr projection;  ///< [layers * width, hidden]
  NormPtr norm;          ///< of one layer's vector
  int layers = 0;
  int width = 0;
  float table_scale = 1.0F;
  float projection_scale = 1.0F;
  float scale = 1.0F;
};

/// What a layer does with its vector: x + post_norm(projection(gelu(gate(x)) * vector)), times post_factor.
struct PerLayerGate {
  LinearPtr gate, projection;
  NormPtr post_norm;
  FactorPtr post_factor;
};

class Ops {
 public:
  virtual ~Ops() = default;

  // ---- load time
  /// Prepares projections that share an input (q, k, v; gate, up). The pointers name the parts of one prepared group.
  virtual std::vector<LinearPtr> load_linears(const std::vector<const MatrixSource*>& group,
                                              const std::vector<const VectorSource*>& biases = {}) = 0;
  virtual GatedMlp load_mlp(const MatrixSource& gate, const MatrixSource& up, const MatrixSource& down,
                            Activation activation) = 0;
  /// `router` [experts, hidden]; the experts' matrices one below the other: `gate` and `up` [experts * intermediate,
  /// hidden], `down` [experts * hidden, intermediate]. `factors` [experts] (may be null) multiply the weights that the
  /// router gives.
  virtual Moe load_moe(const MatrixSource& router, const MatrixSource& gate, const MatrixSource& up,
                       const MatrixSource& down, const MoeSpec& spec, const VectorSource* factors = nullptr) = 0;
  /// An embedding table; as_linear() of the result is the tied output head.
  virtual LinearPtr load_embedding(const MatrixSource& table) = 0;
  virtual NormPtr load_norm(const VectorSource& weight, float eps) = 0;
  /// An RMS norm of `size` numbers without weights.
  virtual NormPtr plain_norm(int size, float eps) = 0;
  virtual FactorPtr load_factor(const VectorSource& one_number) = 0;

  // ---- step time
  /// The rows of `table` for the tokens of the step in flight, times `scale`.
  virtual Value embed(const LinearPtr& table, float scale = 1.0F) = 0;
  /// linear_i(norm(x)) for each linear of a group made by load_linears.
  virtual std::vector<Value> norm_linear(const Value& x, const NormPtr& norm, const std::vector<LinearPtr>& group) = 0;
  /// RoPE, KV write and attention for one layer; the result is [.., heads * head_dim].
  virtual Value attend(const Value& q, const Value& k, const Value& v, const AttentionSpec& spec, LayerKv& kv) = 0;
  /// Attention from a layer without keys and values of its own: to those that attend() wrote to `kv` in this step and
  /// before, at the same positions.
  virtual Value attend_shared(const Value& q, const AttentionSpec& spec, LayerKv& kv) = 0;
  /// residual + linear(x)
  virtual Value linear_residual(const Value& x, const LinearPtr& linear, const Value& residual) = 0;
  /// residual + norm(linear(x)). Sums beyond the range of a 16-bit hidden state become its largest finite number.
  virtual Value linear_norm_residual(const Value& x, const LinearPtr& linear, const NormPtr& norm,
                                     const Value& residual) = 0;
  /// x + down(activation(gate(norm(x))) * up(norm(x))); with mlp.post_norm that norm stands before the sum, which is
  /// then as in linear_norm_residual.
  virtual Value gated_mlp(const Value& x, const NormPtr& norm, const GatedMlp& mlp) = 0;
  /// x + sum over the picked experts of weight * down(activation(gate(norm(x))) * up(norm(x))), where the weights are
  /// the softmax of router(norm(x)) over all experts.
  virtual Value moe(const Value& x, const NormPtr& norm, const Moe& moe) = 0;
  virtual Value mlp_beside_moe(const Value& x, const MlpBesideMoe& both) = 0;
  /// The vectors of all layers for the tokens of the step in flight, whose embedding is `x`.
  virtual Value per_layer_inputs(const Value& x, const PerLayerInputs& inputs) = 0;
  /// `inputs`: what per_layer_inputs() made.
  virtual Value per_layer_gate(const Value& x, const PerLayerGate& gate, const Value& inputs, int layer) = 0;
  /// head(norm(x)) for the positions of the step that emit; with a soft-cap, softcap * tanh(that / softcap).
  virtual Value logits(const Value& x, const NormPtr& norm, const LinearPtr& head, float softcap = 0.0F) = 0;
};

}  // namespace galley::ops
