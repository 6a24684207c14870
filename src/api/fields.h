// Reading a request's fields: every field is either read, known to be without effect, or refused by name.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace galley::api {

/// A field that is accepted but does nothing here.
struct InertField {
  const char* name;
  /// JSON text of an array: the values that ask for nothing (null always does). nullptr: any value is fine, as the
  /// field only advises or labels.
  const char* neutral = nullptr;
};

/// A JSON object being read. Null counts as absent. Every error is an Error 400 whose `param` is the field's path and
/// whose message tells what was found and what is allowed.
class Fields {
 public:
  /// `object` is borrowed. `path` names it in messages ("" for the body itself). Throws when it is no object.
  explicit Fields(const nlohmann::json& object, std::string path = {});

  /// The value, or null when absent.
  const nlohmann::json* find(const char* name);
  std::optional<bool> boolean(const char* name);
  std::optional<std::string> string(const char* name);
  /// `low` <= value <= `high`.
  std::optional<double> number(const char* name, double low, double high);
  /// Also takes 16.0.
  std::optional<std::int64_t> integer(const char* name, std::int64_t low, std::int64_t high);
  /// A string or an array of at most `most` strings, none of them empty.
  std::vector<std::string> strings(const char* name, std::size_t most);

  /// Accepts inert fields; one with a value that asks for something is refused as not supported.
  void inert(std::span<const InertField> fields);
  /// Refuses the first field that nobody asked about.
  void finish() const;

  /// "stop", "messages[0].content"
  [[nodiscard]] std::string path_of(std::string_view name) const;

 private:
  const nlohmann::json& object_;
  std::string path_;
  std::set<std::string, std::less<>> seen_;
};

/// "an integer", "a string", …: the type of a value in words.
std::string type_in_words(const nlohmann::json& value);

}  // namespace galley::api
