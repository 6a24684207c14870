// Gemma 3: blocks with a norm before and after both attention and MLP, an RMS norm over every query and key head, and
// five layers with a sliding window to each that sees everything. Sliding layers rotate by a base of their own and
// without scaling. The MLP is gated by GELU; embeddings are scaled by sqrt(hidden); the head is tied.
//   Gemma Team 2025, "Gemma 3 technical report".
#include "models/gemma3.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "models/decoder.h"
#include "models/rope.h"

namespace galley::models {
namespace {

/// The models were made with this factor in bfloat16.
float embedding_scale(int hidden) {
  const auto bits = std::bit_cast<std::uint32_t>(std::sqrt(static_cast<float>(hidden)));
  return std::bit_cast<float>((bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
}

class Gemma3 final : public Model {
 public:
  Gemma3(const Checkpoint& checkpoint, ops::Ops& ops) : config_(checkpoint.config()) {
    embedding_ = load_embedding(checkpoint, ops);
    const ops::Rope full = make_rope(config_);
    for (int layer = 0; layer < config_.layers; ++layer) load_block(checkpoint, ops, layer, full);
    norm_ = load_norm(checkpoint, ops, "model.norm", config_.hidden);
    head_ = load_head(checkpoint, ops, embedding_);
  }

  [[nodiscard]] const Config& config() const override { return config_; }
  [[nodiscard]] std::span<const ops::AttentionSpec> attention_layers() const override { return attention_; }

  ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const override {
    ops::Value h = ops.embed(embedding_, embedding_scale(config_.hidden));
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = blocks_[i];
      const auto qkv = ops.norm_linear(h, block.attention_norm, block.qkv);
      const ops::Value mixed = ops.attend(qkv[0], qkv[1], qkv[2], attention_[i], *kv[i]);
      h = ops.linear_norm_residual(mixed, block.output, block.post_attention_norm, h);
      h = ops.gated_mlp(h, block.mlp_norm, block.mlp);
    }
    return ops.logits(h, norm_, head_);
  }

 private:
  struct Block {
    ops::NormPtr attention_norm;
    std::vector<ops::LinearPtr> qkv;
    ops::LinearPtr output;
    ops::NormPtr post_attention_norm;
    ops::NormPtr mlp_norm;
    ops::GatedMlp mlp;
  };

  /// A norm multiplies by 1 + weight; GGUF files have the sum already. Rounding it to the stored type is left to those
  /// who hold it in that type.
  static ops::NormPtr load_norm(const Checkpoint& checkpoint, ops::Ops& ops, const std::string& module, int size) {
    ops::VectorSource weight = checkpoint.vector(module + ".weight", size);
    if (checkpoint.config().norms_add_one) {
      for (float& value : weight.values) value += 1.0F;
    }
    return ops.load_norm(weight, checkpoint.config().norm_eps);
  }

  void load_block(const Checkpoint& checkpoint, ops::Ops& ops, int layer, const ops::Rope& full) {
    const LayerWeights weights(checkpoint, ops, layer);
    const int hidden = config_.hidden;
    const int q_rows = config_.heads * config_.head_dim;
    const int kv_rows = config_.kv_heads * config_.head_dim;
    const auto norm = [&](const char* name, int size) {
      return load_norm(checkpoint, ops, "model.layers." + std::to_string(layer) + "." + name, size);
    };

    ops::AttentionSpec spec;
    spec.heads = config_.heads;
    spec.kv_heads = config_.kv_heads;
    spec.head_dim = config_.head_dim;
    spec.scale = static_cast<float>(std::pow(static_cast<double>(config_.query_scalar), -0.5));
    spec.q_norm = norm("self_attn.q_norm", config_.head_dim);
    spec.k_norm = norm("self_attn.k_norm", config_.head_dim);
    if (config_.sliding.slides(layer)) {
      spec.window = config_.sliding.window;
      spec.rope.dims = config_.head_dim;
      spec.rope.base = config_.sliding.rope_base;
    } else {
      spec.rope = full;
    }
    attention_.push_back(std::move(spec));

    Block block;
    block.attention_norm = norm("input_layernorm", hidden);
    block.qkv =
        weights.linears({{"self_attn.q_proj", q_rows}, {"self_attn.k_proj", kv_rows}, {"self_attn.v_proj", kv_rows}},
                        hidden, /*biased=*/false);
    block.output = weights.linears({{"self_attn.o_proj", hidden}}, q_rows, /*biased=*/false).front();
    block.post_attention_norm = norm("post_attention_layernorm", hidden);
    block.mlp_norm = norm("pre_feedforward_layernorm", hidden);
    block.mlp = weights.mlp(hidden, config_.intermediate, ops::Activation::gelu_tanh);
    block.mlp.post_norm = norm("post_feedforward_layernorm", hidden);
    blocks_.push_back(std::move(block));
  }

  Config config_;
  ops::LinearPtr embedding_;
  std::vector<Block> blocks_;
  std::vector<ops::AttentionSpec> attention_;
  ops::NormPtr norm_;
  ops::LinearPtr head_;
};

}  // namespace

std::unique_ptr<Model> load_gemma3(const Checkpoint& checkpoint, ops::Ops& ops) {
  return std::make_unique<Gemma3>(checkpoint, ops);
}

}  // namespace galley::models
