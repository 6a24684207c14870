// Stand-ins around the dialects: a responder that records, an engine whose rows say what the test tells them to.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/exchange.h"
#include "api/router.h"
#include "api/service.h"
#include "serve/engine.h"
#include "support/scripted_forward.h"

namespace galley::test {

using Json = nlohmann::json;

/// The test's own thread is the connection's: run() executes what was posted.
class RecordingResponder final : public api::Responder {
 public:
  void respond(api::Response response) noexcept override {
    act([&] { whole = std::move(response); }, true);
  }
  void begin(api::Response head) noexcept override {
    act([&] { stream_head = std::move(head); }, false);
  }
  void write(std::string bytes) noexcept override {
    act([&] { body += bytes; }, false);
  }
  void end() noexcept override {
    act([] {}, true);
  }
  void post(std::function<void()> task) noexcept override {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void on_disconnect(std::function<void()> callback) noexcept override {
    const std::lock_guard lock(mutex_);
    disconnect_ = std::move(callback);
  }

  /// Runs posted tasks until the answer is complete. False: that did not happen in time.
  bool run(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::unique_lock lock(mutex_);
    while (!complete_) {
      if (!changed_.wait_until(lock, deadline, [&] { return complete_ || !tasks_.empty(); })) return false;
      run_tasks(lock);
    }
    return true;
  }
  /// Runs what was posted so far.
  void run_posted() {
    std::unique_lock lock(mutex_);
    run_tasks(lock);
  }
  void disconnect() {
    std::function<void()> callback;
    {
      const std::lock_guard lock(mutex_);
      callback = std::exchange(disconnect_, nullptr);
    }
    if (callback) callback();
  }
  bool complete() {
    const std::lock_guard lock(mutex_);
    return complete_;
  }

  // Written on the test's thread.
  std::optional<api::Response> whole;
  std::optional<api::Response> stream_head;
  std::string body;

 private:
  template <typename Action>
  void act(Action action, bool completes) {
    const std::lock_guard lock(mutex_);
    if (complete_) return;
    action();
    complete_ = completes;
    changed_.notify_all();
  }
  void run_tasks(std::unique_lock<std::mutex>& lock) {
    while (!tasks_.empty()) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::function<void()> disconnect_;
  bool complete_ = false;
};

/// Keeps what is submitted; events are the test's to push.
class ManualEngine final : public serve::Engine {
 public:
  struct Row {
    serve::GenerationRequest request;
    std::shared_ptr<serve::EventSink> sink;
    std::shared_ptr<serve::Ticket> ticket;
  };

  std::vector<std::shared_ptr<serve::Ticket>> submit_all(std::vector<serve::Submission> together) override {
    if (refusal) throw Error(*refusal);
    std::vector<std::shared_ptr<serve::Ticket>> tickets;
    for (serve::Submission& one : together) {
      rows.push_back({std::move(one.request), std::move(one.sink), std::make_shared<serve::Ticket>()});
      tickets.push_back(rows.back().ticket);
    }
    return tickets;
  }
  [[nodiscard]] serve::Stats stats() const override { return counters; }
  [[nodiscard]] bool healthy() const override { return alive; }
  bool drain(std::chrono::milliseconds) override { return true; }
  void stop() override {}

  void say(std::size_t row, std::string text, std::vector<serve::TokenInfo> tokens = {}) {
    serve::TokenEvent event;
    event.text = std::move(text);
    event.tokens = std::move(tokens);
    rows.at(row).sink->push(std::move(event));
  }
  void finish(std::size_t row, serve::FinishReason reason = serve::FinishReason::stop, serve::Usage usage = {7, 3, 2},
              std::string text = {}) {
    serve::TokenEvent event;
    event.text = std::move(text);
    event.finish = reason;
    event.usage = usage;
    rows.at(row).sink->push(std::move(event));
  }
  void fail(std::size_t row, Error error) {
    serve::TokenEvent event;
    event.error = std::move(error);
    rows.at(row).sink->push(std::move(event));
  }

  std::vector<Row> rows;
  std::optional<Error> refusal;
  bool alive = true;
  serve::Stats counters;
};

/// "role: content" lines; remembers what it was given.
class LineTemplate final : public text::ChatTemplate {
 public:
  [[nodiscard]] std::string render(std::string_view messages, std::string_view, std::string_view extra,
                                   bool) const override {
    last_messages = Json::parse(messages);
    last_extra = extra;
    std::string out;
    for (const Json& message : last_messages) {
      if (message["content"] == "raise") throw Error(400, "the template refuses", "template_error");
      out += message["role"].get<std::string>() + ": " + message["content"].get<std::string>() + "\n";
    }
    return out;
  }
  mutable Json last_messages;
  mutable std::string last_extra;
};

/// A service over any engine, and requests to it as JSON.
struct ApiFixture {
  explicit ApiFixture(std::shared_ptr<serve::Engine> engine,
                      api::ServiceOptions options = {.version = "1.2.3", .rows = 7})
      : service(std::make_shared<api::Service>(std::move(options))), router(service) {
    model = std::make_shared<api::ServedModel>();
    model->id = "org/tiny";
    model->tokenizer = byte_tokenizer();
    chat_template = std::make_shared<LineTemplate>();
    model->chat_template = chat_template;
    model->context = 4096;
    model->engine = std::move(engine);
    service->set_model(model);
  }

  std::shared_ptr<RecordingResponder> send(const std::string& method, const std::string& path, std::string body = {},
                                           std::vector<api::Header> headers = {}) {
    auto responder = std::make_shared<RecordingResponder>();
    router.handle({method, path, std::move(headers), std::move(body)}, responder);
    return responder;
  }
  std::shared_ptr<RecordingResponder> post(const std::string& path, const Json& body) {
    return send("POST", path, body.dump());
  }
  std::shared_ptr<RecordingResponder> chat(Json fields = Json::object()) {
    if (!fields.contains("messages")) fields["messages"] = Json::parse(R"([{"role":"user","content":"Hi"}])");
    return post("/v1/chat/completions", fields);
  }
  std::shared_ptr<RecordingResponder> complete(Json fields = Json::object()) {
    if (!fields.contains("prompt")) fields["prompt"] = "Hi";
    return post("/v1/completions", fields);
  }

  std::shared_ptr<api::Service> service;
  api::Router router;
  std::shared_ptr<api::ServedModel> model;
  std::shared_ptr<LineTemplate> chat_template;
};

/// The `data:` payloads of a stream.
inline std::vector<std::string> sse_payloads(const std::string& body) {
  std::vector<std::string> all;
  std::size_t at = 0;
  while (at < body.size()) {
    const auto end = body.find("\n\n", at);
    if (end == std::string::npos || body.compare(at, 6, "data: ") != 0) {
      all.push_back("MALFORMED " + body.substr(at));
      break;
    }
    all.push_back(body.substr(at + 6, end - at - 6));
    at = end + 2;
  }
  return all;
}

inline Json json_of(const RecordingResponder& responder) {
  return responder.whole ? Json::parse(responder.whole->body) : Json();
}

}  // namespace galley::test
