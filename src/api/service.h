// What the dialects serve: one model, its text side and the engine that runs it.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "serve/engine.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace galley::api {

/// Sampling values for requests that name none. An absent value leaves the question to the next in line: the request,
/// then the server's flags, then the model's generation_config, then the built-in (temperature 1, top_p 1, the rest
/// off: OpenAI's own).
struct SamplingDefaults {
  std::optional<double> temperature;
  std::optional<int> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
};

/// A loaded model. Immutable once handed over.
struct ServedModel {
  std::string id;  ///< shown by /v1/models, echoed when a request names none
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;  ///< null: /v1/chat/completions answers 400
  std::int32_t bos_id = -1;
  bool add_bos = false;                ///< plain completions begin with bos_id
  int context = 0;                     ///< tokens a row may hold
  SamplingDefaults generation_config;  ///< from the model's files
  std::shared_ptr<serve::Engine> engine;
};

struct ServiceOptions {
  std::string version;             ///< "0.1.0"
  bool strict_model = false;       ///< a request for any other model id is a 404
  int default_max_tokens = 2048;   ///< cap of a request that names none; the context's rest when that is less
  SamplingDefaults sampling = {};  ///< from the command line
  int rows = 1;                    ///< for /stats before there is an engine
};

/// Shared by all requests; every member is safe from any thread. It exists before the model is loaded, so that /health
/// can say so.
class Service {
 public:
  explicit Service(ServiceOptions options)
      : options_(std::move(options)), started_at_(std::chrono::system_clock::now()) {}

  [[nodiscard]] const ServiceOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::system_clock::time_point started_at() const { return started_at_; }

  /// The model is ready: requests are served from now on.
  void set_model(std::shared_ptr<const ServedModel> model);
  /// No new work from now on; what runs is finished.
  void set_draining() { draining_.store(true); }
  [[nodiscard]] bool draining() const { return draining_.load(); }

  /// Null while loading.
  [[nodiscard]] std::shared_ptr<const ServedModel> model() const;
  /// The model, ready for work; throws Error 503 (loading, draining, engine dead) otherwise.
  [[nodiscard]] std::shared_ptr<const ServedModel> ready_model() const;

 private:
  ServiceOptions options_;
  std::chrono::system_clock::time_point started_at_;
  mutable std::mutex mutex_;
  std::shared_ptr<const ServedModel> model_;  ///< guarded by mutex_
  std::atomic<bool> draining_{false};
};

}  // namespace galley::api
