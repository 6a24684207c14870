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

RopeScaling rope_scaling(const GgufFile& file, const Config& config) {
  const auto type = file.string("llama.rope.scaling.type");
  const GgufTensor* const stretches = file.tensor("rope_freqs.weight");
  RopeScaling scaling;
  if (!type || *type == "none") {
    // Files from before rope.scaling.type give the factor alone.
    const auto factor = file.number("llama.rope.scale_linear");
    if (factor && *factor != 1.0) {
      scaling.type = "linear";
      scaling.factor = static_cast<float>(*factor);
    }
  } else if (*type == "linear") {
    const auto factor = file.number("llama.rope.scaling.factor");
    if (!factor) fail(file, "metadata \"llama.rope.scaling.factor\" is missing, expected a number");
    scaling.type = "linear";
    scaling.factor = static_cast<float>(*factor);
  } else {
    fail(file, "metadata \"llama.rope.scaling.type\" is \"" + *type + "\", supported are none and linear");
  }
  if (stretches == nullptr) return scaling;
  if (!scaling.type.empty()) fail(file, "linear RoPE scaling together with a rope_freqs tensor is not supported");
  return scaling_from_stretches(file, *stretches, config);
}

/// Options of the architecture that change the numbers and that the llama family here does not have.
void refuse_unsupported(const GgufFile& file) {
  for (const char* key : {"llama.expert_count", "llama.attention.sliding_window"}) {
    if (const int value = int_or(file, key, 0); value != 0) {
      fail(file, "metadata \"" + std::string(key) + "\" is " + std::to_string(value) + ", which is not supported");
    }
  }
  for (const char* key : {"llama.logit_scale", "llama.embedding_scale", "llama.residual_scale", "llama.attention.scale",
                          "llama.attention.clamp_kqv", "llama.rope.scaling.attn_factor"}) {
    const double value = file.number(key).value_or(0.0);
    if (value != 0.0 && value != 1.0) {
      fail(file, "metadata \"" + std::string(key) + "\" is " + std::to_string(value) + ", which is not supported");
    }
  }
  if (file.boolean("llama.use_parallel_residual").value_or(false)) {
    fail(file, "metadata \"llama.use_parallel_residual\" is true, which is not supported");
  }
}

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
  if (out.model != "gpt2" && out.model != "llama") {
    fail(file, "metadata \"tokenizer.ggml.model\" is \"" + out.model + "\", supported are gpt2 and llama");
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
  } else if (out.model == "gpt2") {
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
  const auto architecture = file.string("general.architecture");
  if (!architecture) fail(file, "metadata \"general.architecture\" is missing, expected a string");
  if (*architecture != "llama") {
    fail(file, "architecture \"" + *architecture + "\" is not supported; supported is llama");
  }
  refuse_unsupported(file);

  Config config;
  config.family = "llama";
  config.name = file.string("general.name").value_or(file.path().stem().string());
  config.hidden = required_int(file, "llama.embedding_length");
  config.layers = required_int(file, "llama.block_count");
  config.heads = required_int(file, "llama.attention.head_count");
  config.kv_heads = int_or(file, "llama.attention.head_count_kv", config.heads);
  config.intermediate = required_int(file, "llama.feed_forward_length");
  config.context = required_int(file, "llama.context_length");
  if (config.heads == 0 || (!file.has("llama.attention.key_length") && config.hidden % config.heads != 0)) {
    fail(file, "llama.embedding_length " + std::to_string(config.hidden) +
                   " is not a multiple of llama.attention.head_count " + std::to_string(config.heads) +
                   ", and llama.attention.key_length is missing");
  }
  config.head_dim = int_or(file, "llama.attention.key_length", config.hidden / config.heads);
  for (const char* key : {"llama.attention.value_length", "llama.rope.dimension_count"}) {
    if (const int found = int_or(file, key, config.head_dim); found != config.head_dim) {
      fail(file, "metadata \"" + std::string(key) + "\" is " + std::to_string(found) + ", expected " +
                     std::to_string(config.head_dim) + ", the head size");
    }
  }
  const auto epsilon = file.number("llama.attention.layer_norm_rms_epsilon");
  if (!epsilon) fail(file, "metadata \"llama.attention.layer_norm_rms_epsilon\" is missing, expected a number");
  config.norm_eps = static_cast<float>(*epsilon);
  config.rope_base = static_cast<float>(file.number("llama.rope.freq_base").value_or(10000.0));

  const GgufTensor* const embedding = file.tensor("token_embd.weight");
  if (embedding == nullptr) fail(file, "tensor \"token_embd.weight\" is missing");
  if (embedding->shape.size() != 2) {
    fail(file, "tensor \"token_embd.weight\": expected shape [vocabulary, " + std::to_string(config.hidden) +
                   "], found " + shape_text(embedding->shape));
  }
  config.vocab = static_cast<int>(embedding->shape[0]);
  config.tied_head = file.tensor("output.weight") == nullptr;
  config.attention_bias = file.tensor("blk.0.attn_q.bias") != nullptr;
  config.mlp_bias = file.tensor("blk.0.ffn_gate.bias") != nullptr;
  check_config(file.path(), config);
  config.rope_scaling = rope_scaling(file, config);
  check_config(file.path(), config);
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
