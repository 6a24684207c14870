// Reading a config.json key by key: what is absent, and errors that name file, key, what was expected and what was
// found.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "models/config.h"
#include "ops/error.h"

namespace galley::models {

/// Looks up keys of one JSON object; a value of the wrong kind is an error that names all there is to know.
class Keys {
 public:
  Keys(const std::filesystem::path& file, const nlohmann::json& object, std::string prefix = {})
      : file_(file), object_(object), prefix_(std::move(prefix)) {}

  [[noreturn]] void fail(const std::string& what) const { throw ModelError(file_.string() + ": " + what); }

  /// Null when the key is absent or its value is null.
  [[nodiscard]] const nlohmann::json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] std::optional<int> integer(const char* key) const {
    const nlohmann::json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_integer()) wrong(key, "an integer", *value);
    const bool fits = value->is_number_unsigned()
                          ? value->get<std::uint64_t>() <= std::numeric_limits<std::int32_t>::max()
                          : value->get<std::int64_t>() >= 0;
    if (!fits) wrong(key, "0 to 2147483647", *value);
    return value->get<int>();
  }

  [[nodiscard]] std::optional<float> number(const char* key) const {
    const nlohmann::json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) wrong(key, "a number", *value);
    return static_cast<float>(value->get<double>());
  }

  [[nodiscard]] std::optional<bool> boolean(const char* key) const {
    const nlohmann::json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong(key, "true or false", *value);
    return value->get<bool>();
  }

  [[nodiscard]] std::optional<std::string> string(const char* key) const {
    const nlohmann::json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) wrong(key, "a string", *value);
    return value->get<std::string>();
  }

  template <typename T>
  T required(const std::optional<T>& value, const char* key) const {
    if (!value) fail("\"" + prefix_ + key + "\" is missing");
    return *value;
  }
  [[nodiscard]] int required_int(const char* key) const { return required(integer(key), key); }

  [[noreturn]] void wrong(const std::string& key, const std::string& wanted, const nlohmann::json& found) const {
    std::string text = found.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    fail("\"" + prefix_ + key + "\": expected " + wanted + ", found " + text);
  }

 private:
  const std::filesystem::path& file_;
  const nlohmann::json& object_;
  std::string prefix_;
};

/// The object under `key`; null when absent.
inline const nlohmann::json* object_at(const Keys& keys, const char* key) {
  const nlohmann::json* const value = keys.find(key);
  if (value != nullptr && !value->is_object()) keys.wrong(key, "an object", *value);
  return value;
}

/// `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both. What is absent stays as it is.
void read_rope(const std::filesystem::path& file, const Keys& keys, Config& config);

}  // namespace galley::models
