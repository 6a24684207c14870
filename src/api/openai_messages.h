// The `messages` of a chat request, brought into the form chat templates expect.
#pragma once
#include <nlohmann/json_fwd.hpp>

namespace galley::api {

/// Checks an OpenAI message list and normalizes it: roles system, user, assistant and tool (developer becomes
/// system), content always a string (null becomes "", text parts are joined), arguments of past tool calls as objects.
/// Throws Error 400 that names the message and the field.
nlohmann::json read_messages(const nlohmann::json* messages);

}  // namespace galley::api
