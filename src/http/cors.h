// Which pages of a browser may call this server (Cross-Origin Resource Sharing).
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace galley::http {

/// What ServerOptions::allowed_origins may hold: "local", "*", or an origin as browsers send it: scheme://host[:port].
bool is_origin_rule(std::string_view rule);

/// `allowed` as ServerOptions::allowed_origins.
bool origin_allowed(const std::vector<std::string>& allowed, std::string_view origin);

/// http(s)://localhost, 127.x.x.x or [::1], any port.
bool is_local_origin(std::string_view origin);

}  // namespace galley::http
