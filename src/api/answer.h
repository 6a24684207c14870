// Pieces of an answer that chat and completions share: ids, usage, finish reasons, SSE framing.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "api/exchange.h"
#include "ops/error.h"
#include "serve/request.h"

namespace galley::api {

/// What every body and chunk of one answer repeats.
struct AnswerHead {
  std::string id;            ///< "chatcmpl-…"
  std::int64_t created = 0;  ///< unix seconds
  std::string model;
  std::string fingerprint;  ///< "galley-0.1.0"
};

/// `prefix` and 24 random characters.
std::string random_id(std::string_view prefix);
std::int64_t unix_now();

/// {"id","object","created","model","system_fingerprint"}
nlohmann::ordered_json head_json(const AnswerHead& head, std::string_view object);
nlohmann::ordered_json usage_json(const serve::Usage& usage);
/// "stop" or "length"
const char* finish_word(serve::FinishReason reason);

/// "data: …\n\n"
std::string sse_data(std::string_view json);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";
/// The head of a stream of server-sent events.
Response sse_head();
/// An error in the middle of a stream, as an event of its own.
std::string sse_error(const Error& error);

}  // namespace galley::api
