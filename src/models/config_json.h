// config.json of an MLX or Hugging Face folder.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "models/config.h"
#include "ops/weights.h"

namespace galley::models {

/// Parses a JSON object. Throws ModelError naming the file and what is wrong with it.
nlohmann::json read_json_object(const std::filesystem::path& path);
/// The whole file; ModelError if it cannot be read.
std::string read_text(const std::filesystem::path& path);

/// `tied_head` is absent where the file leaves it open: then the presence of lm_head decides.
struct FolderConfig {
  Config config;
  std::optional<bool> tied_head;
  std::string tensor_prefix{};  ///< what stands before every canonical name: "language_model." in a model with vision
};

/// Throws ModelError naming the key, what was expected and what was found.
FolderConfig folder_config(const std::filesystem::path& file, const nlohmann::json& json);

/// MLX's affine quantization, as the config announces it.
struct Quantization {
  std::optional<ops::AffineFormat> standard;  ///< nullopt: the folder is not quantized
  /// Modules that differ, by path ("model.layers.0.mlp.up_proj"); nullopt: not quantized.
  std::map<std::string, std::optional<ops::AffineFormat>> overrides;
};

/// Throws ModelError for other modes and methods, by name.
Quantization folder_quantization(const std::filesystem::path& file, const nlohmann::json& json);

}  // namespace galley::models
