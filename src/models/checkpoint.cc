#include "models/checkpoint.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <system_error>

#include "models/checkpoint_shapes.h"
#include "models/checkpoint_text.h"
#include "models/folder_checkpoint.h"
#include "models/gguf_checkpoint.h"
#include "ops/error.h"

namespace galley::models {

std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string text = "[";
  for (const std::uint64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

void throw_shape_mismatch(const std::filesystem::path& file, const std::string& tensor,
                          std::span<const std::uint64_t> expected, std::span<const std::uint64_t> found) {
  throw ModelError(file.string() + ": tensor \"" + tensor + "\": expected shape " + shape_text(expected) + ", found " +
                   shape_text(found));
}

void throw_missing_tensor(const std::filesystem::path& file, const std::string& tensor,
                          std::span<const std::uint64_t> expected) {
  throw ModelError(file.string() + ": tensor \"" + tensor + "\": expected shape " + shape_text(expected) +
                   ", found no such tensor");
}

void require_shape(const std::filesystem::path& file, const std::string& tensor,
                   std::span<const std::uint64_t> expected, std::span<const std::uint64_t> found) {
  if (!std::ranges::equal(expected, found)) throw_shape_mismatch(file, tensor, expected, found);
}

void check_config(const std::filesystem::path& file, const Config& config) {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw ModelError(file.string() + ": " + what);
  };
  const auto positive = [&](const char* name, int value) {
    require(value > 0, std::string(name) + " must be positive, found " + std::to_string(value));
  };
  positive("the hidden size", config.hidden);
  positive("the number of layers", config.layers);
  positive("the number of attention heads", config.heads);
  positive("the number of key/value heads", config.kv_heads);
  positive("the head size", config.head_dim);
  positive("the intermediate size", config.intermediate);
  positive("the vocabulary size", config.vocab);
  positive("the context length", config.context);
  require(config.layers <= 4096, "found " + std::to_string(config.layers) + " layers, expected at most 4096");
  require(config.heads % config.kv_heads == 0, "the number of attention heads, " + std::to_string(config.heads) +
                                                   ", is not a multiple of the number of key/value heads, " +
                                                   std::to_string(config.kv_heads));
  require(config.head_dim % 2 == 0,
          "rotary positions need an even head size, found " + std::to_string(config.head_dim));
  require(static_cast<std::int64_t>(config.heads) * config.head_dim <= std::numeric_limits<int>::max(),
          std::to_string(config.heads) + " heads of " + std::to_string(config.head_dim) + " are too many");
  require(std::isfinite(config.norm_eps) && config.norm_eps >= 0,
          "the norm's epsilon must be a small positive number, found " + std::to_string(config.norm_eps));
  require(std::isfinite(config.rope_base) && config.rope_base > 0,
          "the RoPE base must be positive, found " + std::to_string(config.rope_base));
  if (config.full.head_dim > 0 || config.full.kv_heads > 0) {
    const int kv_heads = config.full.kv_heads > 0 ? config.full.kv_heads : config.kv_heads;
    require(config.heads % kv_heads == 0, "the number of attention heads, " + std::to_string(config.heads) +
                                              ", is not a multiple of the number of key/value heads of full layers, " +
                                              std::to_string(kv_heads));
    require(config.full.head_dim % 2 == 0 &&
                static_cast<std::int64_t>(config.heads) * config.full.head_dim <= std::numeric_limits<int>::max(),
            "the head size of full layers must be even and no larger than is sensible, found " +
                std::to_string(config.full.head_dim));
  }
  require(config.shared_kv.layers < config.layers, std::to_string(config.shared_kv.layers) +
                                                       " layers that share keys and values leave none of the " +
                                                       std::to_string(config.layers) + " to share with");
  if (config.per_layer.width > 0) {
    require(config.per_layer.vocab >= config.vocab,
            "the vocabulary of the embedding per layer, " + std::to_string(config.per_layer.vocab) +
                ", is smaller than the model's, " + std::to_string(config.vocab));
    require(static_cast<std::int64_t>(config.layers) * config.per_layer.width <= std::numeric_limits<int>::max(),
            "an embedding of " + std::to_string(config.per_layer.width) + " for each layer is too wide");
  }
  require(std::isfinite(config.logit_softcap) && config.logit_softcap >= 0,
          "the soft-cap of the logits must be positive, found " + std::to_string(config.logit_softcap));
  if (config.sliding.window > 0) {
    positive("the pattern of sliding and full layers", config.sliding.pattern);
    require(std::isfinite(config.sliding.rope_base) && config.sliding.rope_base > 0,
            "the RoPE base of sliding layers must be positive, found " + std::to_string(config.sliding.rope_base));
  }
  if (config.experts.count > 0) {
    const Experts& experts = config.experts;
    positive("the number of experts a token", experts.per_token);
    positive("the intermediate size of an expert", experts.intermediate);
    positive("the step between layers with experts", experts.step);
    require(experts.per_token <= experts.count, std::to_string(experts.per_token) +
                                                    " experts a token are more than the " +
                                                    std::to_string(experts.count) + " there are");
    require(static_cast<std::int64_t>(experts.count) * std::max(experts.intermediate, config.hidden) <=
                std::numeric_limits<int>::max(),
            std::to_string(experts.count) + " experts of " + std::to_string(experts.intermediate) + " are too many");
  }
  const RopeScaling& scaling = config.rope_scaling;
  if (scaling.type.empty()) return;
  require(std::isfinite(scaling.factor) && scaling.factor > 0,
          "the RoPE scaling factor must be positive, found " + std::to_string(scaling.factor));
  require(scaling.rotated > 0 && scaling.rotated <= 1,
          "proportional RoPE turns a part of the head between 0 and 1, found " + std::to_string(scaling.rotated));
  if (scaling.type != "llama3") return;
  require(scaling.original_context > 0,
          "original_max_position_embeddings must be positive, found " + std::to_string(scaling.original_context));
  require(scaling.low_freq_factor > 0 && scaling.high_freq_factor > scaling.low_freq_factor,
          "llama3 RoPE scaling needs 0 < low_freq_factor < high_freq_factor, found " +
              std::to_string(scaling.low_freq_factor) + " and " + std::to_string(scaling.high_freq_factor));
}

std::vector<std::string> turn_end_candidates(const std::string& chat_template) {
  // What ends an assistant's turn in the chat formats in use; most files name only the end of the text.
  static constexpr std::array<std::string_view, 6> known{"<|im_end|>",    "<|eot_id|>", "<|eom_id|>",
                                                         "<end_of_turn>", "<turn|>",    "<|end|>"};
  std::vector<std::string> found;
  for (const std::string_view token : known) {
    if (chat_template.find(token) != std::string::npos) found.emplace_back(token);
  }
  return found;
}

void add_end_id(text::Assets& assets, std::int32_t id) {
  if (std::ranges::find(assets.end_ids, id) == assets.end_ids.end()) assets.end_ids.push_back(id);
}

std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    throw ModelError(path.string() + ": no such model; expected a .gguf file or a folder with config.json");
  }
  if (std::filesystem::is_directory(status)) return open_folder_checkpoint(path);
  if (path.extension() == ".safetensors") {
    throw ModelError(path.string() + ": name the folder that holds it and config.json, not the file itself");
  }
  return open_gguf_checkpoint(path);
}

}  // namespace galley::models
