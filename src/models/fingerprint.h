// Tells one model from another by its files, without reading all of them.
#pragma once
#include <filesystem>
#include <string>

namespace galley::models {

/// 16 hex digits over a model's names, sizes and contents: a .gguf file, or a folder's config.json and safetensors. Of
/// each file the first 64 KB and some thousand samples of 4 KB, spread evenly, are looked at: two models of one shape
/// differ nearly everywhere. Throws ModelError when a file can't be read.
std::string fingerprint(const std::filesystem::path& model);

}  // namespace galley::models
