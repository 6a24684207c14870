// A model's hyper-parameters, whichever file they came from (config.json or GGUF metadata).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace galley::models {

/// RoPE scaling as the checkpoint asks for it. A type that a family doesn't implement is refused by name at load.
struct RopeScaling {
  std::string type;  ///< "", "linear", "llama3", "proportional"
  float factor = 1.0F;
  double rotated = 1.0;  ///< proportional: this part of a head turns, by the wavelengths of the whole head
  float low_freq_factor = 1.0F;
  float high_freq_factor = 4.0F;
  int original_context = 8192;
};

/// A mixture of experts in place of the MLP, in those layers l that are not listed and where (l + 1) % step == 0.
struct Experts {
  int count = 0;      ///< 0: the model has none
  int per_token = 0;  ///< how many of them the router picks
  int intermediate = 0;
  bool normalized = false;  ///< the weights of the picked ones are scaled to a sum of 1
  int step = 1;
  std::vector<int> dense_layers{};  ///< these keep their MLP
  bool beside_mlp = false;          ///< Gemma 4: in addition to the MLP, in every layer
};

/// Sliding windows in all layers l but those where (l + 1) % pattern == 0, or in those that are listed.
struct SlidingLayers {
  int window = 0;  ///< tokens, the current one included; 0: every layer sees everything
  int pattern = 1;
  float rope_base = 10000.0F;  ///< of the sliding layers; the others have Config's
  std::vector<bool> listed{};  ///< [layers] which slide, whatever the pattern; empty: as the pattern says

  [[nodiscard]] bool slides(int layer) const {
    if (!listed.empty()) return listed.at(static_cast<std::size_t>(layer));
    return window > 0 && (layer + 1) % pattern != 0;
  }
};

/// What sets the layers that see everything apart from the sliding ones in Gemma 4. 0: as in those.
struct FullLayers {
  int head_dim = 0;
  int kv_heads = 0;
  bool keys_are_values = false;  ///< values are the keys before their norm; there is no projection for them
};

/// Layers at the end that have no keys and values of their own: each reads those of the last layer of its kind (sliding
/// or full) that has.
struct SharedKv {
  int layers = 0;
  bool double_wide_mlp = false;  ///< their MLP is twice as wide
};

/// A second embedding with a vector of its own for every layer (Gemma 4 E2B and E4B).
struct PerLayerEmbedding {
  int width = 0;  ///< of each layer's vector; 0: the model has none
  int vocab = 0;
};

struct Config {
  std::string family;  ///< registry key: "llama"
  std::string name;    ///< for people: general.name, or the folder's name
  int hidden = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int intermediate = 0;
  int vocab = 0;
  int context = 0;  ///< longest sequence the model was made for, in tokens
  float norm_eps = 1e-5F;
  float rope_base = 10000.0F;
  bool rope_traditional = false;
  RopeScaling rope_scaling;
  bool tied_head = false;
  bool attention_bias = false;  ///< llama: on q, k, v and o
  bool mlp_bias = false;
  Experts experts;
  SlidingLayers sliding;
  FullLayers full;
  SharedKv shared_kv;
  PerLayerEmbedding per_layer;
  float query_scalar = 0.0F;   ///< Gemma: attention scores times query_scalar^-0.5
  float logit_softcap = 0.0F;  ///< logits become cap * tanh(logit / cap); 0: none
  bool norms_add_one = false;  ///< the file's norm weights are w where 1 + w multiplies
};

}  // namespace galley::models
