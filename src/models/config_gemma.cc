#include "models/config_gemma.h"

#include <string>

#include "models/config_keys.h"

namespace galley::models {
namespace {

using nlohmann::json;

/// Options that change the numbers and that Gemma 3 here does not have.
void refuse_unsupported(const Keys& keys) {
  require_gelu(keys);
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (keys.number(key)) keys.fail("\"" + std::string(key) + "\" is not supported for Gemma 3");
  }
  for (const char* key : {"attention_bias", "use_bidirectional_attention"}) {
    if (keys.boolean(key).value_or(false)) keys.fail("\"" + std::string(key) + "\": true is not supported");
  }
}

/// layer_types says the same as sliding_window_pattern, or the model is another one.
void check_layer_types(const Keys& keys, const Config& config) {
  const json* const types = keys.find("layer_types");
  if (types == nullptr) return;
  if (!types->is_array()) keys.wrong("layer_types", "a list", *types);
  for (std::size_t layer = 0; layer < types->size(); ++layer) {
    const bool slides = config.sliding.slides(static_cast<int>(layer));
    if ((*types)[layer] != (slides ? "sliding_attention" : "full_attention")) {
      keys.wrong("layer_types",
                 "full_attention in each " + std::to_string(config.sliding.pattern) +
                     "th layer and sliding_attention "
                     "in the others",
                 *types);
    }
  }
}

/// "rope_theta", "rope_local_base_freq" and "rope_scaling"; or the newer "rope_parameters" with an object for each
/// kind of layer.
void read_rope_of_both(const std::filesystem::path& file, const Keys& keys, Config& config) {
  config.rope_base = 1e6F;
  config.sliding.rope_base = keys.number("rope_local_base_freq").value_or(1e4F);
  const json* const parameters = object_at(keys, "rope_parameters");
  if (parameters == nullptr || !parameters->contains("full_attention")) {
    read_rope(file, keys, config);
    return;
  }
  const Keys kinds(file, *parameters, "rope_parameters.");
  if (const json* const full = object_at(kinds, "full_attention")) {
    const json as_before{{"rope_theta", full->value("rope_theta", json())}, {"rope_scaling", *full}};
    read_rope(file, Keys(file, as_before, "rope_parameters.full_attention."), config);
  }
  if (const json* const sliding = object_at(kinds, "sliding_attention")) {
    read_sliding_rope(Keys(file, *sliding, "rope_parameters.sliding_attention."), config.sliding);
  }
}

/// Keys that a file leaves out have the values of Gemma 3 1B, as in mlx-lm; heads those that the caller says.
void read_text(const std::filesystem::path& file, const Keys& keys, int heads, int kv_heads, FolderConfig& out) {
  refuse_unsupported(keys);
  Config& config = out.config;
  config.family = "gemma3";
  config.hidden = keys.integer("hidden_size").value_or(1152);
  config.layers = keys.integer("num_hidden_layers").value_or(26);
  config.heads = keys.integer("num_attention_heads").value_or(heads);
  config.kv_heads = keys.integer("num_key_value_heads").value_or(kv_heads);
  config.head_dim = keys.integer("head_dim").value_or(256);
  config.intermediate = keys.integer("intermediate_size").value_or(6912);
  config.vocab = keys.integer("vocab_size").value_or(262144);
  config.context = keys.integer("max_position_embeddings").value_or(32768);
  config.norm_eps = keys.number("rms_norm_eps").value_or(1e-6F);
  config.query_scalar = keys.number("query_pre_attn_scalar").value_or(256.0F);
  config.norms_add_one = true;
  read_window(keys, 6, config.sliding);
  if (config.query_scalar <= 0) keys.wrong("query_pre_attn_scalar", "a positive number", config.query_scalar);
  check_layer_types(keys, config);
  read_rope_of_both(file, keys, config);
}

}  // namespace

void require_gelu(const Keys& keys) {
  for (const char* key : {"hidden_activation", "hidden_act"}) {
    if (const auto activation = keys.string(key); activation && *activation != "gelu_pytorch_tanh") {
      keys.fail("\"" + std::string(key) + "\": expected \"gelu_pytorch_tanh\", found \"" + *activation + "\"");
    }
  }
}

void read_window(const Keys& keys, int pattern, SlidingLayers& sliding) {
  sliding.window = keys.integer("sliding_window").value_or(512);
  sliding.pattern = keys.integer("sliding_window_pattern").value_or(pattern);
  if (sliding.window == 0) keys.wrong("sliding_window", "a number of tokens", *keys.find("sliding_window"));
  if (sliding.pattern == 0) keys.wrong("sliding_window_pattern", "1 or more", 0);
}

void read_sliding_rope(const Keys& rope, SlidingLayers& sliding) {
  sliding.rope_base = rope.number("rope_theta").value_or(sliding.rope_base);
  if (const auto type = rope.string("rope_type"); type && *type != "default") {
    rope.wrong("rope_type", "\"default\"", *rope.find("rope_type"));
  }
}

void read_gemma3_text(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  read_text(file, Keys(file, object), 4, 1, out);
}

void read_gemma3(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  const json* const text = object_at(keys, "text_config");
  if (text == nullptr) keys.fail("\"text_config\" is missing");
  read_text(file, Keys(file, *text, "text_config."), 8, 4, out);
  out.config.vocab = keys.integer("vocab_size").value_or(262208);
  out.tensor_prefix = "language_model.";
}

}  // namespace galley::models
