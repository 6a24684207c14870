// The HTTP/1.1 front door: one thread for all sockets, two for turning request bodies into work.
//
// A connection reads on while its answer is being made, so a client that leaves is noticed at once, streaming or
// waiting. (One that closes only its sending side counts as gone too, as in Go's and nginx's servers.) A slow reader
// costs its own backlog and nothing else.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api/exchange.h"

namespace galley::http {

/// A line of the access log.
struct Answered {
  std::string client;        ///< its address
  std::string method, path;  ///< printable characters only; "-" of what was no proper request
  int status = 0;
  bool client_left = false;  ///< before the answer was complete
  double seconds = 0;        ///< from the request's arrival to the answer's last byte
};

struct ServerOptions {
  std::string host = "127.0.0.1";         ///< address or name; a name must resolve to an address of this machine
  std::uint16_t port = 8080;              ///< 0: any free one
  std::size_t body_limit = 32'000'000;    ///< bytes of a request body; more is a 413
  std::size_t header_limit = 32'768;      ///< bytes of request line and headers; more is a 431
  std::size_t backlog_limit = 1'048'576;  ///< unsent bytes of one stream; beyond it the reader is disconnected
  int send_buffer = 0;                    ///< SO_SNDBUF of every connection in bytes; 0: the system's choice
  int max_connections = 8192;             ///< beyond it new connections wait in the system's accept queue
  std::chrono::milliseconds idle_timeout{75'000};     ///< between requests of a kept connection
  std::chrono::milliseconds request_timeout{30'000};  ///< for a request to arrive whole, from its first byte
  std::chrono::milliseconds write_timeout{60'000};    ///< for one write to be taken by the client
  /// Origins that browsers may call from. "local": pages of this machine (localhost, 127.0.0.1, [::1], any port);
  /// "*": everyone; else an exact origin such as "https://chat.example.org".
  std::vector<std::string> allowed_origins = {"local"};
  std::function<void(const Answered&)> on_answer;  ///< after every answer, on the thread of the sockets; may be empty
};

class Server {
 public:
  /// Listens at once; throws Error when the address can't be had (one line, names address and port). `handler` is
  /// borrowed and outlives the server.
  Server(ServerOptions options, api::Handler& handler);
  ~Server();  ///< stop(0)
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Begins to accept.
  void start();
  /// Takes no new connections and no further requests on those there are; waits until every request in flight is
  /// answered or `drain_timeout` passed, then closes what is left. True: nothing was cut off. Not from a handler.
  bool stop(std::chrono::milliseconds drain_timeout);

  [[nodiscard]] std::uint16_t port() const;  ///< the port in use, also when 0 was asked for
  [[nodiscard]] std::size_t connections() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Every open stream takes a file descriptor: raises the process's soft limit to its hard one.
void raise_open_file_limit();

}  // namespace galley::http
