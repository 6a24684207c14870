// Gemma 4: gemma3's block of four norms with unscaled attention, a norm of values too, a learned factor at the end of
// every layer and soft-capped logits. Sliding and full layers have heads of different sizes, and in full ones only a
// part of the head turns. What a model has besides is up to its config:
//
//   keys as values     full layers project no values: these are the keys before their norm
//   per-layer inputs   a second embedding, of which every layer mixes in its own part through a gate
//   shared keys        the last layers read the keys and values of an earlier one of their kind
//   experts            a mixture beside the MLP in every layer
#include "models/gemma4.h"

#include <mlx/mlx.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "models/decoder.h"
#include "models/rope.h"
#include "models/stacked_matrix.h"
#include "ops/error.h"

namespace galley::models {
namespace {

float inverse_root(int n) { return static_cast<float>(std::pow(static_cast<double>(n), -0.5)); }
float root(int n) { return static_cast<float>(std::pow(static_cast<double>(n), 0.5)); }

/// Products with a number happen in the type of the other side, so the number is rounded to it first.
float rounded(float value, ops::ElementType type) {
  switch (type) {
    case ops::ElementType::f32:
      return value;
    case ops::ElementType::f16:
      return static_cast<float>(mlx::core::float16_t(value));
    case ops::ElementType::bf16:
      return static_cast<float>(mlx::core::bfloat16_t(value));
  }
  return value;
}

class Gemma4 final : public Model {
 public:
  Gemma4(const Checkpoint& checkpoint, ops::Ops& ops) : config_(checkpoint.config()) {
    embedding_ = load_embedding(checkpoint, ops);
    if (config_.per_layer.width > 0) load_per_layer_inputs(checkpoint, ops);
    for (int layer = 0; layer < config_.layers; ++layer) load_block(checkpoint, ops, layer);
    norm_ = ops.load_norm(checkpoint.vector("model.norm.weight", config_.hidden), config_.norm_eps);
    head_ = load_head(checkpoint, ops, embedding_);
  }

  [[nodiscard]] const Config& config() const override { return config_; }
  [[nodiscard]] std::span<const ops::AttentionSpec> attention_layers() const override { return attention_; }

  ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const override {
    ops::Value h = ops.embed(embedding_, root(config_.hidden));
    ops::Value inputs;
    if (config_.per_layer.width > 0) inputs = ops.per_layer_inputs(h, per_layer_);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = blocks_[i];
      h = ops.linear_norm_residual(attend(ops, h, block, *kv[block.kv]), block.output, block.post_attention_norm, h);
      h = block.beside ? ops.mlp_beside_moe(h, *block.beside) : ops.gated_mlp(h, block.mlp_norm, block.mlp);
      if (config_.per_layer.width > 0) h = ops.per_layer_gate(h, block.gate, inputs, static_cast<int>(i));
    }
    return ops.logits(h, norm_, head_, config_.logit_softcap);
  }

 private:
  struct Block {
    ops::NormPtr attention_norm;
    std::vector<ops::LinearPtr> qkv;  ///< q, k and v; q and k where keys are values; q alone where these are shared
    ops::AttentionSpec attention;
    std::size_t kv = 0;  ///< which of the caches
    ops::LinearPtr output;
    ops::NormPtr post_attention_norm;
    ops::NormPtr mlp_norm;
    ops::GatedMlp mlp;
    std::optional<ops::MlpBesideMoe> beside;  ///< in place of the MLP
    ops::PerLayerGate gate;
  };

  static ops::Value attend(ops::Ops& ops, const ops::Value& h, const Block& block, ops::LayerKv& kv) {
    const auto qkv = ops.norm_linear(h, block.attention_norm, block.qkv);
    if (qkv.size() == 1) return ops.attend_shared(qkv[0], block.attention, kv);
    return ops.attend(qkv[0], qkv[1], qkv.back(), block.attention, kv);
  }

  [[nodiscard]] bool owns_kv(int layer) const { return layer < config_.layers - config_.shared_kv.layers; }

