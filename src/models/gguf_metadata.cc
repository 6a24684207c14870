#include "models/gguf_metadata.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <unordered_map>

#include "models/checkpoint_numbers.h"
#include "models/checkpoint_shapes.h"
#include "models/checkpoint_text.h"
#include "ops/error.h"

namespace galley::models {
namespace {

[[noreturn]] void fail(const GgufFile& file, const std::string& what) {
  throw ModelError(file.path().string() + ": " + what);
}

int to_int(const GgufFile& file, const std::string& key, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    fail(file, "metadata \"" + key + "\" is " + std::to_string(value) + ", expected 0 to 2147483647");
  }
  return static_cast<int>(value);
}

int required_int(const GgufFile& file, const std::string& key) {
  const auto value = file.integer(key);
  if (!value) fail(file, "metadata \"" + key + "\" is missing, expected an integer");
  return to_int(file, key, *value);
}

int int_or(const GgufFile& file, const std::string& key, int otherwise) {
  const auto value = file.integer(key);
  return value ? to_int(file, key, *value) : otherwise;
}

/// The full name of one of the architecture's keys: key("rope.freq_base") is "qwen3.rope.freq_base".
struct Keys {
  std::string prefix;
  [[nodiscard]] std::string operator()(const char* name) const { return prefix + name; }
};

// ---- RoPE scaling

/// What convert_hf_to_gguf writes for Llama 3's scaling: by how much each pair's wavelength is stretched.
double llama3_stretch(double wavelength, const RopeScaling& scaling) {
  if (wavelength < scaling.original_context / scaling.high_freq_factor) return 1.0;
  if (wavelength > scaling.original_context / scaling.low_freq_factor) return scaling.factor;
  const double smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) /
                        (scaling.high_freq_factor - scaling.low_freq_factor);
  return 1.0 / ((1.0 - smooth) / scaling.factor + smooth);
}

/// The rope_freqs tensor holds only the outcome of Llama 3's scaling. The released models differ in nothing but the
/// factor, which is the largest stretch; anything that this does not reproduce is refused.
RopeScaling scaling_from_stretches(const GgufFile& file, const GgufTensor& tensor, const Config& config) {
  const std::array<std::uint64_t, 1> shape{static_cast<std::uint64_t>(config.head_dim) / 2};
  require_shape(file.path(), tensor.name, shape, tensor.shape);
  if (tensor.type->quantized())
    fail(file, "tensor \"rope_freqs.weight\" is " + std::string(tensor.type->name) + ", expected plain numbers");
  std::vector<float> stretches(shape[0]);
  widen(tensor.type->type, tensor.data, stretches);

  RopeScaling scaling;
  scaling.type = "llama3";
  scaling.factor = *std::ranges::max_element(stretches);
  for (std::size_t pair = 0; pair < stretches.size(); ++pair) {
    const double wavelength = 2 * std::numbers::pi *
                              std::pow(static_cast<double>(config.rope_base),
                                       2.0 * static_cast<double>(pair) / static_cast<double>(config.head_dim));
    const double expected = llama3_stretch(wavelength, scaling);
    if (!(std::abs(stretches[pair] - expected) <= 1e-3 * expected)) {
      fail(file, "tensor \"rope_freqs.weight\": element " + std::to_string(pair) + " is " +
                     std::to_string(stretches[pair]) + ", expected " + std::to_string(expected) +
                     ": only Llama 3's RoPE scaling (low_freq_factor 1, high_freq_factor 4, original context 8192) "
                     "is supported");
    }
  }
  // No stretch at all is no scaling.
  return scaling.factor == 1.0F ? RopeScaling{} : scaling;
}

/// Gemma 4's full layers: the first pairs turn unstretched, the others are stretched to a standstill.
RopeScaling scaling_from_stops(const GgufFile& file, const GgufTensor& tensor, const Config& config) {
  const int head_dim = config.full.head_dim;
  const std::array<std::uint64_t, 1> shape{static_cast<std::uint64_t>(head_dim) / 2};
  require_shape(file.path(), tensor.name, shape, tensor.shape);
  if (tensor.type->quantized())
    fail(file, "tensor \"rope_freqs.weight\" is " + std::string(tensor.type->name) + ", expected plain numbers");
  std::vector<float> stretches(shape[0]);
  widen(tensor.type->type, tensor.data, stretches);
  const auto still = std::ranges::find_if(stretches, [](float stretch) { return stretch != 1.0F; });
  if (std::any_of(still, stretches.end(), [](float stretch) { return !(stretch >= 1e20F); })) {
    fail(file, "tensor \"rope_freqs.weight\": expected ones and, after them, numbers so large that nothing turns");
  }
  RopeScaling scaling;
  scaling.type = "proportional";
  scaling.rotated = 2.0 * static_cast<double>(still - stretches.begin()) / head_dim;
  return scaling;
}

