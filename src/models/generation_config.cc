#include "models/generation_config.h"

#include <limits>
#include <string>

#include "models/config_json.h"
#include "ops/error.h"

namespace galley::models {

GenerationConfig read_generation_config(const std::filesystem::path& path) {
  GenerationConfig config;
  if (!std::filesystem::exists(path)) return config;
  const nlohmann::json object = read_json_object(path);
  const auto number = [&](const char* key, double least, double most) -> std::optional<double> {
    const auto found = object.find(key);
    if (found == object.end() || found->is_null()) return std::nullopt;
    if (!found->is_number() || found->get<double>() < least || found->get<double>() > most) {
      throw ModelError(path.string() + ": \"" + key + "\": expected a number from " + std::to_string(least) + " to " +
                       std::to_string(most) + ", found " + found->dump());
    }
    return found->get<double>();
  };
  config.temperature = number("temperature", 0.0, 100.0);
  config.top_p = number("top_p", 0.0, 1.0);
  config.min_p = number("min_p", 0.0, 1.0);
  if (const auto top_k = number("top_k", -1.0, std::numeric_limits<int>::max())) {
    config.top_k = static_cast<int>(*top_k);
  }
  return config;
}

}  // namespace galley::models
