#include "models/decoder.h"

#include <cmath>
#include <utility>

#include "models/rope.h"
#include "models/stacked_matrix.h"

namespace galley::models {

LayerWeights::LayerWeights(const Checkpoint& checkpoint, ops::Ops& ops, int layer)
    : checkpoint_(checkpoint), ops_(ops), prefix_("model.layers." + std::to_string(layer) + ".") {}

std::vector<ops::LinearPtr> LayerWeights::linears(std::initializer_list<Part> parts, int cols, bool biased) const {
  std::vector<std::unique_ptr<ops::MatrixSource>> matrices;
  std::vector<ops::VectorSource> biases;
  std::vector<const ops::MatrixSource*> group;
  std::vector<const ops::VectorSource*> group_biases;
  for (const Part& part : parts) {
    matrices.push_back(checkpoint_.matrix(prefix_ + part.name + ".weight", part.rows, cols));
    group.push_back(matrices.back().get());
    if (biased) biases.push_back(checkpoint_.vector(prefix_ + part.name + ".bias", part.rows));
  }
  for (const auto& bias : biases) group_biases.push_back(&bias);
  return ops_.load_linears(group, group_biases);
}

ops::NormPtr LayerWeights::norm(const char* name, int size) const {
  return ops_.load_norm(checkpoint_.vector(prefix_ + name + ".weight", size), checkpoint_.config().norm_eps);
}

ops::GatedMlp LayerWeights::mlp(int hidden, int intermediate, ops::Activation activation) const {
  return ops_.load_mlp(*checkpoint_.matrix(prefix_ + "mlp.gate_proj.weight", intermediate, hidden),
                       *checkpoint_.matrix(prefix_ + "mlp.up_proj.weight", intermediate, hidden),
                       *checkpoint_.matrix(prefix_ + "mlp.down_proj.weight", hidden, intermediate), activation);
}

ops::Moe LayerWeights::moe(int hidden, const Experts& experts, ops::Activation activation) const {
  const auto projection = [&](const std::string& name, int rows, int cols) -> std::unique_ptr<ops::MatrixSource> {
    const std::string stacked = prefix_ + "mlp.switch_mlp." + name + ".weight";
    if (checkpoint_.has(stacked)) return checkpoint_.stacked(stacked, experts.count, rows, cols);
    std::vector<std::unique_ptr<ops::MatrixSource>> each;
    for (int e = 0; e < experts.count; ++e) {
      each.push_back(
          checkpoint_.matrix(prefix_ + "mlp.experts." + std::to_string(e) + "." + name + ".weight", rows, cols));
    }
    return stack_matrices(checkpoint_.path(), std::move(each));
  };
  const ops::MoeSpec spec{experts.count, experts.per_token, experts.normalized, activation};
  return ops_.load_moe(*checkpoint_.matrix(prefix_ + "mlp.gate.weight", experts.count, hidden),
                       *projection("gate_proj", experts.intermediate, hidden),
                       *projection("up_proj", experts.intermediate, hidden),
                       *projection("down_proj", hidden, experts.intermediate), spec);
}

ops::LinearPtr load_embedding(const Checkpoint& checkpoint, ops::Ops& ops) {
  const Config& config = checkpoint.config();
  return ops.load_embedding(*checkpoint.matrix("model.embed_tokens.weight", config.vocab, config.hidden));
}

ops::LinearPtr load_head(const Checkpoint& checkpoint, ops::Ops& ops, const ops::LinearPtr& embedding) {
  const Config& config = checkpoint.config();
  if (config.tied_head) return embedding;
  return ops.load_linears({checkpoint.matrix("lm_head.weight", config.vocab, config.hidden).get()}).front();
}

class DecoderBuilder::Decoder final : public Model {
 public:
  explicit Decoder(Config config) : config_(std::move(config)) {}

