// The whole way: sockets, dialects, the real scheduler, a scripted forward.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "api/router.h"
#include "http/server.h"
#include "support/scripted_forward.h"
#include "unit/http_client.h"

namespace galley::test {
namespace {

using namespace std::chrono_literals;

constexpr int kRows = 4;

struct Whole : testing::Test {
  void begin(Script script) {
    ScriptedOptions scripted;
    scripted.script = std::move(script);
    scripted.on_launch = [this](const models::StepPlan&, int) {
      gate.pass();
      if (kill) throw std::runtime_error("the machine is on fire");
    };
    engine = scripted_engine({.batch = kRows, .max_queue = 1000, .context = 4096}, scripted);
    service = std::make_shared<api::Service>(api::ServiceOptions{.version = "1"});
    auto model = std::make_shared<api::ServedModel>();
    model->id = "scripted";
    model->tokenizer = byte_tokenizer();
    model->context = 4096;
    model->engine = engine;
    service->set_model(std::move(model));
    router = std::make_unique<api::Router>(service);
    http::ServerOptions options;
    options.port = 0;
    server = std::make_unique<http::Server>(options, *router);
    server->start();
  }
  void TearDown() override {
    gate.open();
    server.reset();
  }
  Client client() { return Client(server->port()); }
  static std::string body(const std::string& prompt, bool stream, int max_tokens = 1000) {
    return R"({"prompt":")" + prompt + R"(","temperature":0,"ignore_eos":true,"max_tokens":)" +
           std::to_string(max_tokens) + (stream ? R"(,"stream":true})" : "}");
  }
  [[nodiscard]] serve::Stats::Batch batch() const { return engine->stats().batch; }

  StepGate gate;
  std::atomic<bool> kill{false};
  std::shared_ptr<serve::Engine> engine;
  std::shared_ptr<api::Service> service;
  std::unique_ptr<api::Router> router;
  std::unique_ptr<http::Server> server;
};

TEST_F(Whole, ClientsThatLeaveFreeTheirRows) {
  begin(babble());
  gate.close();
  std::vector<Client> clients;
  for (int i = 0; i < kRows + 3; ++i) {  // more than there are rows: three wait
    clients.push_back(client());
    clients.back().post("/v1/completions", body("p" + std::to_string(i), /*stream=*/i % 2 == 0, 4000));
    ASSERT_TRUE(eventually([&] { return engine->stats().requests.accepted == static_cast<std::uint64_t>(i + 1); }));
  }
  gate.allow(3);               // some have begun
  clients[kRows].close();      // one that waits
  clients[kRows + 1].abort();  // another
  clients[0].wait_for("data: ");
  clients[0].close();  // one that streams
  clients[1].close();  // one whose answer is being made
  // Leaving takes effect within a step or two of being noticed.
  const auto cancelled = [&] {
    gate.allow(1);
    return engine->stats().requests.cancelled == 4;
  };
  EXPECT_TRUE(eventually(cancelled));
  EXPECT_EQ(engine->stats().requests.finished, 0U);
  for (Client& c : clients) c.close();
  EXPECT_TRUE(eventually([&] {
    gate.allow(1);
    return batch().active_rows == 0 && batch().pending_rows == 0 && batch().prefilling_rows == 0;
  }));
  EXPECT_EQ(engine->stats().requests.cancelled, static_cast<std::uint64_t>(kRows + 3));
}

TEST_F(Whole, StreamsAtOnceEqualBodiesOneByOne) {
  begin(babble());
  constexpr int kClients = 12;
  std::vector<std::string> streamed(kClients);
  std::vector<Client> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(client());
    clients.back().post("/v1/completions", body("prompt " + std::to_string(i), true, 60));
  }
  for (int i = 0; i < kClients; ++i)
    streamed[static_cast<std::size_t>(i)] = clients[static_cast<std::size_t>(i)].read().body;
  Client c = client();
  for (int i = 0; i < kClients; ++i) {
    c.post("/v1/completions", body("prompt " + std::to_string(i), false, 60));
    const std::string whole = c.read().body;
    const auto text_at = whole.find(R"("text":")") + 8;
    const std::string text = whole.substr(text_at, whole.find('"', text_at) - text_at);
    EXPECT_EQ(text.size(), 60U);
    std::string said;
    const std::string& events = streamed[static_cast<std::size_t>(i)];
    for (auto at = events.find(R"("text":")"); at != std::string::npos; at = events.find(R"("text":")", at + 1)) {
      said += events.substr(at + 8, events.find('"', at + 8) - at - 8);
    }
    EXPECT_EQ(said, text);
    EXPECT_TRUE(events.ends_with("data: [DONE]\n\n"));
  }
}

TEST_F(Whole, HealthAnswersWhileAStepTakesLong) {
  begin(babble());
  gate.close();
  Client busy = client();
  busy.post("/v1/completions", body("x", true));
  ASSERT_TRUE(eventually([&] { return engine->stats().requests.accepted == 1; }));
  Client c = client();
  c.get("/health");
  EXPECT_EQ(c.read().status, 200);
  c.get("/stats");
  EXPECT_EQ(c.read().status, 200);
}

TEST_F(Whole, ShuttingDownFinishesWhatRuns) {
  begin(say("an answer that takes its time"));
  gate.close();
  Client c = client();
  c.post("/v1/completions", R"({"prompt":"x","stream":true,"temperature":0})");
  ASSERT_TRUE(eventually([&] { return engine->stats().requests.accepted == 1; }));
  service->set_draining();
  bool drained = false;
  std::thread stopping([&] { drained = server->stop(20s); });
  gate.open();
  const auto answer = c.read();
  stopping.join();
  EXPECT_TRUE(drained);
  EXPECT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n"));
}

TEST_F(Whole, ADeadEngineTellsEveryClient) {
  begin(babble());
  gate.close();
  Client streaming = client();
  streaming.post("/v1/completions", body("x", true));
  ASSERT_TRUE(eventually([&] { return engine->stats().requests.accepted == 1; }));
  gate.allow(3);
  ASSERT_NE(streaming.wait_for("data: "), std::string::npos);
  Client waiting = client();
  waiting.post("/v1/completions", body("y", false));
  ASSERT_TRUE(eventually([&] { return engine->stats().requests.accepted == 2; }));
  kill = true;
  gate.open();
  EXPECT_NE(streaming.read().body.find(R"(data: {"error":{"message":)"), std::string::npos);
  EXPECT_GE(waiting.read().status, 500);
  Client late = client();
  late.get("/health");
  EXPECT_EQ(late.read().status, 503);
  late.get("/v1/models");
  EXPECT_EQ(late.read().status, 503);
  late.post("/v1/completions", body("x", false));
  const auto answer = late.read();
  EXPECT_EQ(answer.status, 503);
  EXPECT_TRUE(answer.has("Retry-After: "));
}

}  // namespace
}  // namespace galley::test
