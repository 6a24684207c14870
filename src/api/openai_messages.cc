#include "api/openai_messages.h"

#include <array>
#include <string>

#include "api/fields.h"
#include "api/json.h"
#include "ops/error.h"

namespace galley::api {
namespace {

// Part of answers that clients send back as they got them.
constexpr std::array kInertMessageFields = {
    InertField{"refusal"},     InertField{"annotations"},
    InertField{"audio", "[]"}, InertField{"function_call", "[]"},
    InertField{"id"},          InertField{"prefix", "[false]"},
};
constexpr std::array kInertPartFields = {InertField{"cache_control"}, InertField{"annotations"},
                                         InertField{"prompt_cache_breakpoint"}};

std::string read_part(const Json& part, const std::string& path) {
  Fields fields(part, path);
  const auto type = fields.string("type");
  if (!type) throw Error(400, fields.path_of("type") + ": required", "missing_field", fields.path_of("type"));
  if (type->find("image") != std::string::npos) {
    throw Error(400, path + ": images (" + excerpt(*type) + ") are not supported; this model reads text only",
                "unsupported_content", path);
  }
  if (*type != "text" && *type != "input_text" && *type != "output_text" && *type != "refusal") {
    throw Error(400, path + ": content of type " + excerpt(*type) + " is not supported; this model reads text only",
                "unsupported_content", path);
  }
  const char* key = *type == "refusal" ? "refusal" : "text";
  auto text = fields.string(key);
  if (!text) throw Error(400, fields.path_of(key) + ": required", "missing_field", fields.path_of(key));
  fields.inert(kInertPartFields);
  fields.finish();
  return *std::move(text);
}

std::string read_content(const Json* content, const std::string& path) {
  if (!content) return {};
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) {
    throw Error(400,
                path + ": expected a string, null or an array of text parts, found " + type_in_words(*content) + ": " +
                    excerpt(*content),
                "invalid_type", path);
  }
  std::string text;
  for (std::size_t i = 0; i < content->size(); ++i) {
    text += read_part((*content)[i], path + "[" + std::to_string(i) + "]");
  }
  return text;
}

/// Templates print a call's arguments with `tojson`; OpenAI sends them as a string of JSON.
Json read_tool_calls(const Json& calls, const std::string& path) {
  if (!calls.is_array()) {
    throw Error(400, path + ": expected an array, found " + type_in_words(calls), "invalid_type", path);
  }
  Json normal = calls;
  for (std::size_t i = 0; i < normal.size(); ++i) {
    const std::string here = path + "[" + std::to_string(i) + "]";
    Json& call = normal[i];
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object() ||
        !call["function"].contains("name") || !call["function"]["name"].is_string()) {
      throw Error(400, here + ": expected an object with function.name, found " + excerpt(call), "invalid_type", here);
    }
    Json& function = call["function"];
    if (!function.contains("arguments") || !function["arguments"].is_string()) continue;
    Json arguments = Json::parse(function["arguments"].get<std::string>(), nullptr, /*allow_exceptions=*/false);
    if (arguments.is_object()) function["arguments"] = std::move(arguments);
  }
  return normal;
}

Json read_message(const Json& message, const std::string& path) {
  Fields fields(message, path);
  const std::string role_path = fields.path_of("role");
  auto role = fields.string("role");
  if (!role) throw Error(400, role_path + ": required", "missing_field", role_path);
  if (*role == "developer") role = "system";
  if (*role != "system" && *role != "user" && *role != "assistant" && *role != "tool") {
    throw Error(
        400, role_path + ": " + excerpt(*role) + " is not a role; allowed are system, developer, user, assistant, tool",
        "invalid_value", role_path);
  }
  Json normal;
  normal["role"] = *role;
  const Json* content = fields.find("content");
  if (!content && *role != "assistant") {  // an assistant may have called tools and said nothing
    throw Error(400, fields.path_of("content") + ": required", "missing_field", fields.path_of("content"));
  }
  normal["content"] = read_content(content, fields.path_of("content"));
  if (const auto name = fields.string("name")) normal["name"] = *name;
  if (const auto id = fields.string("tool_call_id")) normal["tool_call_id"] = *id;
  if (const auto thoughts = fields.string("reasoning_content")) normal["reasoning_content"] = *thoughts;
  if (const Json* calls = fields.find("tool_calls")) {
    Json normal_calls = read_tool_calls(*calls, fields.path_of("tool_calls"));
    if (!normal_calls.empty()) normal["tool_calls"] = std::move(normal_calls);
  }
  fields.inert(kInertMessageFields);
  fields.finish();
  return normal;
}

}  // namespace

Json read_messages(const Json* messages) {
  if (!messages) throw Error(400, "messages: required", "missing_field", "messages");
  if (!messages->is_array()) {
    throw Error(400, "messages: expected an array, found " + type_in_words(*messages) + ": " + excerpt(*messages),
                "invalid_type", "messages");
  }
  if (messages->empty()) {
    throw Error(400, "messages: the list is empty; at least one message is needed", "invalid_value", "messages");
  }
  Json normal = Json::array();
  for (std::size_t i = 0; i < messages->size(); ++i) {
    normal.push_back(read_message((*messages)[i], "messages[" + std::to_string(i) + "]"));
  }
  return normal;
}

}  // namespace galley::api
