// A GGUF file as a checkpoint.
#pragma once
#include <filesystem>
#include <memory>

#include "models/checkpoint.h"

namespace galley::models {

/// Throws ModelError for a file that is damaged or asks for something this build doesn't have.
std::unique_ptr<Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path);

}  // namespace galley::models
