// One client's connection, and what all connections of a server share. Private to the HTTP room.
#pragma once
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "api/exchange.h"
#include "http/exchange.h"
#include "http/server.h"
#include "ops/error.h"

namespace galley::http {

class Connection;

/// The server's inside. Responders keep it alive, as the engine may let go of them after the server is gone.
struct Core {
  Core(ServerOptions server_options, api::Handler& server_handler)
      : options(std::move(server_options)), handler(server_handler) {}

  const ServerOptions options;
  api::Handler& handler;
  boost::asio::io_context io{1};
  boost::asio::thread_pool workers{2};           ///< where request bodies are parsed and tokenized
  std::atomic<bool> stopped{false};              ///< nobody runs `io` any more
  std::atomic<std::size_t> connection_count{0};  ///< connections.size(), for other threads

  // On the io thread only.
  std::unordered_set<Connection*> connections;
  bool draining = false;

  /// Connections between a request's first byte and its answer's last.
  std::size_t busy() {
    const std::lock_guard lock(mutex);
    return busy_count;
  }
  void add_busy(int change) {
    const std::lock_guard lock(mutex);
    busy_count += static_cast<std::size_t>(change);
    if (busy_count == 0) idle.notify_all();
  }
  std::mutex mutex;
  std::condition_variable idle;
  std::size_t busy_count = 0;  ///< guarded by mutex
};

/// All members run on the io thread. Alive while its coroutine runs.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Clock = std::chrono::steady_clock;

  Connection(std::shared_ptr<Core> core, boost::asio::ip::tcp::socket socket);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// The connection's life, request by request.
  boost::asio::awaitable<void> run();

  /// Something about the exchange has changed: something to write, or nothing more to come.
  void wake() { event_.cancel(); }
  /// Cuts the connection; a request in flight hears that its client has left.
  void close();
  /// Closes at once when no request has begun, else after its answer.
  void close_when_idle();
  /// Cuts the connection when its deadline has passed.
  void check_deadline(Clock::time_point now);

 private:
  struct Incoming;  ///< a request as read

  boost::asio::awaitable<bool> wait_for_request();
  boost::asio::awaitable<bool> read_request(Incoming& incoming);
  boost::asio::awaitable<void> refuse(const Error& error);
  void hand_over(Incoming& incoming);
  void report(const Incoming& incoming, Clock::time_point arrived) const;
  boost::asio::awaitable<bool> write_answer(const Incoming& incoming);
  boost::asio::awaitable<bool> write_whole(const Incoming& incoming, const api::Response& response);
  boost::asio::awaitable<bool> write_stream(const Incoming& incoming);
  boost::asio::awaitable<void> linger();
  boost::asio::awaitable<void> wait_for_event();

  /// Keeps one read outstanding, so that a client that leaves is noticed and a next request may already come in.
  void watch();
  void client_left();
  void set_busy(bool busy);
  void set_deadline(std::chrono::milliseconds from_now) { deadline_ = Clock::now() + from_now; }
  void clear_deadline() { deadline_ = Clock::time_point::max(); }

  std::shared_ptr<Core> core_;
  boost::asio::ip::tcp::socket socket_;
  boost::beast::flat_buffer buffer_;
  boost::asio::steady_timer event_;  ///< never expires; cancelled to wake the coroutine
  Clock::time_point deadline_ = Clock::time_point::max();
  std::shared_ptr<Exchange> exchange_;  ///< the request being answered
  bool watching_ = false;               ///< a read is outstanding
  bool ended_ = false;                  ///< nothing more comes in: end of file, an error, or close()
  bool busy_ = false;
  std::string client_;  ///< address, for the log
};

}  // namespace galley::http
