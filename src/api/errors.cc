#include "api/errors.h"

#include "api/json.h"

namespace galley::api {
namespace {

constexpr const char* kRetryAfterSeconds = "1";

const char* type_of(int status) {
  if (status == 429) return "rate_limit_error";
  if (status == 503) return "service_unavailable_error";
  return status >= 500 ? "server_error" : "invalid_request_error";
}

OutJson or_null(const std::string& text) { return text.empty() ? OutJson(nullptr) : OutJson(text); }

}  // namespace

OutJson error_json(const Error& error) {
  OutJson fields;
  fields["message"] = error.what();
  fields["type"] = type_of(error.status());
  fields["param"] = or_null(error.param());
  fields["code"] = or_null(error.code());
  OutJson whole;
  whole["error"] = std::move(fields);
  return whole;
}

Response error_response(const Error& error) {
  Response response;
  response.status = error.status();
  response.body = to_text(error_json(error));
  if (error.status() == 429 || error.status() == 503) response.headers.push_back({"Retry-After", kRetryAfterSeconds});
  return response;
}

}  // namespace galley::api
