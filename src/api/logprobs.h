// Log-probabilities in the shapes of the two OpenAI dialects.
#pragma once
#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <span>

#include "serve/request.h"
#include "text/tokenizer.h"

namespace galley::api {

inline constexpr int kMostTopLogprobs = 20;

/// Chat: [{"token","logprob","bytes","top_logprobs":[{"token","logprob","bytes"}…]}…]. `bytes` are the token's raw
/// bytes; in `token` bytes that are not whole UTF-8 characters show as U+FFFD.
nlohmann::ordered_json chat_logprobs(std::span<const serve::TokenInfo> tokens, const text::Tokenizer& tokenizer);

/// Completions: {"tokens","token_logprobs","top_logprobs","text_offset"}. The chosen token is always among its
/// alternatives; a token that is not whole UTF-8 characters shows as "bytes:\xf0\x9f", as OpenAI has it. `offset` is
/// the running offset in characters of the text so far; advanced past these tokens.
nlohmann::ordered_json completion_logprobs(std::span<const serve::TokenInfo> tokens, const text::Tokenizer& tokenizer,
                                           std::size_t& offset);

}  // namespace galley::api
