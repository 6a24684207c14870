// A model's hyper-parameters, whichever file they came from (config.json or GGUF metadata).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace galley::models {

/// RoPE scaling as the checkpoint asks for it. A type that a family doesn't implement is refused by name at load.
struct RopeScaling {
  std::string type;  ///< "", "linear", "llama3"
  float factor = 1.0F;
  float low_freq_factor = 1.0F;
  float high_freq_factor = 4.0F;
  int original_context = 8192;
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
  bool attention_bias = false;
  bool mlp_bias = false;
};

}  // namespace galley::models