  [[nodiscard]] const Config& config() const override { return config_; }
  [[nodiscard]] std::span<const ops::AttentionSpec> attention_layers() const override { return attention_; }

  ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const override {
    ops::Value h = ops.embed(embedding);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const Block& block = blocks[i];
      const auto qkv = ops.norm_linear(h, block.attention_norm, block.qkv);
      const ops::Value mixed = ops.attend(qkv[0], qkv[1], qkv[2], attention_[i], *kv[i]);
      h = ops.linear_residual(mixed, block.output, h);
      h = block.moe.experts ? ops.moe(h, block.mlp_norm, block.moe) : ops.gated_mlp(h, block.mlp_norm, block.mlp);
    }
    return ops.logits(h, norm, head);
  }

  struct Block {
    ops::NormPtr attention_norm;
    std::vector<ops::LinearPtr> qkv;
    ops::LinearPtr output;
    ops::NormPtr mlp_norm;
    ops::GatedMlp mlp;
    ops::Moe moe;  ///< instead of the MLP where it has experts
  };

  void add_attention(ops::AttentionSpec spec) {
    spec.heads = config_.heads;
    spec.kv_heads = config_.kv_heads;
    spec.head_dim = config_.head_dim;
    spec.scale = static_cast<float>(std::pow(static_cast<double>(config_.head_dim), -0.5));
    spec.rope = attention_.empty() ? make_rope(config_) : attention_.front().rope;
    attention_.push_back(std::move(spec));
  }

  ops::LinearPtr embedding;
  std::vector<Block> blocks;
  ops::NormPtr norm;
  ops::LinearPtr head;

 private:
  Config config_;
  std::vector<ops::AttentionSpec> attention_;
};

DecoderBuilder::DecoderBuilder(const Checkpoint& checkpoint, ops::Ops& ops)
    : checkpoint_(checkpoint), ops_(ops), decoder_(std::make_unique<Decoder>(checkpoint.config())) {
  decoder_->blocks.resize(static_cast<std::size_t>(config().layers));
  decoder_->embedding = load_embedding(checkpoint, ops);
}

DecoderBuilder::~DecoderBuilder() = default;

const Config& DecoderBuilder::config() const { return checkpoint_.config(); }

void DecoderBuilder::attention(int layer, const AttentionTraits& traits) {
  const Config& c = config();
  const LayerWeights weights(checkpoint_, ops_, layer);
  const int q_rows = c.heads * c.head_dim;
  const int kv_rows = c.kv_heads * c.head_dim;
  Decoder::Block& block = decoder_->blocks.at(static_cast<std::size_t>(layer));
  block.attention_norm = weights.norm("input_layernorm", c.hidden);
  block.qkv =
      weights.linears({{"self_attn.q_proj", q_rows}, {"self_attn.k_proj", kv_rows}, {"self_attn.v_proj", kv_rows}},
                      c.hidden, traits.qkv_bias);
  block.output = weights.linears({{"self_attn.o_proj", c.hidden}}, q_rows, traits.output_bias).front();
  ops::AttentionSpec spec;
  if (traits.head_norms) {
    spec.q_norm = weights.norm("self_attn.q_norm", c.head_dim);
    spec.k_norm = weights.norm("self_attn.k_norm", c.head_dim);
  }
  decoder_->add_attention(std::move(spec));
}

void DecoderBuilder::mlp(int layer) {
  const LayerWeights weights(checkpoint_, ops_, layer);
  Decoder::Block& block = decoder_->blocks.at(static_cast<std::size_t>(layer));
  block.mlp_norm = weights.norm("post_attention_layernorm", config().hidden);
  block.mlp = weights.mlp(config().hidden, config().intermediate, ops::Activation::silu);
}

void DecoderBuilder::experts(int layer) {
  const LayerWeights weights(checkpoint_, ops_, layer);
  Decoder::Block& block = decoder_->blocks.at(static_cast<std::size_t>(layer));
  block.mlp_norm = weights.norm("post_attention_layernorm", config().hidden);
  block.moe = weights.moe(config().hidden, config().experts, ops::Activation::silu);
}

std::unique_ptr<Model> DecoderBuilder::build() {
  decoder_->norm = ops_.load_norm(checkpoint_.vector("model.norm.weight", config().hidden), config().norm_eps);
  decoder_->head = load_head(checkpoint_, ops_, decoder_->embedding);
  return std::move(decoder_);
}

}  // namespace galley::models
