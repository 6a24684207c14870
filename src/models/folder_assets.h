// The text side of an MLX or Hugging Face folder.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>

#include "text/assets.h"

namespace galley::models {

/// Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.{jinja,json} and
/// generation_config.json of `folder`; `config` is its config.json. Only the first must exist. Throws ModelError naming
/// file and key.
text::Assets folder_assets(const std::filesystem::path& folder, const nlohmann::json& config);

}  // namespace galley::models
