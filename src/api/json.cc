#include "api/json.h"

#include <algorithm>

#include "ops/error.h"

namespace galley::api {
namespace {

constexpr int kMaxDepth = 100;
constexpr std::size_t kExcerptBytes = 60;

std::string position(std::string_view body, std::size_t offset) {
  offset = std::min(offset, body.size());
  const std::string_view before = body.substr(0, offset);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const auto line_start = before.rfind('\n');
  const auto column = offset - (line_start == std::string_view::npos ? 0 : line_start + 1) + 1;
  return "line " + std::to_string(line) + ", column " + std::to_string(column);
}

void check_depth(std::string_view body) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) {
        throw Error(
            400, "the request body nests deeper than " + std::to_string(kMaxDepth) + " levels at " + position(body, i),
            "invalid_json");
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

}  // namespace

Json parse_body(std::string_view body) {
  if (body.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    throw Error(400, "the request body is empty; a JSON object is expected", "invalid_json");
  }
  check_depth(body);
  try {
    return Json::parse(body);
  } catch (const Json::parse_error& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while …"
    std::string_view why = error.what();
    if (const auto colon = why.find(": "); colon != std::string_view::npos) why.remove_prefix(colon + 2);
    throw Error(400,
                "the request body is not valid JSON at " + position(body, error.byte > 0 ? error.byte - 1 : 0) + ": " +
                    std::string(why),
                "invalid_json");
  } catch (const Json::exception& error) {  // "[json.exception.out_of_range.406] number overflow parsing '1e999'"
    const std::string_view why = error.what();
    const auto number = std::min(why.find('\''), why.size());
    throw Error(400, "the request body holds a number that is too large: " + shortened(why.substr(number)),
                "invalid_json");
  }
}

std::string to_text(const OutJson& value) { return value.dump(-1, ' ', false, OutJson::error_handler_t::replace); }

std::string quote(std::string_view text) { return to_text(OutJson(text)); }

std::string shortened(std::string_view text) {
  if (text.size() <= kExcerptBytes) return std::string(text);
  std::size_t cut = kExcerptBytes;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0U) == 0x80U) --cut;
  return std::string(text.substr(0, cut)) + "…";
}

std::string excerpt(const Json& value) { return shortened(value.dump(-1, ' ', false, Json::error_handler_t::replace)); }

}  // namespace galley::api
