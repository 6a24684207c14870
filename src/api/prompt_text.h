// From a prompt's text to its tokens.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "api/service.h"

namespace galley::api {

/// Tokens of a text in which special tokens are recognized. A text so long that no spelling of it fits the context is
/// refused (400 context_length_exceeded, naming both counts) before the time to tokenize it is spent: a body of many
/// megabytes must not keep other clients' requests waiting. `param`: the request's field.
std::vector<std::int32_t> encode_prompt(std::string_view text, const ServedModel& model, const std::string& param);

}  // namespace galley::api
