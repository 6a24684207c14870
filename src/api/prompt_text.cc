#include "api/prompt_text.h"

#include <algorithm>
#include <cstddef>

#include "ops/error.h"

namespace galley::api {
namespace {

/// Unicode normalization can shorten a text before it is cut into tokens, to a third at most (NFC, NFKC on UTF-8).
constexpr std::size_t kMostShrinking = 4;

}  // namespace

std::vector<std::int32_t> encode_prompt(std::string_view text, const ServedModel& model, const std::string& param) {
  const std::size_t bytes_a_token = kMostShrinking * std::max<std::size_t>(model.tokenizer->longest_token(), 1);
  const std::size_t least = text.size() / bytes_a_token;
  if (model.context > 0 && least > static_cast<std::size_t>(model.context)) {
    throw Error(400,
                "the context length is " + std::to_string(model.context) + " tokens, but the prompt's " +
                    std::to_string(text.size()) + " bytes make at least " + std::to_string(least) +
                    " tokens; shorten the prompt",
                "context_length_exceeded", param);
  }
  return model.tokenizer->encode(text, /*parse_special=*/true);
}

}  // namespace galley::api
