// The front door over real sockets, with a handler that does what the test says.
#include "http/server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "http/cors.h"
#include "ops/error.h"
#include "unit/http_client.h"

namespace galley::test {
namespace {

using namespace std::chrono_literals;

/// /echo answers with method and body; /drop lets go of the responder; anything else waits for the test, which
/// answers through `last()`.
class TestHandler final : public api::Handler {
 public:
  void handle(api::Request request, std::shared_ptr<api::Responder> responder) noexcept override {
    ++handled;
    if (request.path == "/echo") {
      api::Response response;
      response.body = request.method + ":" + request.body;
      return responder->respond(std::move(response));
    }
    if (request.path == "/drop") return;
    responder->on_disconnect([this] { ++left; });
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(responder));
    ++waiting;
  }
  [[nodiscard]] std::string allowed_methods(std::string_view path) const override {
    return path == "/nowhere" ? "" : "GET, HEAD";
  }
  /// The responder of the latest request that waits; kept until release().
  std::shared_ptr<api::Responder> last() {
    const std::lock_guard lock(mutex_);
    return waiting_.back();
  }
  std::vector<std::shared_ptr<api::Responder>> all() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    waiting_.clear();
  }

  std::atomic<int> handled{0}, waiting{0}, left{0};

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<api::Responder>> waiting_;
};

struct Http : testing::Test {
  static http::ServerOptions defaults() {
    http::ServerOptions options;
    options.port = 0;
    return options;
  }
  void restart(http::ServerOptions options) {
    server.reset();
    options.port = 0;
    server = std::make_unique<http::Server>(options, handler);
    server->start();
  }
  void SetUp() override { restart(defaults()); }
  void TearDown() override {
    server.reset();
    handler.release();
  }
  Client client(int receive_buffer = 0) { return Client(server->port(), receive_buffer); }
  std::shared_ptr<api::Responder> wait_request(int count = 1) {
    EXPECT_TRUE(eventually([&] { return handler.waiting == count; }));
    return handler.last();
  }

  TestHandler handler;
  std::unique_ptr<http::Server> server;
};

api::Response stream_head() {
  api::Response head;
  head.content_type = "text/event-stream";
  return head;
}

TEST_F(Http, AnswersAndKeepsTheConnection) {
  Client c = client();
  for (int i = 0; i < 3; ++i) {
    c.post("/echo?x=1", "body " + std::to_string(i));
    const auto answer = c.read();
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body, "POST:body " + std::to_string(i));
    EXPECT_TRUE(answer.has("Content-Type: application/json"));
    EXPECT_TRUE(answer.has("Date: "));
  }
  EXPECT_EQ(server->connections(), 1U);
  c.get("/echo", "Connection: close\r\n");
  EXPECT_TRUE(c.read().has("Connection: close"));
  EXPECT_EQ(c.read_all(), "");
}

TEST_F(Http, EveryAnswerIsReported) {
  std::mutex mutex;
  std::vector<http::Answered> log;
  const auto entries = [&] {
    const std::lock_guard lock(mutex);
    return log;
  };
  http::ServerOptions options = defaults();
  options.on_answer = [&](const http::Answered& answered) {
    const std::lock_guard lock(mutex);
    log.push_back(answered);
  };
  restart(options);
  {
    Client c = client();
    c.post("/echo?x=1", "body");
    EXPECT_EQ(c.read().status, 200);
    c.get("/wait");
    wait_request();
  }  // leaves
  ASSERT_TRUE(eventually([&] { return entries().size() == 2; }));
  const auto seen = entries();
  EXPECT_EQ(seen[0].client, "127.0.0.1");
  EXPECT_EQ(seen[0].method + " " + seen[0].path, "POST /echo");
  EXPECT_EQ(seen[0].status, 200);
  EXPECT_FALSE(seen[0].client_left);
  EXPECT_GE(seen[0].seconds, 0.0);
  EXPECT_EQ(seen[1].path, "/wait");
  EXPECT_TRUE(seen[1].client_left);
  server.reset();  // before what it reports to
}

TEST_F(Http, PipelinedRequestsAreAnsweredInOrder) {
  Client c = client();
  std::string all;
  for (int i = 0; i < 20; ++i) {
    all += "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n" + std::to_string(10 + i);
  }
  c.send(all);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(c.read().body, "POST:" + std::to_string(10 + i));
}

