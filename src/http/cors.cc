#include "http/cors.h"

#include <algorithm>

namespace galley::http {
namespace {

bool all_of_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// 127.0.0.0/8 in dotted form; a name like 127.evil.example is none.
bool is_loopback_v4(std::string_view host) {
  int parts = 0;
  while (true) {
    const auto dot = host.find('.');
    const std::string_view part = host.substr(0, dot);
    if (!all_of_digits(part) || part.size() > 3 || (parts == 0 && part != "127")) return false;
    ++parts;
    if (dot == std::string_view::npos) return parts == 4;
    host.remove_prefix(dot + 1);
  }
}

}  // namespace

bool is_origin_rule(std::string_view rule) {
  if (rule == "local" || rule == "*") return true;
  const auto scheme = rule.find("://");
  if (scheme == 0 || scheme == std::string_view::npos) return false;
  const std::string_view host = rule.substr(scheme + 3);
  return !host.empty() && host.find_first_of("/?#@ ") == std::string_view::npos;
}

bool is_local_origin(std::string_view origin) {
  if (origin.starts_with("http://")) {
    origin.remove_prefix(7);
  } else if (origin.starts_with("https://")) {
    origin.remove_prefix(8);
  } else {
    return false;
  }
  const auto bracket = origin.find(']');
  const auto colon = origin.find(':', bracket == std::string_view::npos ? 0 : bracket);
  if (colon != std::string_view::npos) {
    if (!all_of_digits(origin.substr(colon + 1))) return false;
    origin = origin.substr(0, colon);
  }
  return origin == "localhost" || origin == "[::1]" || is_loopback_v4(origin);
}

bool origin_allowed(const std::vector<std::string>& allowed, std::string_view origin) {
  return std::any_of(allowed.begin(), allowed.end(), [&](const std::string& rule) {
    return rule == "*" || rule == origin || (rule == "local" && is_local_origin(origin));
  });
}

}  // namespace galley::http
