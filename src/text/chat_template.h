// Jinja chat templates (minijinja with Python compatibility, in the text crate).
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "text/assets.h"

namespace galley::text {

/// Immutable and shared between threads.
class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;
  /// Renders the prompt. `messages_json`: an array of messages in the OpenAI form, content a string (the caller
  /// flattens parts). `tools_json`: an array or empty. `extra_json`: an object with chat_template_kwargs, or empty.
  /// Throws galley::Error 400 with the template's own words when it refuses (raise_exception) or can't take the input.
  /// Special tokens inside the text of messages, tools and extra values are neutralized: a U+FDD0 after their first
  /// character keeps Tokenizer::encode(…, parse_special = true) from taking them for control tokens; it then drops
  /// the mark, so the model reads the text as written. Remove U+FDD0 before showing a rendered prompt to anyone.
  /// Absent or null content becomes "", null tool_calls vanish, and tool-call arguments are passed as an object or as
  /// a JSON string, whichever this template takes.
  [[nodiscard]] virtual std::string render(std::string_view messages_json, std::string_view tools_json,
                                           std::string_view extra_json, bool add_generation_prompt) const = 0;
};

/// Null when the model has no template; throws ModelError when it doesn't parse.
std::shared_ptr<const ChatTemplate> make_chat_template(const Assets& assets);

}  // namespace galley::text
