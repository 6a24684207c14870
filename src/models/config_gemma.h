// What the config.json of a Gemma model says.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>

#include "models/config_json.h"
#include "models/config_keys.h"

namespace galley::models {

// What the two generations have alike.

/// Refuses any activation of the MLP but GELU by tanh.
void require_gelu(const Keys& keys);
/// "sliding_window" and "sliding_window_pattern", which is `pattern` unless the file says otherwise.
void read_window(const Keys& keys, int pattern, SlidingLayers& sliding);
/// Sliding layers' own "rope_theta", out of "rope_parameters"; they don't scale.
void read_sliding_rope(const Keys& rope, SlidingLayers& sliding);

/// model_type "gemma3_text".
void read_gemma3_text(const std::filesystem::path& file, const nlohmann::json& object, FolderConfig& out);

/// model_type "gemma3": a text model beside a vision tower. The text model is read; the tower's tensors
/// ("vision_tower.", "multi_modal_projector.") are left alone.
void read_gemma3(const std::filesystem::path& file, const nlohmann::json& object, FolderConfig& out);

/// model_type "gemma4_text". Keys that a file leaves out have the values of Gemma 4 E2B, as in mlx-lm.
void read_gemma4_text(const std::filesystem::path& file, const nlohmann::json& object, FolderConfig& out);

/// model_type "gemma4": the same beside towers for images and sound, which are left alone.
void read_gemma4(const std::filesystem::path& file, const nlohmann::json& object, FolderConfig& out);

}  // namespace galley::models
