// What the decoder families have in common: pre-norm blocks of grouped-query attention and a gated MLP (or experts)
// between an embedding and a head. A family's file names its layers through a DecoderBuilder; the forward is written
// once, here:
//
//   h = embed(tokens)
//   for each layer:  h = h + o(attend(q, k, v of norm(h)));  h = h + mlp(norm(h)), or h + experts(norm(h))
//   logits = head(norm(h))
#pragma once
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "models/model.h"

namespace galley::models {

/// Weights of one layer by the names they have below "model.layers.N.".
class LayerWeights {
 public:
  LayerWeights(const Checkpoint& checkpoint, ops::Ops& ops, int layer);

  struct Part {
    const char* name;  ///< module: "self_attn.q_proj"
    int rows;
  };
  /// Projections that share an input of `cols`; `biased`: each has a ".bias" too.
  [[nodiscard]] std::vector<ops::LinearPtr> linears(std::initializer_list<Part> parts, int cols, bool biased) const;
  /// `name`: module ("input_layernorm"); its ".weight" is read.
  [[nodiscard]] ops::NormPtr norm(const char* name, int size) const;
  /// "mlp.gate_proj", "mlp.up_proj" and "mlp.down_proj", without biases.
  [[nodiscard]] ops::GatedMlp mlp(int hidden, int intermediate, ops::Activation activation) const;
  /// "mlp.gate" (the router), and the experts as "mlp.switch_mlp.*" (stacked, as MLX has them) or "mlp.experts.E.*".
  [[nodiscard]] ops::Moe moe(int hidden, const Experts& experts, ops::Activation activation) const;

 private:
  const Checkpoint& checkpoint_;
  ops::Ops& ops_;
  std::string prefix_;
};

/// The embedding "model.embed_tokens", and the head: the same again where it is tied, else "lm_head".
ops::LinearPtr load_embedding(const Checkpoint& checkpoint, ops::Ops& ops);
ops::LinearPtr load_head(const Checkpoint& checkpoint, ops::Ops& ops, const ops::LinearPtr& embedding);

/// What sets the attention of these families apart.
struct AttentionTraits {
  bool qkv_bias = false;
  bool output_bias = false;
  bool head_norms = false;  ///< "q_norm" and "k_norm", over each head before RoPE
};

/// Loads a decoder from a checkpoint whose config says the sizes. Layers are added in order, attention first.
class DecoderBuilder {
 public:
  /// Reads the embedding. `checkpoint` and `ops` are borrowed until build() returns.
  DecoderBuilder(const Checkpoint& checkpoint, ops::Ops& ops);
  ~DecoderBuilder();
  DecoderBuilder(const DecoderBuilder&) = delete;
  DecoderBuilder& operator=(const DecoderBuilder&) = delete;

  [[nodiscard]] const Config& config() const;
  void attention(int layer, const AttentionTraits& traits);
  /// A gated MLP of config().intermediate, by SiLU.
  void mlp(int layer);
  /// A mixture of config().experts in its place.
  void experts(int layer);
  /// Reads the last norm and the head; the builder is spent.
  std::unique_ptr<Model> build();

 private:
  class Decoder;
  const Checkpoint& checkpoint_;
  ops::Ops& ops_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace galley::models
