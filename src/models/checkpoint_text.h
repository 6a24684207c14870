// What both loaders do alike with a config and with the text side.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "models/config.h"
#include "text/assets.h"

namespace galley::models {

/// Throws ModelError naming `file` and what is wrong if the sizes cannot belong to a model.
void check_config(const std::filesystem::path& file, const Config& config);

/// The tokens that may end a turn in this template, in no order that matters; those in the vocabulary are end ids.
std::vector<std::string> turn_end_candidates(const std::string& chat_template);

/// Adds `id` to assets.end_ids unless it is there.
void add_end_id(text::Assets& assets, std::int32_t id);

}  // namespace galley::models