RopeScaling rope_scaling(const GgufFile& file, const Keys& key, const Config& config) {
  const auto type = file.string(key("rope.scaling.type"));
  const GgufTensor* const stretches = file.tensor("rope_freqs.weight");
  RopeScaling scaling;
  if (!type || *type == "none") {
    // Files from before rope.scaling.type give the factor alone.
    const auto factor = file.number(key("rope.scale_linear"));
    if (factor && *factor != 1.0) {
      scaling.type = "linear";
      scaling.factor = static_cast<float>(*factor);
    }
  } else if (*type == "linear") {
    const auto factor = file.number(key("rope.scaling.factor"));
    if (!factor) fail(file, "metadata \"" + key("rope.scaling.factor") + "\" is missing, expected a number");
    scaling.type = "linear";
    scaling.factor = static_cast<float>(*factor);
  } else {
    fail(file, "metadata \"" + key("rope.scaling.type") + "\" is \"" + *type + "\", supported are none and linear");
  }
  if (stretches == nullptr) return scaling;
  if (!scaling.type.empty()) fail(file, "linear RoPE scaling together with a rope_freqs tensor is not supported");
  return config.family == "gemma4" ? scaling_from_stops(file, *stretches, config)
                                   : scaling_from_stretches(file, *stretches, config);
}

/// An integer that says a model is more than its architecture is here.
void refuse_unless_zero(const GgufFile& file, const std::string& key) {
  if (const int value = int_or(file, key, 0); value != 0) {
    fail(file, "metadata \"" + key + "\" is " + std::to_string(value) + ", which is not supported");
  }
}

/// Options of the architecture that change the numbers and that no decoder here has.
void refuse_unsupported(const GgufFile& file, const Keys& key) {
  for (const char* name : {"logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.clamp_kqv",
                           "rope.scaling.attn_factor"}) {
    const double value = file.number(key(name)).value_or(0.0);
    if (value != 0.0 && value != 1.0) {
      fail(file, "metadata \"" + key(name) + "\" is " + std::to_string(value) + ", which is not supported");
    }
  }
  if (file.boolean(key("use_parallel_residual")).value_or(false)) {
    fail(file, "metadata \"" + key("use_parallel_residual") + "\" is true, which is not supported");
  }
}

/// What all decoders here have.
void read_common(const GgufFile& file, const Keys& key, Config& config) {
  refuse_unsupported(file, key);
  config.hidden = required_int(file, key("embedding_length"));
  config.layers = required_int(file, key("block_count"));
  config.heads = required_int(file, key("attention.head_count"));
  config.context = required_int(file, key("context_length"));
  const std::string epsilon = key("attention.layer_norm_rms_epsilon");
  const auto eps = file.number(epsilon);
  if (!eps) fail(file, "metadata \"" + epsilon + "\" is missing, expected a number");
  config.norm_eps = static_cast<float>(*eps);
  config.rope_base = static_cast<float>(file.number(key("rope.freq_base")).value_or(10000.0));

  const GgufTensor* const embedding = file.tensor("token_embd.weight");
  if (embedding == nullptr) fail(file, "tensor \"token_embd.weight\" is missing");
  if (embedding->shape.size() != 2) {
    fail(file, "tensor \"token_embd.weight\": expected shape [vocabulary, " + std::to_string(config.hidden) +
                   "], found " + shape_text(embedding->shape));
  }
  config.vocab = static_cast<int>(embedding->shape[0]);
  config.tied_head = file.tensor("output.weight") == nullptr;
  check_config(file.path(), config);
  config.rope_scaling = rope_scaling(file, key, config);
  check_config(file.path(), config);
}

/// What all decoders here have whose layers are alike.
void read_alike(const GgufFile& file, const Keys& key, Config& config) {
  config.hidden = required_int(file, key("embedding_length"));
  config.heads = required_int(file, key("attention.head_count"));
  config.kv_heads = int_or(file, key("attention.head_count_kv"), config.heads);
  config.intermediate = required_int(file, key("feed_forward_length"));
  if (config.heads == 0 || (!file.has(key("attention.key_length")) && config.hidden % config.heads != 0)) {
    fail(file, key("embedding_length") + " " + std::to_string(config.hidden) + " is not a multiple of " +
                   key("attention.head_count") + " " + std::to_string(config.heads) + ", and " +
                   key("attention.key_length") + " is missing");
  }
  config.head_dim = int_or(file, key("attention.key_length"), config.hidden / config.heads);
  for (const char* name : {"attention.value_length", "rope.dimension_count"}) {
    if (const int found = int_or(file, key(name), config.head_dim); found != config.head_dim) {
      fail(file, "metadata \"" + key(name) + "\" is " + std::to_string(found) + ", expected " +
                     std::to_string(config.head_dim) + ", the head size");
    }
  }
  read_common(file, key, config);
}