TEST_F(Http, RequestsInPiecesAndChunkedBodies) {
  Client c = client();
  for (const char byte : std::string("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\nabc")) {
    c.send(std::string(1, byte));
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(c.read().body, "POST:abc");
  c.send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
  EXPECT_EQ(c.read().body, "POST:abcde");
}

TEST_F(Http, ExpectContinue) {
  Client c = client();
  c.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_TRUE(c.read_head().starts_with("HTTP/1.1 100 Continue\r\n"));
  c.send("abc");
  EXPECT_EQ(c.read().body, "POST:abc");
}

TEST_F(Http, HeadAndOptionsAndOldClients) {
  Client c = client();
  c.send("HEAD /echo HTTP/1.1\r\nHost: t\r\n\r\n");
  const auto head = c.read(/*head_only=*/true);
  EXPECT_EQ(head.status, 200);
  EXPECT_TRUE(head.has("Content-Length: 5\r\n"));
  c.send("OPTIONS /echo HTTP/1.1\r\nHost: t\r\n\r\n");
  const auto options = c.read();
  EXPECT_EQ(options.status, 204);
  EXPECT_TRUE(options.has("Allow: GET, HEAD, OPTIONS\r\n")) << options.head;
  c.send("OPTIONS /nowhere HTTP/1.1\r\nHost: t\r\n\r\n");
  EXPECT_EQ(c.read().status, 404);
  c.send("GET http://t/echo HTTP/1.0\r\n\r\n");
  const std::string old = c.read_all();
  EXPECT_NE(old.find("200 OK"), std::string::npos);
  EXPECT_TRUE(old.ends_with("GET:"));
}

TEST_F(Http, CorsForLocalPages) {
  Client c = client();
  c.get("/echo", "Origin: http://localhost:3000\r\n");
  EXPECT_TRUE(c.read().has("Access-Control-Allow-Origin: http://localhost:3000\r\n"));
  c.get("/echo", "Origin: https://evil.example\r\n");
  EXPECT_FALSE(c.read().has("Access-Control-Allow-Origin"));
  c.send(
      "OPTIONS /echo HTTP/1.1\r\nHost: t\r\nOrigin: http://127.0.0.1\r\nAccess-Control-Request-Method: POST\r\n"
      "Access-Control-Request-Headers: content-type\r\n\r\n");
  const auto preflight = c.read();
  EXPECT_EQ(preflight.status, 204);
  EXPECT_TRUE(preflight.has("Access-Control-Allow-Methods: GET, HEAD, OPTIONS\r\n"));
  EXPECT_TRUE(preflight.has("Access-Control-Allow-Headers: content-type\r\n"));

  EXPECT_TRUE(http::is_local_origin("https://[::1]:8443"));
  EXPECT_FALSE(http::is_local_origin("http://127.evil.example"));
  EXPECT_FALSE(http::is_local_origin("http://localhost.evil.example"));
  EXPECT_FALSE(http::is_local_origin("http://localhost:80@evil.example"));
  EXPECT_FALSE(http::is_local_origin("null"));
  EXPECT_TRUE(http::origin_allowed({"*"}, "null"));
  EXPECT_TRUE(http::origin_allowed({"https://a.example"}, "https://a.example"));
  EXPECT_FALSE(http::origin_allowed({"https://a.example"}, "http://localhost"));
  for (const char* rule : {"local", "*", "https://a.example", "http://[::1]:80", "chrome-extension://abc"}) {
    EXPECT_TRUE(http::is_origin_rule(rule)) << rule;
  }
  for (const char* rule : {"", "a.example", "https://", "://a", "https://a.example/", "https://b@a.example"}) {
    EXPECT_FALSE(http::is_origin_rule(rule)) << rule;
  }
}

TEST_F(Http, MalformedRequestsAreRefusedAndTheServerLives) {
  for (const char* bytes : {"nonsense\r\n\r\n", "GET /\r\n\r\n", "GET / HTTP/1.1\r\nbad header\r\n\r\n",
                            "GET / HTTP/9.9\r\n\r\n", "POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
                            "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                            "\x16\x03\x01\x02\x01\x01\xfc\x03\x03"
                            "abcdefgh\r\n\r\n"}) {
    Client c = client();
    c.send(bytes);
    const auto answer = c.read();
    EXPECT_EQ(answer.status, 400) << bytes;
    EXPECT_NE(answer.body.find("\"error\":{\"message\""), std::string::npos);
    EXPECT_EQ(c.read_all(), "") << "the connection must end";
  }
  Client c = client();
  c.get("/echo");
  EXPECT_EQ(c.read().status, 200);
}

TEST_F(Http, LimitsOfBodyAndHeaders) {
  http::ServerOptions options = defaults();
  options.body_limit = 1000;
  options.header_limit = 2000;
  restart(options);
  Client c = client();
  c.post("/echo", std::string(1000, 'x'));
  EXPECT_EQ(c.read().status, 200);
  c.post("/echo", std::string(300'000, 'x'));  // refused by its length; the rest is read and thrown away
  EXPECT_EQ(c.read().status, 413);
  Client chunked = client();
  chunked.send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + std::string(2000, 'x') +
               "\r\n0\r\n\r\n");
  EXPECT_EQ(chunked.read().status, 413);
  Client headers = client();
  headers.get("/echo", "X: " + std::string(5000, 'x') + "\r\n");
  EXPECT_EQ(headers.read().status, 431);
  EXPECT_EQ(handler.handled, 1);
}

TEST_F(Http, TimeoutsCloseIdleAndSlowConnections) {
  http::ServerOptions options = defaults();
  options.idle_timeout = 100ms;
  options.request_timeout = 100ms;
  restart(options);
  Client idle = client();
  Client slow = client();
  slow.send("POST /echo HTTP/1.1\r\nContent-Length: 100\r\n\r\nonly this");
  EXPECT_EQ(idle.read_all(), "");
  EXPECT_EQ(slow.read_all(), "");
  EXPECT_TRUE(eventually([&] { return server->connections() == 0; }));
}

TEST_F(Http, StreamsAsItIsWritten) {
  Client c = client();
  c.get("/wait");
  const auto responder = wait_request();
  responder->begin(stream_head());
  const std::string head = c.read_head();
  EXPECT_NE(head.find("Transfer-Encoding: chunked"), std::string::npos);
  EXPECT_NE(head.find("Content-Type: text/event-stream"), std::string::npos);
  responder->write("one");
  EXPECT_EQ(c.read_chunk(), "one");
  std::thread([responder] { responder->write("two"); }).join();
  EXPECT_EQ(c.read_chunk(), "two");
  responder->end();
  EXPECT_EQ(c.read_chunk(), "");
  EXPECT_FALSE(c.chunk_error());
  c.get("/echo");  // the connection lives on
  EXPECT_EQ(c.read().body, "GET:");
  EXPECT_EQ(handler.left, 0);
}

TEST_F(Http, StreamsToOldClientsWithoutChunks) {
  Client c = client();
  c.send("GET /wait HTTP/1.0\r\n\r\n");
  const auto responder = wait_request();
  responder->begin(stream_head());
  responder->write("one");
  responder->write("two");
  responder->end();
  const std::string all = c.read_all();
  EXPECT_TRUE(all.ends_with("\r\n\r\nonetwo")) << all;
}

TEST_F(Http, PostedTasksRunInOrderAndMayWrite) {
  Client c = client();
  c.get("/wait");
  const auto responder = wait_request();
  responder->begin(stream_head());
  for (int i = 0; i < 100; ++i) {
    responder->post([responder, i] { responder->write(std::to_string(i) + ","); });
  }
  responder->post([responder] { responder->end(); });
  std::string expected;
  for (int i = 0; i < 100; ++i) expected += std::to_string(i) + ",";
  EXPECT_EQ(c.read().body, expected);
}

TEST_F(Http, LeavingIsNoticedWhileWaitingAndStreaming) {
  Client waiting = client();
  waiting.post("/wait", "{}");
  wait_request(1);
  waiting.close();
  EXPECT_TRUE(eventually([&] { return handler.left == 1; }));

  Client streaming = client();
  streaming.post("/wait", "{}");
  const auto responder = wait_request(2);
  responder->begin(stream_head());
  responder->write("one");
  streaming.wait_for("one");
  streaming.close();  // nothing is being written: only the read can tell
  EXPECT_TRUE(eventually([&] { return handler.left == 2; }));

  Client reset = client();
  reset.post("/wait", "{}");
  wait_request(3);
  reset.abort();
  EXPECT_TRUE(eventually([&] { return handler.left == 3; }));

  Client pipelining = client();
  pipelining.post("/wait", "{}");
  wait_request(4);
  pipelining.get("/echo");  // read ahead, and still watched
  pipelining.close();
  EXPECT_TRUE(eventually([&] { return handler.left == 4; }));
  EXPECT_TRUE(eventually([&] { return server->connections() == 0; }));
  responder->write("into the void");
  responder->end();
  EXPECT_EQ(handler.handled, 4);
}

TEST_F(Http, ClosingTheSendingSideAfterAWholeAnswerIsFine) {
  Client c = client();
  c.post("/echo", std::string(8'000'000, 'x'));
  EXPECT_NE(c.read_head().find("Content-Length: 8000005\r\n"), std::string::npos);
  c.half_close();
  EXPECT_EQ(c.read_all().size(), 8'000'005U);
}

TEST_F(Http, SlowReaderIsDisconnectedAndNobodyElse) {
  http::ServerOptions options = defaults();
  options.backlog_limit = 100'000;
  options.send_buffer = 8192;
  restart(options);
  Client slow = client(/*receive_buffer=*/4096);
  slow.get("/wait");
  const auto stuck = wait_request(1);
  Client quick = client();
  quick.get("/wait");
  const auto fine = wait_request(2);
  stuck->begin(stream_head());
  fine->begin(stream_head());
  quick.read_head();
  const std::string piece(1000, 'x');
  int written = 0;
  while (handler.left == 0 && written < 2000) {
    stuck->write(piece);
    fine->write(piece);
    EXPECT_FALSE(quick.read_chunk().empty());
    ++written;
  }
  EXPECT_EQ(handler.left, 1);
  EXPECT_GT(written, 99);    // its backlog was its own to use
  EXPECT_LT(written, 1000);  // and no more than that and the sockets' buffers
  fine->end();
  while (!quick.read_chunk().empty()) {
  }
  EXPECT_FALSE(quick.chunk_error());
  EXPECT_TRUE(eventually([&] { return server->connections() == 1; }));
}

TEST_F(Http, AWriteThatNobodyTakesTimesOut) {
  http::ServerOptions options = defaults();
  options.write_timeout = 100ms;
  options.send_buffer = 8192;
  restart(options);
  Client slow = client(4096);
  slow.get("/wait");
  const auto responder = wait_request();
  responder->begin(stream_head());
  responder->write(std::string(500'000, 'x'));
  EXPECT_TRUE(eventually([&] { return handler.left == 1; }));
}

TEST_F(Http, DroppedRequestsAreAnswered) {
  Client c = client();
  c.get("/drop");
  EXPECT_EQ(c.read().status, 500);
  c.get("/wait");
  wait_request()->begin(stream_head());
  c.read_head();
  handler.release();  // in the middle of a stream: it must not look complete
  c.read_chunk();
  EXPECT_TRUE(c.chunk_error());
}

TEST_F(Http, ManyOpenStreams) {
  constexpr int kStreams = 200;
  std::vector<Client> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(client());
    clients.back().get("/wait");
  }
  ASSERT_TRUE(eventually([&] { return handler.waiting == kStreams; }));
  const auto responders = handler.all();
  for (const auto& responder : responders) responder->begin(stream_head());
  for (int round = 0; round < 3; ++round) {
    for (const auto& responder : responders) responder->write("x");
  }
  for (const auto& responder : responders) responder->end();
  for (Client& c : clients) EXPECT_EQ(c.read().body, "xxx");
}

TEST_F(Http, TakenPortIsOneClearLine) {
  http::ServerOptions options = defaults();
  options.port = server->port();
  try {
    const http::Server second(options, handler);
    FAIL() << "two servers on one port";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("127.0.0.1:" + std::to_string(options.port)), std::string::npos) << message;
    EXPECT_NE(message.find("in use"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
  options.port = 0;
  options.host = "203.0.113.7";  // not an address of this machine
  EXPECT_THROW(http::Server(options, handler), Error);
}

TEST_F(Http, StopWaitsForWhatIsInFlight) {
  Client idle = client();
  idle.get("/echo");
  idle.read();
  Client busy = client();
  busy.get("/wait");
  const auto responder = wait_request();
  responder->begin(stream_head());
  busy.read_head();
  std::atomic<bool> stopped{false};
  bool drained = false;
  std::thread stopping([&] {
    drained = server->stop(20s);
    stopped = true;
  });
  EXPECT_EQ(idle.read_all(), "");  // idle connections end at once
  EXPECT_FALSE(stopped);
  EXPECT_THROW(
      {
        Client late = client();
        late.get("/echo");
        if (late.read().status == 0) throw std::runtime_error("closed");
      },
      std::runtime_error);
  responder->write("the end");
  EXPECT_EQ(busy.read_chunk(), "the end");
  responder->end();
  EXPECT_EQ(busy.read_chunk(), "");
  EXPECT_FALSE(busy.chunk_error());
  stopping.join();
  EXPECT_TRUE(drained);
  EXPECT_EQ(handler.left, 0);
}

TEST_F(Http, StopCutsWhatOutlastsTheTimeout) {
  Client c = client();
  c.get("/wait");
  const auto responder = wait_request();
  EXPECT_FALSE(server->stop(50ms));
  EXPECT_EQ(handler.left, 1);
  EXPECT_EQ(c.read_all(), "");
  responder->begin(stream_head());  // too late, and harmless
  responder->write("x");
  responder->post([] {});
  responder->end();
}

}  // namespace
}  // namespace galley::test
