#include <fmt/format.h>
#include <mlx/memory.h>
#include <pthread.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stop_token>
#include <thread>

#include "api/router.h"
#include "api/service.h"
#include "app/model_files.h"
#include "app/options.h"
#include "app/ready_card.h"
#include "app/version.h"
#include "http/server.h"
#include "ops/error.h"

namespace galley::app {

namespace {

/// SIGINT and SIGTERM, blocked in every thread and waited for in one.
class Signals {
 public:
  /// To be made before any other thread.
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
  }
  /// Waits up to `timeout`; 0 when none came.
  int wait(std::chrono::milliseconds timeout) const {
    const timespec t{timeout.count() / 1000, timeout.count() % 1000 * 1'000'000};
    const int signal = sigtimedwait(&set_, nullptr, &t);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t set_{};
};

/// A thread that ends the program when a signal comes before it is told to stop: while a model is loaded nothing runs
/// that could be finished.
std::jthread leave_on_signal(const Signals& signals) {
  return std::jthread([&signals](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      if (signals.wait(std::chrono::milliseconds(20)) == 0) continue;
      spdlog::info("stopped while the model was being loaded");
      std::_Exit(0);
    }
  });
}

/// The access log.
void log_answer(const http::Answered& answered) {
  const bool probe = answered.path == "/health" || answered.path == "/stats";  // come every few seconds: no news
  spdlog::log(probe ? spdlog::level::debug : spdlog::level::info, "{} {} {} {} {:.0f} ms", answered.client,
              answered.method, answered.path,
              answered.client_left ? std::string("client left") : std::to_string(answered.status),
              answered.seconds * 1e3);
}

}  // namespace

int serve(ServeOptions options) {
  options.model.resolve();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("galley", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::from_str(options.log_level));
  const Signals signals;
  http::raise_open_file_limit();

  api::ServiceOptions service_options;
  service_options.version = kVersion;
  service_options.strict_model = options.strict_model;
  service_options.rows = options.model.runtime.batch;
  service_options.default_max_tokens = options.max_tokens;
  service_options.sampling = {options.sampling.temperature, options.sampling.top_k, options.sampling.top_p,
                              options.sampling.min_p};
  const auto service = std::make_shared<api::Service>(service_options);
  api::Router router(service);
  http::ServerOptions http_options;
  http_options.host = options.host;
  http_options.port = static_cast<std::uint16_t>(options.port);
  http_options.allowed_origins = options.allowed_origins;
  http_options.on_answer = log_answer;
  http::Server server(http_options, router);  // a taken port is told before a model is loaded
  server.start();

  options.model.runtime.warn = [](const std::string& message) { spdlog::warn("{}", message); };
  const auto started = std::chrono::steady_clock::now();
  std::jthread loading = leave_on_signal(signals);
  const ModelFiles files = open_model(options.model.model);
  const models::GenerationConfig recommended = files.checkpoint->generation_config();  // bad files before long work
  serve::EngineOptions engine_options;
  engine_options.batch = options.model.runtime.batch;
  engine_options.prompt_concurrency = options.prompt_concurrency;
  engine_options.prefill_step = options.model.runtime.prefill_step;
  engine_options.prefill_stretch = options.prefill_stretch;
  engine_options.on_fault = [](const std::string& message) { spdlog::error("{}", message); };
  engine_options.max_queue = options.max_queue;
  engine_options.context =
      options.model.runtime.context > 0 ? options.model.runtime.context : files.checkpoint->config().context;
  models::Runtime card;
  std::shared_ptr<serve::Engine> engine =
      serve::start_engine(engine_options, files.tokenizer, files.checkpoint->assets().end_ids, [&] {
        models::Runtime runtime = models::make_runtime(*files.checkpoint, options.model.runtime);
        serve::Lanes lanes{runtime.serial, runtime.batched};
        runtime.serial.reset();
        runtime.batched.reset();
        card = std::move(runtime);
        return lanes;
      });
  auto model = std::make_shared<api::ServedModel>();
  model->id = files.id;
  model->tokenizer = files.tokenizer;
  model->chat_template = files.chat_template;
  model->bos_id = files.checkpoint->assets().bos_id;
  model->add_bos = files.checkpoint->assets().add_bos;
  // What a request may ask for when it names no number: a small KV budget bounds it before the context does.
  model->context = std::min(engine_options.context, card.max_row_tokens);
  model->generation_config = {recommended.temperature, recommended.top_k, recommended.top_p, recommended.min_p};
  model->engine = engine;
  loading.request_stop();
  loading.join();  // before the first request: from here on a signal lets what runs finish
  service->set_model(model);
  fmt::print("{}", ready_card(options, files, card, server.port()));
  std::fflush(stdout);
  spdlog::info("ready in {:.2f} s", std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());

  int exit_code = 0;
  for (;;) {
    const int signal = signals.wait(std::chrono::milliseconds(200));
    if (signal != 0) {
      spdlog::info("{}: no new work, finishing what runs (up to {} s; a second signal cuts it off)",
                   signal == SIGINT ? "SIGINT" : "SIGTERM", options.drain_timeout_s);
      break;
    }
    if (!engine->healthy()) {
      spdlog::error("the engine died; see the message above");
      exit_code = 1;
      break;
    }
  }
  service->set_draining();
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<long>(options.drain_timeout_s * 1000));
  const auto left = [&] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()));
  };
  constexpr std::chrono::milliseconds kGlance{100}, kFarewell{2000};
  bool all_done = false, hurried = false;
  while (!all_done && !hurried && left().count() > 0) {
    all_done = engine->drain(std::min(left(), kGlance));
    hurried = signals.wait(std::chrono::milliseconds(0)) != 0;
  }
  if (!all_done) {
    spdlog::warn("{}; requests still running are cut off",
                 hurried ? "a second signal came" : "the drain timeout passed");
    engine->stop();  // each is told so before its connection goes
  }
  server.stop(all_done ? left() : kFarewell);
  return exit_code;
}

}  // namespace galley::app
