#include "api/answer.h"

#include <chrono>
#include <random>

#include "api/errors.h"
#include "api/json.h"

namespace galley::api {

std::string random_id(std::string_view prefix) {
  static constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  thread_local std::mt19937_64 engine{[] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }()};
  std::uniform_int_distribution<std::size_t> pick(0, kAlphabet.size() - 1);
  std::string id(prefix);
  for (int i = 0; i < 24; ++i) id += kAlphabet[pick(engine)];
  return id;
}

std::int64_t unix_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

OutJson head_json(const AnswerHead& head, std::string_view object) {
  OutJson json;
  json["id"] = head.id;
  json["object"] = object;
  json["created"] = head.created;
  json["model"] = head.model;
  json["system_fingerprint"] = head.fingerprint;
  return json;
}

OutJson usage_json(const serve::Usage& usage) {
  OutJson json;
  json["prompt_tokens"] = usage.prompt_tokens;
  json["completion_tokens"] = usage.completion_tokens;
  json["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  json["prompt_tokens_details"]["cached_tokens"] = usage.cached_tokens;
  return json;
}

const char* finish_word(serve::FinishReason reason) {
  return reason == serve::FinishReason::length ? "length" : "stop";
}

std::string sse_data(std::string_view json) {
  std::string event = "data: ";
  event.reserve(json.size() + 8);
  event += json;
  event += "\n\n";
  return event;
}

Response sse_head() {
  Response head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  return head;
}

std::string sse_error(const Error& error) { return sse_data(to_text(error_json(error))); }

}  // namespace galley::api
