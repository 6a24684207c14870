// One request and the way back to its client: all that the HTTP room and the dialects know of each other.
//
// Free of sockets, so that every dialect can be tested by handing it a Request and a recording Responder.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace galley::api {

struct Header {
  std::string name;
  std::string value;
};

struct Request {
  std::string method;           ///< as sent, "GET"
  std::string path;             ///< without query string, still percent-encoded
  std::vector<Header> headers;  ///< names in lower case
  std::string body;

  /// The first header of this (lower-case) name; empty when absent.
  [[nodiscard]] std::string_view header(std::string_view name) const {
    for (const Header& h : headers) {
      if (h.name == name) return h.value;
    }
    return {};
  }
};

/// Content-Length, Connection and CORS headers are the HTTP room's affair.
struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<Header> headers;
  std::string body;
};

/// The way back to one client. Every call is allowed from any thread, returns at once, and calls made by one thread
/// take effect in their order on the connection's thread. Either respond() once, or begin(), write()…, end(). Once the
/// client is gone everything is dropped. A Responder released unanswered answers 500 by itself.
class Responder {
 public:
  virtual ~Responder() = default;
  /// One complete response.
  virtual void respond(Response response) noexcept = 0;
  /// Starts a streamed response; `head.body` is ignored.
  virtual void begin(Response head) noexcept = 0;
  /// More of the body. A reader too slow for its backlog bound is disconnected, as if it had left by itself.
  virtual void write(std::string bytes) noexcept = 0;
  virtual void end() noexcept = 0;
  /// Runs `task` on the connection's thread; respond(), begin(), write() and end() called there act at once. This is
  /// how the engine thread gets rid of everything but the hand-over. Tasks run also when the client is gone; they must
  /// not throw.
  virtual void post(std::function<void()> task) noexcept = 0;
  /// `callback` runs once, on the connection's thread, when the client leaves before the response is complete (at
  /// once when it has left already). It is dropped when the response is complete. One callback a responder.
  virtual void on_disconnect(std::function<void()> callback) noexcept = 0;
};

/// What the HTTP room serves.
class Handler {
 public:
  virtual ~Handler() = default;
  /// Answers through `responder`, now or later. Called on several threads at once; never throws.
  virtual void handle(Request request, std::shared_ptr<Responder> responder) noexcept = 0;
  /// Methods the path answers to, "GET, HEAD"; empty when there is no such path.
  [[nodiscard]] virtual std::string allowed_methods(std::string_view path) const = 0;
};

}  // namespace galley::api