/// Architectures of the llama kind: every layer sees everything and has one MLP.
void read_decoder(const GgufFile& file, const Keys& key, Config& config) {
  refuse_unless_zero(file, key("attention.sliding_window"));
  refuse_unless_zero(file, key("expert_count"));
  read_alike(file, key, config);
}

/// Experts in every layer, weighted to a sum of 1.
void read_qwen3_moe(const GgufFile& file, const Keys& key, Config& config) {
  refuse_unless_zero(file, key("attention.sliding_window"));
  config.experts.count = required_int(file, key("expert_count"));
  config.experts.per_token = required_int(file, key("expert_used_count"));
  config.experts.intermediate = required_int(file, key("expert_feed_forward_length"));
  config.experts.normalized = true;
  read_alike(file, key, config);
}

/// The files leave out what all Gemma 3 models share: one layer in six sees everything, the others rotate by 10000.
/// Their norm weights have the 1 added.
void read_gemma3(const GgufFile& file, const Keys& key, Config& config) {
  for (const char* name : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (file.number(key(name)).value_or(0.0) != 0.0) {
      fail(file, "metadata \"" + key(name) + "\" is not supported for Gemma 3");
    }
  }
  config.sliding.window = required_int(file, key("attention.sliding_window"));
  config.sliding.pattern = int_or(file, key("attention.sliding_window_pattern"), 6);
  config.sliding.rope_base = static_cast<float>(file.number(key("rope.freq_base_swa")).value_or(10000.0));
  refuse_unless_zero(file, key("expert_count"));
  read_alike(file, key, config);
  // The 27B model, the one of 62 layers, divides by the square root of hidden / heads.
  config.query_scalar = static_cast<float>(config.layers == 62 ? config.hidden / config.heads : config.head_dim);
}

/// One number for the sliding layers and one for the others: metadata that lists one a layer must say no more.
std::pair<int, int> by_kind(const GgufFile& file, const std::string& key, const Config& config, int first, int last) {
  const auto each = file.integers_for(key, config.layers);
  if (!each) fail(file, "metadata \"" + key + "\" is missing, expected integers");
  std::pair<int, int> found{0, 0};
  for (int layer = first; layer < last; ++layer) {
    int& of_kind = config.sliding.slides(layer) ? found.first : found.second;
    const int here = (*each)[static_cast<std::size_t>(layer)];
    if (of_kind != 0 && of_kind != here) {
      fail(file, "metadata \"" + key + "\": layers " + std::to_string(layer) + " and before differ, " +
                     std::to_string(here) + " from " + std::to_string(of_kind) + ", which is not supported");
    }
    of_kind = here;
  }
  return found;
}

/// Heads of sliding layers are what the keys ending in _swa say; the plain keys are about the others.
void read_gemma4_heads(const GgufFile& file, const Keys& key, Config& config) {
  config.full.head_dim = required_int(file, key("attention.key_length"));
  config.head_dim = required_int(file, key("attention.key_length_swa"));
  const auto same = [&](const char* name, int size) {
    if (const int found = int_or(file, key(name), size); found != size) {
      fail(file, "metadata \"" + key(name) + "\" is " + std::to_string(found) + ", expected " + std::to_string(size) +
                     ", the head size");
    }
  };
  same("attention.value_length", config.full.head_dim);
  same("rope.dimension_count", config.full.head_dim);
  same("attention.value_length_swa", config.head_dim);
  same("rope.dimension_count_swa", config.head_dim);
  const auto [sliding, full] = by_kind(file, key("attention.head_count_kv"), config, 0, config.layers);
  config.kv_heads = sliding > 0 ? sliding : full;
  config.full.kv_heads = full;
}

