#include "app/ready_card.h"

#include <fmt/format.h>

#include "app/version.h"

namespace galley::app {

std::string ready_card(const ServeOptions& options, const ModelFiles& files, const models::Runtime& runtime, int port) {
  const models::Checkpoint& checkpoint = *files.checkpoint;
  const int rows = options.model.runtime.batch;
  const std::string host = options.host == "0.0.0.0" || options.host == "::" ? "127.0.0.1" : options.host;
  const std::string url =
      fmt::format("http://{}:{}", host.find(':') == std::string::npos ? host : "[" + host + "]", port);
  std::string card = fmt::format("\n  galley {} is ready\n\n", kVersion);
  const auto line = [&](const char* name, const std::string& value) {
    card += fmt::format("  {:<9} {}\n", name, value);
  };
  line("model", fmt::format("{}  ({}, {:.0f} MB, {})", files.id, checkpoint.config().family,
                            static_cast<double>(checkpoint.file_bytes()) / 1e6, checkpoint.format()));
  line("lanes", rows == 1 ? std::string("serial: one request after another (--batch N shares a forward among N)")
                          : fmt::format("batched: up to {} rows a step, {} prompts prefilled together", rows,
                                        options.prompt_concurrency));
  line("kernels", fmt::format("{}, {}, {} thread{}", runtime.kernels, runtime.isa, runtime.threads,
                              runtime.threads == 1 ? "" : "s"));
  line("KV", fmt::format("{}; context {} tokens a row", runtime.kv_plan, runtime.context));
  line("API", url + "/v1  (OpenAI)    stats: " + url + "/stats");
  const bool chat = files.chat_template != nullptr;
  card += fmt::format("\n  try it:\n    curl {}/v1/{} -H 'Content-Type: application/json' \\\n      -d '{}'\n\n", url,
                      chat ? "chat/completions" : "completions",
                      chat ? R"({"messages":[{"role":"user","content":"Hello! Who are you?"}]})"
                           : R"({"prompt":"Once upon a time","max_tokens":64})");
  card += "  stop with Ctrl-C: running requests are finished first\n";
  return card;
}

}  // namespace galley::app
