#include "models/config_json.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <string_view>

#include "models/config_gemma.h"
#include "models/config_keys.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using nlohmann::json;

/// Options that change the numbers and that decoders of the llama kind here do not have.
void refuse_unsupported(const Keys& keys) {
  if (const auto activation = keys.string("hidden_act"); activation && *activation != "silu") {
    keys.fail("\"hidden_act\": expected \"silu\", found \"" + *activation + "\"");
  }
  if (const auto part = keys.number("partial_rotary_factor"); part && *part != 1.0F) {
    keys.wrong("partial_rotary_factor", "1", *keys.find("partial_rotary_factor"));
  }
  if (keys.boolean("rope_interleaved").value_or(false)) keys.fail("\"rope_interleaved\": true is not supported");
  if (const json* const types = keys.find("layer_types")) {
    if (!types->is_array()) keys.wrong("layer_types", "a list", *types);
    for (const json& type : *types) {
      if (type != "full_attention") keys.wrong("layer_types", "full_attention throughout", type);
    }
  }
}

/// What the decoders of the llama kind share; a family sets what differs before or after.
void read_decoder(const std::filesystem::path& file, const Keys& keys, FolderConfig& out) {
  refuse_unsupported(keys);
  Config& config = out.config;
  config.hidden = keys.required_int("hidden_size");
  config.layers = keys.required_int("num_hidden_layers");
  config.heads = keys.required_int("num_attention_heads");
  config.kv_heads = keys.integer("num_key_value_heads").value_or(config.heads);
  config.intermediate = keys.required_int("intermediate_size");
  config.vocab = keys.required_int("vocab_size");
  config.context = keys.required_int("max_position_embeddings");
  config.norm_eps = keys.required(keys.number("rms_norm_eps"), "rms_norm_eps");
  const auto head_dim = keys.integer("head_dim");
  if (!head_dim && (config.heads == 0 || config.hidden % config.heads != 0)) {
    keys.fail("hidden_size " + std::to_string(config.hidden) + " is not a multiple of num_attention_heads " +
              std::to_string(config.heads) + ", and head_dim is missing");
  }
  config.head_dim = head_dim ? *head_dim : config.hidden / config.heads;
  out.tied_head = keys.boolean("tie_word_embeddings");
  read_rope(file, keys, config);
}

void read_llama(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  read_decoder(file, keys, out);
  out.config.attention_bias = keys.boolean("attention_bias").value_or(false);
  out.config.mlp_bias = keys.boolean("mlp_bias").value_or(false);
}

void read_qwen2(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  out.config.rope_base = 1e6F;
  read_decoder(file, keys, out);
  if (keys.boolean("use_sliding_window").value_or(false)) keys.fail("\"use_sliding_window\": true is not supported");
}

void read_qwen3(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  out.config.rope_base = 0.0F;  // no default
  read_decoder(file, keys, out);
  if (out.config.rope_base == 0.0F) keys.fail("\"rope_theta\" is missing");
  if (keys.boolean("attention_bias").value_or(false)) keys.fail("\"attention_bias\": true is not supported");
  if (keys.boolean("use_sliding_window").value_or(false)) keys.fail("\"use_sliding_window\": true is not supported");
}

void read_qwen3_moe(const std::filesystem::path& file, const json& object, FolderConfig& out) {
  const Keys keys(file, object);
  read_qwen3(file, object, out);
  if (!out.config.rope_scaling.type.empty()) {
    keys.fail("RoPE scaling \"" + out.config.rope_scaling.type + "\" is not supported with experts");
  }
  Experts& experts = out.config.experts;
  experts.count = keys.required_int("num_experts");
  experts.per_token = keys.required_int("num_experts_per_tok");
  experts.intermediate = keys.required_int("moe_intermediate_size");
  experts.normalized = keys.boolean("norm_topk_prob").value_or(false);
  experts.step = keys.integer("decoder_sparse_step").value_or(1);
  if (const json* const dense = keys.find("mlp_only_layers")) {
    if (!dense->is_array()) keys.wrong("mlp_only_layers", "a list of layers", *dense);
    for (const json& layer : *dense) {
      if (!layer.is_number_unsigned() || layer.get<std::uint64_t>() >= static_cast<std::uint64_t>(out.config.layers)) {
        keys.wrong("mlp_only_layers", "layers of the model", *dense);
      }
      experts.dense_layers.push_back(layer.get<int>());
    }
  }
}

/// How a family reads its keys into what starts with nothing but family and name set.
struct FamilyKeys {
  std::string_view name;  ///< model_type
  void (*read)(const std::filesystem::path& file, const json& object, FolderConfig& out);
};

// One line a family, sorted by name.
constexpr std::array families{
    FamilyKeys{"gemma3", read_gemma3}, FamilyKeys{"gemma3_text", read_gemma3_text},
    FamilyKeys{"gemma4", read_gemma4}, FamilyKeys{"gemma4_text", read_gemma4_text},
    FamilyKeys{"llama", read_llama},   FamilyKeys{"qwen2", read_qwen2},
    FamilyKeys{"qwen3", read_qwen3},   FamilyKeys{"qwen3_moe", read_qwen3_moe},
};