void read_gemma4(const GgufFile& file, const Keys& key, Config& config) {
  config.layers = required_int(file, key("block_count"));
  if (config.layers > 4096) {
    fail(file,
         "metadata \"" + key("block_count") + "\" is " + std::to_string(config.layers) + ", expected at most 4096");
  }
  config.sliding.window = required_int(file, key("attention.sliding_window"));
  config.sliding.rope_base = static_cast<float>(file.number(key("rope.freq_base_swa")).value_or(10000.0));
  const auto sliding = file.booleans(key("attention.sliding_window_pattern"));
  if (!sliding || sliding->size() < static_cast<std::size_t>(config.layers)) {
    fail(file, "metadata \"" + key("attention.sliding_window_pattern") + "\" is missing or too short, expected " +
                   std::to_string(config.layers) + " booleans");
  }
  config.sliding.listed = *sliding;
  read_gemma4_heads(file, key, config);

  config.shared_kv.layers = int_or(file, key("attention.shared_kv_layers"), 0);
  const int own = config.layers - config.shared_kv.layers;
  if (own <= 0) {
    fail(file, "metadata \"" + key("attention.shared_kv_layers") + "\" is " + std::to_string(config.shared_kv.layers) +
                   ", which leaves none of the " + std::to_string(config.layers) + " layers to share with");
  }
  const std::string widths = key("feed_forward_length");
  const auto width_of = [&](int first, int last) {
    const auto [a, b] = by_kind(file, widths, config, first, last);
    if (a > 0 && b > 0 && a != b) fail(file, "metadata \"" + widths + "\": sliding and full layers differ");
    return std::max(a, b);
  };
  config.intermediate = width_of(0, own);
  if (const int shared = width_of(own, config.layers); shared > 0 && shared != config.intermediate) {
    if (shared != std::int64_t{2} * config.intermediate)
      fail(file, "metadata \"" + widths + "\": expected twice as wide, or alike");
    config.shared_kv.double_wide_mlp = true;
  }
  for (int layer = 0; layer < own; ++layer) {
    if (config.sliding.slides(layer)) continue;
    config.full.keys_are_values = file.tensor("blk." + std::to_string(layer) + ".attn_v.weight") == nullptr;
    break;
  }
  config.logit_softcap = static_cast<float>(file.number(key("final_logit_softcapping")).value_or(0.0));
  config.per_layer.width = int_or(file, key("embedding_length_per_layer_input"), 0);
  if (const GgufTensor* const table = file.tensor("per_layer_token_embd.weight");
      config.per_layer.width > 0 && table != nullptr && table->shape.size() == 2) {
    config.per_layer.vocab = to_int(file, "per_layer_token_embd.weight", static_cast<std::int64_t>(table->shape[0]));
  }
  if (int_or(file, key("expert_count"), 0) > 0) {
    config.experts.count = required_int(file, key("expert_count"));
    config.experts.per_token = required_int(file, key("expert_used_count"));
    config.experts.intermediate = required_int(file, key("expert_feed_forward_length"));
    config.experts.beside_mlp = true;
  }
  read_common(file, key, config);
}

void read_llama(const GgufFile& file, const Keys& key, Config& config) {
  read_decoder(file, key, config);
  config.attention_bias = file.tensor("blk.0.attn_q.bias") != nullptr;
  config.mlp_bias = file.tensor("blk.0.ffn_gate.bias") != nullptr;
}

/// How an architecture reads its metadata into what starts with nothing but family and name set.
struct Architecture {
  std::string_view name;    ///< general.architecture, and the beginning of its keys
  std::string_view family;  ///< registry key
  void (*read)(const GgufFile& file, const Keys& key, Config& config);
};

// One line an architecture, sorted by name. What their tensors are called: gguf_names.cc.
constexpr std::array architectures{
    Architecture{"gemma3", "gemma3", read_gemma3}, Architecture{"gemma4", "gemma4", read_gemma4},
    Architecture{"llama", "llama", read_llama},    Architecture{"qwen2", "qwen2", read_decoder},
    Architecture{"qwen3", "qwen3", read_decoder},  Architecture{"qwen3moe", "qwen3_moe", read_qwen3_moe},
};

// ---- the text side

