// Renders conversations with a chat template, for comparison with another renderer.
//
//   galley-chat-prompt TEMPLATE.jinja <CASES
//
// CASES: a JSON array of {"messages": […], "tools": […] or null, "extra": {…} (chat_template_kwargs), "generate":
// bool}, taken in the template's own terms: the BOS token is "<s>", EOS is "</s>", and no word counts as a special
// token. On standard output an array of as many: the prompt, or {"error": "…"}.
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "ops/error.h"
#include "text/chat_template.h"

namespace {

using Json = nlohmann::ordered_json;

Json render(const galley::text::ChatTemplate& chat, const Json& item) {
  const auto text = [&](const char* key) { return item.at(key).is_null() ? std::string() : item.at(key).dump(); };
  try {
    return chat.render(text("messages"), text("tools"), text("extra"), item.at("generate").get<bool>());
  } catch (const galley::Error& error) {
    return {{"error", error.what()}};
  }
}

void run(const char* file) {
  galley::text::Assets assets;
  std::ifstream in(file, std::ios::binary);
  in.exceptions(std::ios::badbit | std::ios::failbit);
  assets.chat_template.assign(std::istreambuf_iterator<char>(in), {});
  assets.bos_token = "<s>";
  assets.eos_token = "</s>";
  const auto chat = galley::text::make_chat_template(assets);
  Json prompts = Json::array();
  for (const Json& item : Json::parse(std::cin)) prompts.push_back(render(*chat, item));
  std::cout << prompts.dump() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: galley-chat-prompt TEMPLATE.jinja <CASES\n";
    return EXIT_FAILURE;
  }
  try {
    run(argv[1]);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "galley-chat-prompt: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
