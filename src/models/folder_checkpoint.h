// An MLX or Hugging Face folder as a checkpoint: config.json, safetensors, tokenizer.json and their companions.
#pragma once
#include <filesystem>
#include <memory>

#include "models/checkpoint.h"

namespace galley::models {

/// Throws ModelError for a folder that is incomplete, damaged or asks for something this build doesn't have.
std::unique_ptr<Checkpoint> open_folder_checkpoint(const std::filesystem::path& path);

}  // namespace galley::models