  void load_per_layer_inputs(const Checkpoint& checkpoint, ops::Ops& ops) {
    const int width = config_.per_layer.width;
    const int all = config_.layers * width;
    per_layer_.table =
        ops.load_embedding(*checkpoint.matrix("model.embed_tokens_per_layer.weight", config_.per_layer.vocab, all));
    const auto projection = checkpoint.matrix("model.per_layer_model_projection.weight", all, config_.hidden);
    per_layer_.projection = ops.load_linears({projection.get()}).front();
    per_layer_.norm =
        ops.load_norm(checkpoint.vector("model.per_layer_projection_norm.weight", width), config_.norm_eps);
    per_layer_.layers = config_.layers;
    per_layer_.width = width;
    per_layer_.table_scale = root(width);
    per_layer_.projection_scale = inverse_root(config_.hidden);
    per_layer_.scale = inverse_root(2);
  }

  void load_attention(const LayerWeights& weights, ops::Ops& ops, int layer, Block& block) {
    const bool slides = config_.sliding.slides(layer);
    const FullLayers& full = config_.full;
    ops::AttentionSpec& spec = block.attention;
    spec.heads = config_.heads;
    spec.kv_heads = !slides && full.kv_heads > 0 ? full.kv_heads : config_.kv_heads;
    spec.head_dim = !slides && full.head_dim > 0 ? full.head_dim : config_.head_dim;
    spec.q_norm = weights.norm("self_attn.q_norm", spec.head_dim);
    if (slides) {
      spec.window = config_.sliding.window;
      spec.rope.dims = spec.head_dim;
      spec.rope.base = config_.sliding.rope_base;
      spec.rope.traditional = config_.rope_traditional;
    } else {
      spec.rope = make_rope(config_, spec.head_dim);
    }
    const int hidden = config_.hidden;
    const int q_rows = spec.heads * spec.head_dim;
    const int kv_rows = spec.kv_heads * spec.head_dim;
    block.attention_norm = weights.norm("input_layernorm", hidden);
    block.output = weights.linears({{"self_attn.o_proj", hidden}}, q_rows, /*biased=*/false).front();
    block.post_attention_norm = weights.norm("post_attention_layernorm", hidden);
    if (!owns_kv(layer)) {
      block.qkv = weights.linears({{"self_attn.q_proj", q_rows}}, hidden, /*biased=*/false);
      block.kv = last_of_kind_[slides ? 0 : 1].value();
      return;
    }
    spec.k_norm = weights.norm("self_attn.k_norm", spec.head_dim);
    spec.v_norm = ops.plain_norm(spec.head_dim, config_.norm_eps);
    if (!slides && full.keys_are_values) {
      block.qkv = weights.linears({{"self_attn.q_proj", q_rows}, {"self_attn.k_proj", kv_rows}}, hidden, false);
    } else {
      block.qkv =
          weights.linears({{"self_attn.q_proj", q_rows}, {"self_attn.k_proj", kv_rows}, {"self_attn.v_proj", kv_rows}},
                          hidden, /*biased=*/false);
    }
    block.kv = attention_.size();
    last_of_kind_[slides ? 0 : 1] = block.kv;
    attention_.push_back(spec);
  }