std::optional<std::int32_t> token_id(const GgufFile& file, const std::string& key, std::size_t vocab) {
  const auto id = file.integer(key);
  if (!id) return std::nullopt;
  // Converters write -1 for "none", some of them unsigned.
  if (*id == -1 || *id == std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
  if (*id < 0 || static_cast<std::uint64_t>(*id) >= vocab) {
    fail(file,
         "metadata \"" + key + "\" is " + std::to_string(*id) + ", expected an id below " + std::to_string(vocab));
  }
  return static_cast<std::int32_t>(*id);
}

text::GgufVocabulary vocabulary(const GgufFile& file, int vocab) {
  text::GgufVocabulary out;
  out.model = file.string("tokenizer.ggml.model").value_or("");
  if (out.model != "gpt2" && out.model != "llama" && out.model != "gemma4") {
    fail(file, "metadata \"tokenizer.ggml.model\" is \"" + out.model + "\", supported are gpt2, llama and gemma4");
  }
  out.pre = file.string("tokenizer.ggml.pre").value_or("");
  const auto required = [&](auto values, const char* key) {
    if (!values) fail(file, "metadata \"" + std::string(key) + "\" is missing");
    return *std::move(values);
  };
  out.tokens = required(file.strings("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens");
  if (out.tokens.size() != static_cast<std::size_t>(vocab)) {
    fail(file, "metadata \"tokenizer.ggml.tokens\" lists " + std::to_string(out.tokens.size()) + " tokens, expected " +
                   std::to_string(vocab) + ", the rows of tensor \"token_embd.weight\"");
  }
  const auto one_each = [&](std::size_t found, const char* key) {
    if (found == out.tokens.size()) return;
    fail(file, "metadata \"" + std::string(key) + "\" has " + std::to_string(found) + " entries, expected " +
                   std::to_string(out.tokens.size()) + ", one a token");
  };
  out.types = required(file.integers("tokenizer.ggml.token_type"), "tokenizer.ggml.token_type");
  one_each(out.types.size(), "tokenizer.ggml.token_type");
  if (auto scores = file.floats("tokenizer.ggml.scores")) {
    out.scores = *std::move(scores);
    one_each(out.scores.size(), "tokenizer.ggml.scores");
  } else if (out.model == "llama") {
    fail(file, "metadata \"tokenizer.ggml.scores\" is missing");
  }
  if (auto merges = file.strings("tokenizer.ggml.merges")) {
    out.merges = *std::move(merges);
  } else if (out.model != "llama") {
    fail(file, "metadata \"tokenizer.ggml.merges\" is missing");
  }
  out.add_space_prefix = file.boolean("tokenizer.ggml.add_space_prefix").value_or(out.model == "llama");
  return out;
}

/// Where the metadata is silent, what llama.cpp does: sentencepiece vocabularies and Llama 3's begin with BOS.
bool adds_bos(const text::GgufVocabulary& vocabulary) {
  return vocabulary.model == "llama" || vocabulary.pre == "llama-bpe" || vocabulary.pre == "llama3" ||
         vocabulary.pre == "llama-v3";
}

}  // namespace

Config gguf_config(const GgufFile& file) {
  const auto name = file.string("general.architecture");
  if (!name) fail(file, "metadata \"general.architecture\" is missing, expected a string");
  const auto architecture = std::ranges::find(architectures, *name, &Architecture::name);
  if (architecture == architectures.end()) {
    std::string known;
    for (const Architecture& each : architectures) known += (known.empty() ? "" : ", ") + std::string(each.name);
    fail(file, "architecture \"" + *name + "\" is not supported; supported are " + known);
  }
  Config config;
  config.family = architecture->family;
  config.name = file.string("general.name").value_or(file.path().stem().string());
  architecture->read(file, Keys{*name + "."}, config);
  return config;
}

text::Assets gguf_assets(const GgufFile& file, int vocab) {
  text::Assets assets;
  assets.vocabulary = vocabulary(file, vocab);
  const std::vector<std::string>& tokens = assets.vocabulary.tokens;
  assets.chat_template = file.string("tokenizer.chat_template").value_or("");

  if (const auto bos = token_id(file, "tokenizer.ggml.bos_token_id", tokens.size())) {
    assets.bos_id = *bos;
    assets.bos_token = tokens[static_cast<std::size_t>(*bos)];
  }
  const auto add_bos = file.boolean("tokenizer.ggml.add_bos_token");
  if (add_bos.value_or(false) && assets.bos_id < 0) {
    fail(file, "metadata \"tokenizer.ggml.add_bos_token\" is true, but \"tokenizer.ggml.bos_token_id\" is missing");
  }
  assets.add_bos = add_bos.value_or(adds_bos(assets.vocabulary)) && assets.bos_id >= 0;

  for (const char* kind : {"eos", "eot", "eom"}) {
    const auto id = token_id(file, "tokenizer.ggml." + std::string(kind) + "_token_id", tokens.size());
    if (!id) continue;
    if (assets.eos_token.empty()) assets.eos_token = tokens[static_cast<std::size_t>(*id)];
    add_end_id(assets, *id);
  }
  for (const std::string& candidate : turn_end_candidates(assets.chat_template)) {
    const auto found = std::ranges::find(tokens, candidate);
    if (found != tokens.end()) add_end_id(assets, static_cast<std::int32_t>(found - tokens.begin()));
  }
  if (assets.end_ids.empty()) fail(file, "metadata \"tokenizer.ggml.eos_token_id\" is missing: nothing ends a reply");
  return assets;
}

}  // namespace galley::models
