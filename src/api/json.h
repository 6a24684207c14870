// JSON as the dialects read and write it. Include from .cc files only; headers use <nlohmann/json_fwd.hpp>.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace galley::api {

using Json = nlohmann::json;             ///< what clients send
using OutJson = nlohmann::ordered_json;  ///< what we send: keys stay in the order they are written

/// Parses a request's body. Throws Error 400 that tells line and column, also for nesting beyond 100 levels (copying
/// and printing JSON recurses).
Json parse_body(std::string_view body);

/// Compact text; bytes that are not UTF-8 become U+FFFD.
std::string to_text(const OutJson& value);
/// A quoted JSON string.
std::string quote(std::string_view text);
/// A text as it appears in an error message: cut short, never within a character.
std::string shortened(std::string_view text);
/// How a value appears in an error message: its JSON, cut short.
std::string excerpt(const Json& value);

}  // namespace galley::api
