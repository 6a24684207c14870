#include "models/config_json.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <limits>

#include "ops/error.h"

namespace galley::models {
namespace {

using nlohmann::json;

/// Looks up keys of one JSON object; a value of the wrong kind is an error that names all there is to know.
class Keys {
 public:
  Keys(const std::filesystem::path& file, const json& object, std::string prefix = {})
      : file_(file), object_(object), prefix_(std::move(prefix)) {}

  [[noreturn]] void fail(const std::string& what) const { throw ModelError(file_.string() + ": " + what); }

  /// Null when the key is absent or its value is null.
  [[nodiscard]] const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] std::optional<int> integer(const char* key) const {
    const json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_integer()) wrong(key, "an integer", *value);
    const bool fits = value->is_number_unsigned()
                          ? value->get<std::uint64_t>() <= std::numeric_limits<std::int32_t>::max()
                          : value->get<std::int64_t>() >= 0;
    if (!fits) wrong(key, "0 to 2147483647", *value);
    return value->get<int>();
  }

  [[nodiscard]] std::optional<float> number(const char* key) const {
    const json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) wrong(key, "a number", *value);
    return static_cast<float>(value->get<double>());
  }

  [[nodiscard]] std::optional<bool> boolean(const char* key) const {
    const json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong(key, "true or false", *value);
    return value->get<bool>();
  }

  [[nodiscard]] std::optional<std::string> string(const char* key) const {
    const json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) wrong(key, "a string", *value);
    return value->get<std::string>();
  }

  template <typename T>
  T required(const std::optional<T>& value, const char* key) const {
    if (!value) fail("\"" + prefix_ + key + "\" is missing");
    return *value;
  }
  [[nodiscard]] int required_int(const char* key) const { return required(integer(key), key); }

  [[noreturn]] void wrong(const std::string& key, const std::string& wanted, const json& found) const {
    std::string text = found.dump(-1, ' ', false, json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    fail("\"" + prefix_ + key + "\": expected " + wanted + ", found " + text);
  }

 private:
  const std::filesystem::path& file_;
  const json& object_;
  std::string prefix_;
};

/// The object under `key`; null when absent.
const json* object_at(const Keys& keys, const char* key) {
  const json* const value = keys.find(key);
  if (value != nullptr && !value->is_object()) keys.wrong(key, "an object", *value);
  return value;
}

/// `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both.
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

/// Options that change the numbers and that the llama family here does not have.
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
  if (type != "llama") keys.fail("model_type \"" + type + "\" is not supported; supported is llama");
  refuse_unsupported(keys);

  FolderConfig out;
  Config& config = out.config;
  config.family = type;
  config.name = std::filesystem::absolute(file).parent_path().filename().string();
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
  config.attention_bias = keys.boolean("attention_bias").value_or(false);
  config.mlp_bias = keys.boolean("mlp_bias").value_or(false);
  out.tied_head = keys.boolean("tie_word_embeddings");
  read_rope(file, keys, config);
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
