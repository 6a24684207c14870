#include "text/chat_template.h"

#include <utility>
#include <vector>

#include "ops/error.h"
#include "text/bridge.h"

namespace galley::text {
namespace {

constexpr std::int32_t kUnknown = 2, kControl = 3;  // tokenizer.ggml.token_type

class CrateChatTemplate final : public ChatTemplate {
 public:
  explicit CrateChatTemplate(rust::Box<bridge::ChatTemplate> chat) : chat_(std::move(chat)) {}

  std::string render(std::string_view messages_json, std::string_view tools_json, std::string_view extra_json,
                     bool add_generation_prompt) const override {
    return call_crate(
        [&] {
          return std::string(bridge::template_render(*chat_, to_rust(messages_json), to_rust(tools_json),
                                                     to_rust(extra_json), add_generation_prompt));
        },
        [](const std::string& message) { throw Error(400, message, "chat_template_error", "messages"); });
  }

 private:
  rust::Box<bridge::ChatTemplate> chat_;
};

std::vector<std::string> special_tokens(const Assets& assets) {
  std::vector<std::string> tokens;
  if (!assets.tokenizer_json.empty()) {
    for (const auto& token : bridge::special_tokens_of_json(to_rust(assets.tokenizer_json))) {
      tokens.emplace_back(token);
    }
    return tokens;
  }
  const GgufVocabulary& vocabulary = assets.vocabulary;
  for (std::size_t id = 0; id < vocabulary.tokens.size() && id < vocabulary.types.size(); ++id) {
    if (vocabulary.types[id] == kUnknown || vocabulary.types[id] == kControl) tokens.push_back(vocabulary.tokens[id]);
  }
  return tokens;
}

}  // namespace

std::shared_ptr<const ChatTemplate> make_chat_template(const Assets& assets) {
  if (assets.chat_template.empty()) return nullptr;
  return call_crate(
      [&] {
        return std::make_shared<const CrateChatTemplate>(
            bridge::template_new(to_rust(assets.chat_template), to_rust(assets.bos_token), to_rust(assets.eos_token),
                                 special_tokens(assets)));
      },
      [](const std::string& message) { throw ModelError("chat template: " + message); });
}

}  // namespace galley::text
