#include "api/fields.h"

#include <cmath>
#include <limits>

#include "api/json.h"
#include "ops/error.h"

namespace galley::api {
namespace {

std::string plain_number(double value) {
  std::string text = Json(value).dump();
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

[[noreturn]] void refuse_type(const std::string& path, const char* expected, const Json& found) {
  throw Error(400, path + ": expected " + expected + ", found " + type_in_words(found) + ": " + excerpt(found),
              "invalid_type", path);
}

template <typename Number>
std::string range_in_words(Number low, Number high) {
  constexpr bool whole = std::is_integral_v<Number>;
  const auto text = [](Number n) { return whole ? std::to_string(n) : plain_number(static_cast<double>(n)); };
  if (high == std::numeric_limits<Number>::max()) return text(low) + " or more";
  return text(low) + " to " + text(high);
}

}  // namespace

std::string type_in_words(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "an array";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return "a boolean";
    case Json::value_t::number_float:
      return "a number";
    default:
      return "an integer";
  }
}

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (object.is_object()) return;
  if (path_.empty()) {
    throw Error(400, "the request body must be a JSON object, found " + type_in_words(object), "invalid_type");
  }
  refuse_type(path_, "an object", object);
}

std::string Fields::path_of(std::string_view name) const {
  return path_.empty() ? std::string(name) : path_ + "." + std::string(name);
}

const Json* Fields::find(const char* name) {
  const auto it = object_.find(name);
  if (it == object_.end()) return nullptr;
  seen_.emplace(name);
  return it->is_null() ? nullptr : &*it;
}

std::optional<bool> Fields::boolean(const char* name) {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) refuse_type(path_of(name), "a boolean", *value);
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const char* name) {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse_type(path_of(name), "a string", *value);
  return value->get<std::string>();
}

std::optional<double> Fields::number(const char* name, double low, double high) {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_number()) refuse_type(path_of(name), "a number", *value);
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) {
    throw Error(400,
                path_of(name) + ": " + excerpt(*value) + " is out of range; allowed is " + range_in_words(low, high),
                "invalid_value", path_of(name));
  }
  return number;
}

std::optional<std::int64_t> Fields::integer(const char* name, std::int64_t low, std::int64_t high) {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  constexpr double kExact = 9007199254740992.0;  // 2^53: whole numbers below are exact in a double
  std::int64_t number = 0;
  bool in_range = true;
  if (value->is_number_unsigned()) {
    const auto wide = value->get<std::uint64_t>();
    in_range = wide <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    number = static_cast<std::int64_t>(wide);
  } else if (value->is_number_integer()) {
    number = value->get<std::int64_t>();
  } else if (value->is_number_float() && std::trunc(value->get<double>()) == value->get<double>()) {
    in_range = std::abs(value->get<double>()) <= kExact;
    if (in_range) number = static_cast<std::int64_t>(value->get<double>());
  } else {
    refuse_type(path_of(name), "an integer", *value);
  }
  if (!in_range || number < low || number > high) {
    throw Error(400,
                path_of(name) + ": " + excerpt(*value) + " is out of range; allowed is " + range_in_words(low, high),
                "invalid_value", path_of(name));
  }
  return number;
}

std::vector<std::string> Fields::strings(const char* name, std::size_t most) {
  const Json* value = find(name);
  if (!value) return {};
  const auto take = [](const Json& item, const std::string& path) {
    if (!item.is_string()) refuse_type(path, "a string", item);
    auto text = item.get<std::string>();
    if (text.empty()) throw Error(400, path + ": an empty string is not allowed", "invalid_value", path);
    return text;
  };
  if (value->is_string()) return {take(*value, path_of(name))};
  if (!value->is_array()) refuse_type(path_of(name), "a string or an array of strings", *value);
  if (value->size() > most) {
    throw Error(400,
                path_of(name) + ": found " + std::to_string(value->size()) + " strings; allowed are up to " +
                    std::to_string(most),
                "invalid_value", path_of(name));
  }
  std::vector<std::string> all;
  for (std::size_t i = 0; i < value->size(); ++i) {
    all.push_back(take((*value)[i], path_of(name) + "[" + std::to_string(i) + "]"));
  }
  return all;
}

void Fields::inert(std::span<const InertField> fields) {
  for (const InertField& field : fields) {
    const Json* value = find(field.name);
    if (!value || !field.neutral) continue;
    const Json neutral = Json::parse(field.neutral);
    bool harmless = false;
    for (const Json& allowed : neutral) harmless = harmless || *value == allowed;
    if (harmless) continue;
    std::string only = "null";
    for (const Json& allowed : neutral) only += ", " + allowed.dump();
    throw Error(400,
                path_of(field.name) + ": " + excerpt(*value) +
                    " is not supported by this server; accepted without effect: " + only,
                "unsupported_value", path_of(field.name));
  }
}

void Fields::finish() const {
  for (const auto& [name, value] : object_.items()) {
    if (!seen_.contains(name)) {
      const std::string path = path_of(shortened(name));
      throw Error(400, "unknown field: " + path, "unknown_field", path);
    }
  }
}

}  // namespace galley::api
