// The error shape of the OpenAI dialects: {"error":{"message","type","param","code"}}.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "api/exchange.h"
#include "ops/error.h"

namespace galley::api {

/// {"error":{…}} as a value, for a body or an event of a stream.
nlohmann::ordered_json error_json(const Error& error);

/// The whole response; 429 and 503 carry Retry-After.
Response error_response(const Error& error);

}  // namespace galley::api