  void load_block(const Checkpoint& checkpoint, ops::Ops& ops, int layer) {
    const LayerWeights weights(checkpoint, ops, layer);
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const int hidden = config_.hidden;
    if (!owns_kv(layer) && !last_of_kind_[config_.sliding.slides(layer) ? 0 : 1]) {
      throw ModelError(checkpoint.path().string() + ": layer " + std::to_string(layer) +
                       " shares keys and values, but no earlier layer of its kind has any");
    }
    Block block;
    load_attention(weights, ops, layer, block);
    const int wide = config_.shared_kv.double_wide_mlp && !owns_kv(layer) ? 2 : 1;
    block.mlp_norm = weights.norm("pre_feedforward_layernorm", hidden);
    block.mlp = weights.mlp(hidden, config_.intermediate * wide, ops::Activation::geglu);
    const ops::NormPtr post_norm = weights.norm("post_feedforward_layernorm", hidden);
    ops::FactorPtr factor;
    if (checkpoint.has(prefix + "layer_scalar"))
      factor = ops.load_factor(checkpoint.vector(prefix + "layer_scalar", 1));
    if (config_.per_layer.width > 0) {
      const int width = config_.per_layer.width;
      block.gate.gate = weights.linears({{"per_layer_input_gate", width}}, hidden, /*biased=*/false).front();
      block.gate.projection = weights.linears({{"per_layer_projection", hidden}}, width, /*biased=*/false).front();
      block.gate.post_norm = weights.norm("post_per_layer_input_norm", hidden);
      block.gate.post_factor = std::exchange(factor, nullptr);  // the last of the layer's branches
    }
    if (config_.experts.count > 0) {
      block.mlp.post_norm = weights.norm("post_feedforward_layernorm_1", hidden);
      block.beside = beside(checkpoint, ops, layer, block);
      block.beside->post_norm = post_norm;
      block.beside->post_factor = factor;
    } else {
      block.mlp.post_norm = post_norm;
      block.mlp.post_factor = factor;
    }
    blocks_.push_back(std::move(block));
  }

  [[nodiscard]] ops::MlpBesideMoe beside(const Checkpoint& checkpoint, ops::Ops& ops, int layer,
                                         const Block& block) const {
    const LayerWeights weights(checkpoint, ops, layer);
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    ops::MlpBesideMoe both;
    both.mlp_norm = block.mlp_norm;
    both.mlp = block.mlp;
    ops::VectorSource scale = checkpoint.vector(prefix + "router.scale", config_.hidden);
    const float by = rounded(inverse_root(config_.hidden), scale.type);
    for (float& value : scale.values) value *= by;
    both.router_norm = ops.load_norm(scale, config_.norm_eps);
    both.moe_norm = weights.norm("pre_feedforward_layernorm_2", config_.hidden);
    both.moe_post_norm = weights.norm("post_feedforward_layernorm_2", config_.hidden);
    const Experts& experts = config_.experts;
    const auto stack = [&](const char* name, int rows, int cols) {
      return checkpoint.stacked(prefix + "experts." + name, experts.count, rows, cols);
    };
    // Gate and up lie in one tensor in the original and in GGUF files.
    const int inner = experts.intermediate;
    const bool together = checkpoint.has(prefix + "experts.gate_up_proj");
    const auto half = [&](const char* name, int first) {
      if (!together) return stack(name, inner, config_.hidden);
      return rows_of_each(stack("gate_up_proj", 2 * inner, config_.hidden), experts.count, first, inner);
    };
    const bool original = checkpoint.has(prefix + "experts.down_proj");
    const auto down = stack(original ? "down_proj" : "switch_glu.down_proj.weight", config_.hidden, inner);
    const ops::VectorSource factors = checkpoint.vector(prefix + "router.per_expert_scale", experts.count);
    const ops::MoeSpec spec{experts.count, experts.per_token, /*normalized=*/true, ops::Activation::geglu,
                            /*softmax_of_picked=*/true};
    both.moe = ops.load_moe(*checkpoint.matrix(prefix + "router.proj.weight", experts.count, config_.hidden),
                            *half("switch_glu.gate_proj.weight", 0), *half("switch_glu.up_proj.weight", inner), *down,
                            spec, &factors);
    return both;
  }

  Config config_;
  ops::LinearPtr embedding_;
  ops::PerLayerInputs per_layer_;
  std::vector<Block> blocks_;
  std::vector<ops::AttentionSpec> attention_;   ///< of the layers that own keys and values
  std::optional<std::size_t> last_of_kind_[2];  ///< cache of the last such layer: sliding, full
  ops::NormPtr norm_;
  ops::LinearPtr head_;
};

}  // namespace

std::unique_ptr<Model> load_gemma4(const Checkpoint& checkpoint, ops::Ops& ops) {
  return std::make_unique<Gemma4>(checkpoint, ops);
}

}  // namespace galley::models
