#include "models/gguf_names.h"

#include <span>
#include <vector>

namespace galley::models {
namespace {

struct Module {
  const char* gguf;       ///< below "blk.N."
  const char* canonical;  ///< below "model.layers.N."
  bool biased = false;    ///< may have a ".bias"
  bool permuted = false;
};

constexpr Module llama[] = {
    {"attn_norm", "input_layernorm"},           {"attn_q", "self_attn.q_proj", true, true},
    {"attn_k", "self_attn.k_proj", true, true}, {"attn_v", "self_attn.v_proj", true},
    {"attn_output", "self_attn.o_proj", true},  {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj", true},        {"ffn_up", "mlp.up_proj", true},
    {"ffn_down", "mlp.down_proj", true},
};
constexpr Module qwen2[] = {
    {"attn_norm", "input_layernorm"},     {"attn_q", "self_attn.q_proj", true},
    {"attn_k", "self_attn.k_proj", true}, {"attn_v", "self_attn.v_proj", true},
    {"attn_output", "self_attn.o_proj"},  {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},        {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};
constexpr Module qwen3_attention[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},           {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},      {"attn_q_norm", "self_attn.q_norm"},      {"attn_k_norm", "self_attn.k_norm"},
    {"attn_output", "self_attn.o_proj"}, {"ffn_norm", "post_attention_layernorm"},
};
constexpr Module qwen3[] = {
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};
constexpr Module qwen3_moe[] = {
    {"ffn_gate_inp", "mlp.gate"},
    {"ffn_gate_exps", "mlp.switch_mlp.gate_proj"},
    {"ffn_up_exps", "mlp.switch_mlp.up_proj"},
    {"ffn_down_exps", "mlp.switch_mlp.down_proj"},
};

constexpr Module gemma[] = {
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"attn_output", "self_attn.o_proj"},
    {"post_attention_norm", "post_attention_layernorm"},
    {"ffn_norm", "pre_feedforward_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
    {"post_ffw_norm", "post_feedforward_layernorm"},
};

constexpr Module gemma4[] = {
    // besides
    {"ffn_gate_inp", "router.proj"},
    {"ffn_gate_exps", "experts.switch_glu.gate_proj"},
    {"ffn_up_exps", "experts.switch_glu.up_proj"},
    {"ffn_down_exps", "experts.switch_glu.down_proj"},
    {"pre_ffw_norm_2", "pre_feedforward_layernorm_2"},
    {"post_ffw_norm_1", "post_feedforward_layernorm_1"},
    {"post_ffw_norm_2", "post_feedforward_layernorm_2"},
    {"inp_gate", "per_layer_input_gate"},
    {"proj", "per_layer_projection"},
    {"post_norm", "post_per_layer_input_norm"},
};
/// Whole names, below the same prefixes.
constexpr Module gemma4_whole[] = {
    {"layer_output_scale.weight", "layer_scalar"},
    {"ffn_gate_inp.scale", "router.scale"},
    {"ffn_down_exps.scale", "router.per_expert_scale"},
    {"ffn_gate_up_exps.weight", "experts.gate_up_proj"},
};

std::vector<std::span<const Module>> modules_of(const Config& config) {
  if (config.family == "gemma3") return {gemma};
  if (config.family == "gemma4") return {gemma, gemma4};
  if (config.family == "qwen2") return {qwen2};
  if (config.family == "qwen3") return {qwen3_attention, qwen3};
  if (config.family == "qwen3_moe") return {qwen3_attention, qwen3_moe};
  return {llama};
}

}  // namespace

std::map<std::string, GgufName> gguf_tensor_names(const Config& config) {
  std::map<std::string, GgufName> names{
      {"token_embd.weight", {"model.embed_tokens.weight"}},
      {"output_norm.weight", {"model.norm.weight"}},
      {"output.weight", {"lm_head.weight"}},
  };
  if (config.family == "gemma4") {
    names["per_layer_token_embd.weight"] = {"model.embed_tokens_per_layer.weight"};
    names["per_layer_model_proj.weight"] = {"model.per_layer_model_projection.weight"};
    names["per_layer_proj_norm.weight"] = {"model.per_layer_projection_norm.weight"};
  }
  for (int layer = 0; layer < config.layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    for (const std::span<const Module> modules : modules_of(config)) {
      for (const Module& module : modules) {
        const std::string from = block + module.gguf, to = prefix + module.canonical;
        names[from + ".weight"] = {to + ".weight", module.permuted};
        if (module.biased) names[from + ".bias"] = {to + ".bias", module.permuted};
      }
    }
    if (config.family != "gemma4") continue;
    for (const Module& whole : gemma4_whole) names[block + whole.gguf] = {prefix + whole.canonical};
  }
  return names;
}

}  // namespace galley::models
