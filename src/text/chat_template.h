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
  /// Special tokens inside a message's own text are neutralized: they come out as plain text once encoded.
  [[nodiscard]] virtual std::string render(std::string_view messages_json, std::string_view tools_json,
                                           std::string_view extra_json, bool add_generation_prompt) const = 0;
};

/// Null when the model has no template; throws ModelError when it doesn't parse.
std::shared_ptr<const ChatTemplate> make_chat_template(const Assets& assets);

}  // namespace galley::text
