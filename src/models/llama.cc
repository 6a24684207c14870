// Llama: pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP.
//   Touvron et al. 2023, "LLaMA: Open and efficient foundation language models"; Llama 3's RoPE scaling in rope.h.
#include "models/llama.h"

#include <cmath>
#include <string>
#include <utility>

#include "models/rope.h"
#include "ops/error.h"

namespace galley::models {
namespace {

class Llama final : public Model {
 public:
  Llama(const Checkpoint& checkpoint, ops::Ops& ops) : config_(checkpoint.config()) {
    embedding_ = ops.load_embedding(*checkpoint.matrix("model.embed_tokens.weight", config_.vocab, config_.hidden));
    blocks_.reserve(config_.layers);
    attention_.reserve(config_.layers);
    for (int layer = 0; layer < config_.layers; ++layer) {
      load_block(checkpoint, ops, "model.layers." + std::to_string(layer) + ".");
    }
    norm_ = ops.load_norm(checkpoint.vector("model.norm.weight", config_.hidden), config_.norm_eps);
    if (config_.tied_head) {
      head_ = embedding_;
    } else {
      const auto head = checkpoint.matrix("lm_head.weight", config_.vocab, config_.hidden);
      head_ = ops.load_linears({head.get()}).front();
    }
  }

  [[nodiscard]] const Config& config() const override { return config_; }
  [[nodiscard]] std::span<const ops::AttentionSpec> attention_layers() const override { return attention_; }

  ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const override {
    ops::Value h = ops.embed(embedding_);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = blocks_[i];
      const auto qkv = ops.norm_linear(h, block.attention_norm, block.qkv);
      const ops::Value mixed = ops.attend(qkv[0], qkv[1], qkv[2], attention_[i], *kv[i]);
      h = ops.linear_residual(mixed, block.output, h);
      h = ops.gated_mlp(h, block.mlp_norm, block.mlp);
    }
    return ops.logits(h, norm_, head_);
  }

 private:
  struct Block {
    ops::NormPtr attention_norm;
    std::vector<ops::LinearPtr> qkv;
    ops::LinearPtr output;
    ops::NormPtr mlp_norm;
    ops::GatedMlp mlp;
  };

  void load_block(const Checkpoint& checkpoint, ops::Ops& ops, const std::string& prefix) {
    const int hidden = config_.hidden;
    const int q_rows = config_.heads * config_.head_dim;
    const int kv_rows = config_.kv_heads * config_.head_dim;

    ops::AttentionSpec spec;
    spec.heads = config_.heads;
    spec.kv_heads = config_.kv_heads;
    spec.head_dim = config_.head_dim;
    spec.scale = static_cast<float>(std::pow(static_cast<double>(config_.head_dim), -0.5));
    spec.rope = attention_.empty() ? make_rope(config_) : attention_.front().rope;
    attention_.push_back(std::move(spec));

    Block block;
    const auto norm = [&](const char* name) {
      return ops.load_norm(checkpoint.vector(prefix + name, hidden), config_.norm_eps);
    };
    const auto linears = [&](std::initializer_list<std::pair<const char*, int>> parts, int cols, bool biased) {
      std::vector<std::unique_ptr<ops::MatrixSource>> matrices;
      std::vector<ops::VectorSource> biases;
      std::vector<const ops::MatrixSource*> group;
      std::vector<const ops::VectorSource*> group_biases;
      for (const auto& [name, rows] : parts) {
        matrices.push_back(checkpoint.matrix(prefix + name + ".weight", rows, cols));
        group.push_back(matrices.back().get());
        if (biased) biases.push_back(checkpoint.vector(prefix + name + ".bias", rows));
      }
      for (const auto& bias : biases) group_biases.push_back(&bias);
      return ops.load_linears(group, group_biases);
    };

    const bool biased = config_.attention_bias;
    block.attention_norm = norm("input_layernorm.weight");
    block.qkv = linears({{"self_attn.q_proj", q_rows}, {"self_attn.k_proj", kv_rows}, {"self_attn.v_proj", kv_rows}},
                        hidden, biased);
    block.output = linears({{"self_attn.o_proj", hidden}}, q_rows, biased).front();
    block.mlp_norm = norm("post_attention_layernorm.weight");
    if (config_.mlp_bias) throw ModelError(checkpoint.path().string() + ": llama with mlp_bias is not supported");
    block.mlp = ops.load_mlp(*checkpoint.matrix(prefix + "mlp.gate_proj.weight", config_.intermediate, hidden),
                             *checkpoint.matrix(prefix + "mlp.up_proj.weight", config_.intermediate, hidden),
                             *checkpoint.matrix(prefix + "mlp.down_proj.weight", hidden, config_.intermediate),
                             ops::Activation::silu);
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

std::unique_ptr<Model> load_llama(const Checkpoint& checkpoint, ops::Ops& ops) {
  return std::make_unique<Llama>(checkpoint, ops);
}

}  // namespace galley::models
