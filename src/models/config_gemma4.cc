#include <string>

#include "models/config_gemma.h"
#include "models/config_keys.h"

namespace galley::models {
namespace {

using nlohmann::json;

/// Options that change the numbers and that Gemma 4 here does not have.
void refuse_unsupported(const Keys& keys) {
  require_gelu(keys);
  if (keys.number("attn_logit_softcapping")) keys.fail("\"attn_logit_softcapping\" is not supported for Gemma 4");
  if (keys.boolean("attention_bias").value_or(false)) keys.fail("\"attention_bias\": true is not supported");
  // "vision" is about images alone.
  if (const json* const both = keys.find("use_bidirectional_attention"); both != nullptr && *both == true) {
    keys.fail("\"use_bidirectional_attention\": true is not supported");
  }
}

/// A key that is absent has its default; one that is null switches off what it is about, as in mlx-lm.
template <typename T>
T unless_null(const json& object, const char* key, const std::optional<T>& found, T otherwise) {
  if (found) return *found;
  return object.contains(key) ? T{} : otherwise;
}

void read_layers(const Keys& keys, Config& config) {
  SlidingLayers& sliding = config.sliding;
  read_window(keys, 5, sliding);
  if (const json* const types = keys.find("layer_types")) {
    if (!types->is_array() || types->size() < static_cast<std::size_t>(config.layers)) {
      keys.wrong("layer_types", "a list of as many as there are layers, " + std::to_string(config.layers), *types);
    }
    for (int layer = 0; layer < config.layers; ++layer) {
      const json& type = (*types)[static_cast<std::size_t>(layer)];
      if (type != "sliding_attention" && type != "full_attention") {
        keys.wrong("layer_types", "sliding_attention or full_attention", type);
      }
      sliding.listed.push_back(type == "sliding_attention");
    }
  }
  config.shared_kv.layers = keys.integer("num_kv_shared_layers").value_or(20);
  config.shared_kv.double_wide_mlp = keys.boolean("use_double_wide_mlp").value_or(true);
}

/// "rope_parameters": an object for each kind of layer. Without it full layers turn a quarter of the head.
void read_rope_of_both(const std::filesystem::path& file, const Keys& keys, Config& config) {
  static const json standard = json::parse(R"({
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})");
  config.rope_traditional = keys.boolean("rope_traditional").value_or(false);
  const json* const given = object_at(keys, "rope_parameters");
  const Keys kinds(file, given != nullptr ? *given : standard, "rope_parameters.");
  if (const json* const sliding = object_at(kinds, "sliding_attention")) {
    config.sliding.rope_base = 1e4F;
    read_sliding_rope(Keys(file, *sliding, "rope_parameters.sliding_attention."), config.sliding);
  }
  config.rope_base = 1e4F;
  const json* const full = object_at(kinds, "full_attention");
  if (full == nullptr) return;
  const Keys rope(file, *full, "rope_parameters.full_attention.");
  config.rope_base = rope.number("rope_theta").value_or(1e4F);
  const auto type = rope.string("rope_type").value_or("default");
  if (type == "default") return;
  if (type != "proportional" && type != "linear") {
    rope.wrong("rope_type", "\"default\", \"linear\" or \"proportional\"", type);
  }
  config.rope_scaling.type = type;
  config.rope_scaling.factor = rope.number("factor").value_or(1.0F);
  if (type == "linear") (void)rope.required(rope.number("factor"), "factor");
  if (const json* const part = rope.find("partial_rotary_factor"); type == "proportional" && part != nullptr) {
    (void)rope.number("partial_rotary_factor");
    config.rope_scaling.rotated = part->get<double>();
  }
}

void read_experts(const Keys& keys, Experts& experts) {
  if (!keys.boolean("enable_moe_block").value_or(false)) return;
  experts.count = keys.required_int("num_experts");
  experts.per_token = keys.required_int("top_k_experts");
  experts.intermediate = keys.required_int("moe_intermediate_size");
  experts.beside_mlp = true;
}

}  // namespace

void read_gemma4_text(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  refuse_unsupported(keys);
  Config& config = out.config;
  config.family = "gemma4";
  config.hidden = keys.integer("hidden_size").value_or(1536);
  config.layers = keys.integer("num_hidden_layers").value_or(35);
  config.heads = keys.integer("num_attention_heads").value_or(8);
  config.kv_heads = keys.integer("num_key_value_heads").value_or(1);
  config.head_dim = keys.integer("head_dim").value_or(256);
  config.intermediate = keys.integer("intermediate_size").value_or(6144);
  config.vocab = keys.integer("vocab_size").value_or(262144);
  config.context = keys.integer("max_position_embeddings").value_or(131072);
  config.norm_eps = keys.number("rms_norm_eps").value_or(1e-6F);
  config.logit_softcap = unless_null(object, "final_logit_softcapping", keys.number("final_logit_softcapping"), 30.0F);
  config.full.head_dim = unless_null(object, "global_head_dim", keys.integer("global_head_dim"), 512);
  config.full.keys_are_values = keys.boolean("attention_k_eq_v").value_or(false);
  if (config.full.keys_are_values) {
    config.full.kv_heads = keys.integer("num_global_key_value_heads").value_or(config.kv_heads);
  }
  config.per_layer.width =
      unless_null(object, "hidden_size_per_layer_input", keys.integer("hidden_size_per_layer_input"), 256);
  config.per_layer.vocab = keys.integer("vocab_size_per_layer_input").value_or(262144);
  out.tied_head = keys.boolean("tie_word_embeddings").value_or(true);
  read_layers(keys, config);
  read_rope_of_both(file, keys, config);
  read_experts(keys, config.experts);
}

void read_gemma4(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  const json* const text = object_at(keys, "text_config");
  if (text == nullptr) keys.fail("\"text_config\" is missing");
  json inner = *text;
  inner["vocab_size"] = keys.integer("vocab_size").value_or(262144);  // as in mlx-lm: the outer one counts
  read_gemma4_text(file, inner, out);
  out.tensor_prefix = "language_model.";
}

}  // namespace galley::models