ops::AffineFormat affine_format(const Keys& keys, const ops::AffineFormat& otherwise) {
  static constexpr std::array bits{2, 3, 4, 5, 6, 8};
  static constexpr std::array groups{32, 64, 128};
  ops::AffineFormat format;
  format.bits = keys.integer("bits").value_or(otherwise.bits);
  format.group = keys.integer("group_size").value_or(otherwise.group);
  if (const auto mode = keys.string("mode"); mode && *mode != "affine") {
    keys.fail("quantization mode \"" + *mode + "\" is not supported; supported is affine");
  }
  if (std::ranges::find(bits, format.bits) == bits.end()) {
    keys.fail("quantization to " + std::to_string(format.bits) +
              " bits is not supported; supported are 2, 3, 4, 5, 6, 8");
  }
  if (std::ranges::find(groups, format.group) == groups.end()) {
    keys.fail("quantization in groups of " + std::to_string(format.group) +
              " is not supported; supported are 32, 64, 128");
  }
  return format;
}

}  // namespace

void read_rope(const std::filesystem::path& file, const Keys& keys, Config& config) {
  config.rope_base = keys.number("rope_theta").value_or(config.rope_base);
  config.rope_traditional = keys.boolean("rope_traditional").value_or(false);
  const json* const older = object_at(keys, "rope_scaling");
  const json* const newer = object_at(keys, "rope_parameters");
  if (newer != nullptr) {
    config.rope_base = Keys(file, *newer, "rope_parameters.").number("rope_theta").value_or(config.rope_base);
  }
  if (older == nullptr && newer == nullptr) return;

  const std::string key = older != nullptr ? "rope_scaling" : "rope_parameters";
  const Keys rope(file, older != nullptr ? *older : *newer, key + ".");
  if (rope.number("partial_rotary_factor").value_or(1.0F) != 1.0F) {
    rope.wrong("partial_rotary_factor", "1", *rope.find("partial_rotary_factor"));
  }
  auto type = rope.string("rope_type");
  if (!type) type = rope.string("type");
  if (!type && rope.find("factor") != nullptr) keys.fail("\"" + key + "\" has a factor, but \"rope_type\" is missing");
  if (!type || *type == "default") return;
  if (*type != "linear" && *type != "llama3") {
    keys.fail("\"" + key + "\": type \"" + *type + "\" is not supported; supported are default, linear, llama3");
  }
  RopeScaling& scaling = config.rope_scaling;
  scaling.type = *type;
  scaling.factor = rope.required(rope.number("factor"), "factor");
  if (*type != "llama3") return;
  scaling.low_freq_factor = rope.required(rope.number("low_freq_factor"), "low_freq_factor");
  scaling.high_freq_factor = rope.required(rope.number("high_freq_factor"), "high_freq_factor");
  scaling.original_context = rope.required_int("original_max_position_embeddings");
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw ModelError(path.string() + ": the file is missing or cannot be read");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) throw ModelError(path.string() + ": the file cannot be read");
  return text;
}

nlohmann::json read_json_object(const std::filesystem::path& path) {
  json object;
  try {
    object = json::parse(read_text(path));
  } catch (const json::exception& error) {
    throw ModelError(path.string() + ": not valid JSON: " + error.what());
  }
  if (!object.is_object()) throw ModelError(path.string() + ": expected a JSON object");
  return object;
}

FolderConfig folder_config(const std::filesystem::path& file, const nlohmann::json& object) {
  const Keys keys(file, object);
  const std::string type = keys.required(keys.string("model_type"), "model_type");
  const auto family = std::ranges::find(families, type, &FamilyKeys::name);
  if (family == families.end()) {
    std::string known;
    for (const FamilyKeys& each : families) known += (known.empty() ? "" : ", ") + std::string(each.name);
    keys.fail("model_type \"" + type + "\" is not supported; supported are " + known);
  }
  FolderConfig out;
  out.config.family = type;
  out.config.name = std::filesystem::absolute(file).parent_path().filename().string();
  family->read(file, object, out);
  return out;
}

Quantization folder_quantization(const std::filesystem::path& file, const nlohmann::json& object) {
  Quantization out;
  const Keys keys(file, object);
  const char* key = "quantization";
  const json* found = object_at(keys, key);
  if (found == nullptr) {
    found = object_at(keys, key = "quantization_config");
    if (found == nullptr) return out;
    if (const auto method = Keys(file, *found, "quantization_config.").string("quant_method")) {
      keys.fail("quantization method \"" + *method + "\" is not supported; supported is MLX's affine quantization");
    }
  }
  const std::string prefix = std::string(key) + ".";
  const Keys standard(file, *found, prefix);
  (void)standard.required_int("bits");
  (void)standard.required_int("group_size");
  out.standard = affine_format(standard, {});
  for (const auto& [module, value] : found->items()) {
    // Modules are the keys whose values are objects or booleans; the rest describes the whole.
    if (value.is_object()) {
      out.overrides[module] = affine_format(Keys(file, value, prefix + module + "."), *out.standard);
    } else if (value.is_boolean()) {
      out.overrides[module] = value.get<bool>() ? out.standard : std::nullopt;
    }
  }
  return out;
}

}  // namespace galley::models
