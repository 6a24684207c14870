#include <fmt/format.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "app/model_files.h"
#include "app/options.h"
#include "ops/error.h"
#include "serve/engine.h"

namespace galley::app {

namespace {

/// Writes text to standard output as it comes.
class PrintSink final : public serve::EventSink {
 public:
  void push(serve::TokenEvent event) noexcept override {
    std::fwrite(event.text.data(), 1, event.text.size(), stdout);
    std::fflush(stdout);
    if (!event.finish && !event.error) return;
    const std::lock_guard lock(mutex_);
    error_ = event.error;
    done_ = true;
    finished_.notify_all();
  }
  std::optional<Error> wait() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done_; });
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::optional<Error> error_;
};

std::vector<std::int32_t> prompt_of(const GenerateOptions& options, const ModelFiles& files) {
  if (options.raw || files.chat_template == nullptr) {
    std::vector<std::int32_t> ids = files.tokenizer->encode(options.prompt, false);
    const text::Assets& assets = files.checkpoint->assets();
    if (assets.add_bos && assets.bos_id >= 0) ids.insert(ids.begin(), assets.bos_id);
    return ids;
  }
  nlohmann::json messages = nlohmann::json::array();
  if (!options.system.empty()) messages.push_back({{"role", "system"}, {"content", options.system}});
  messages.push_back({{"role", "user"}, {"content", options.prompt}});
  return files.tokenizer->encode(files.chat_template->render(messages.dump(), "", "", true), true);
}

}  // namespace

int generate(GenerateOptions options) {
  options.model.resolve();
  const ModelFiles files = open_model(options.model.model);
  serve::EngineOptions engine_options;
  engine_options.prefill_step = options.model.runtime.prefill_step;
  engine_options.context =
      options.model.runtime.context > 0 ? options.model.runtime.context : files.checkpoint->config().context;
  auto engine = serve::start_engine(engine_options, files.tokenizer, files.checkpoint->assets().end_ids, [&] {
    const models::Runtime runtime = models::make_runtime(*files.checkpoint, options.model.runtime);
    return serve::Lanes{runtime.serial, nullptr};
  });

  serve::GenerationRequest request;
  request.id = "generate";
  request.prompt = prompt_of(options, files);
  request.max_tokens = options.max_tokens;
  const SamplingOptions& s = options.sampling;
  // Greedy, unless something is asked for that has no effect then.
  const bool sampled = options.seed || s.top_p || s.top_k || s.min_p;
  request.sampling.temperature = static_cast<float>(s.temperature.value_or(sampled ? 1.0 : 0.0));
  request.sampling.top_p = static_cast<float>(s.top_p.value_or(1.0));
  request.sampling.min_p = static_cast<float>(s.min_p.value_or(0.0));
  request.sampling.top_k = s.top_k.value_or(0);
  request.sampling.seed = options.seed;
  const auto sink = std::make_shared<PrintSink>();
  engine->submit(std::move(request), sink);
  const std::optional<Error> error = sink->wait();
  std::fputc('\n', stdout);
  if (error) throw Error(*error);
  return 0;
}

}  // namespace galley::app
