// Sampling values that a model's makers recommend.
#pragma once
#include <filesystem>
#include <optional>

namespace galley::models {

/// Values absent from the files are absent here. What `do_sample` says is not asked: as in vLLM, the values count for
/// requests that name none, and a request decides for itself whether it is greedy.
struct GenerationConfig {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<int> top_k;
};

/// Reads a generation_config.json; all absent when there is no such file. Throws ModelError naming the key at fault.
GenerationConfig read_generation_config(const std::filesystem::path& path);

}  // namespace galley::models
