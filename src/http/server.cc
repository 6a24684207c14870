#include "http/server.h"

#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <thread>
#include <utility>

#include "http/connection.h"
#include "ops/error.h"

namespace galley::http {
namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr std::chrono::milliseconds kAcceptPause{50};  ///< when descriptors or connections have run out

/// How often deadlines are looked at.
std::chrono::milliseconds sweep_interval(const ServerOptions& options) {
  const auto shortest = std::min({options.idle_timeout, options.request_timeout, options.write_timeout});
  return std::clamp(shortest / 4, std::chrono::milliseconds(10), std::chrono::milliseconds(1000));
}

tcp::acceptor listen(asio::io_context& io, const std::string& host, std::uint16_t port) {
  const std::string where = host + ":" + std::to_string(port);
  const auto check = [&](const error_code& error, const char* flag) {
    if (error) throw Error(500, "cannot listen on " + where + ": " + error.message(), "cannot_listen", flag);
  };
  error_code error;
  tcp::resolver resolver(io);
  const auto found = resolver.resolve(host, std::to_string(port), tcp::resolver::passive, error);
  check(error, "--host");
  tcp::acceptor acceptor(io);
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor.open(endpoint.protocol(), error);
  check(error, "--host");
  acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  check(error, "--port");
  acceptor.bind(endpoint, error);
  check(error, error == asio::error::address_in_use || error == asio::error::access_denied ? "--port" : "--host");
  acceptor.listen(asio::socket_base::max_listen_connections, error);
  check(error, "--port");
  return acceptor;
}

}  // namespace

class Server::Impl {
 public:
  Impl(ServerOptions options, api::Handler& handler)
      : core_(std::make_shared<Core>(std::move(options), handler)),
        acceptor_(listen(core_->io, core_->options.host, core_->options.port)),
        port_(acceptor_.local_endpoint().port()),
        sweeper_(core_->io),
        work_(core_->io.get_executor()) {}

  void start() {
    asio::co_spawn(core_->io, accept(), asio::detached);
    asio::co_spawn(core_->io, sweep(), asio::detached);
    thread_ = std::thread([this] { core_->io.run(); });
  }

  bool stop(std::chrono::milliseconds drain_timeout) {
    if (!thread_.joinable()) {
      core_->workers.join();
      return true;
    }
    asio::post(core_->io, [this] {
      error_code ignored;
      acceptor_.close(ignored);
      core_->draining = true;
      for_each_connection(&Connection::close_when_idle);
      {
        const std::lock_guard lock(core_->mutex);
        drain_begun_.store(true);
      }
      core_->idle.notify_all();  // nothing may be busy, and then nobody else says so
    });
    bool drained = false;
    {
      std::unique_lock lock(core_->mutex);
      drained = core_->idle.wait_for(lock, drain_timeout, [&] { return drain_begun_ && core_->busy_count == 0; });
    }
    asio::post(core_->io, [this] { for_each_connection(&Connection::close); });
    core_->workers.join();  // what they still say is heard
    asio::post(core_->io, [this] {
      sweeping_ = false;
      sweeper_.cancel();
      work_.reset();
    });
    thread_.join();
    core_->stopped.store(true);
    core_->io.restart();
    core_->io.poll();  // what came in behind the thread's back
    return drained;
  }

  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] std::size_t connections() const { return core_->connection_count.load(); }

 private:
  asio::awaitable<void> accept() {
    asio::steady_timer pause(core_->io);
    while (acceptor_.is_open()) {
      if (core_->connections.size() < static_cast<std::size_t>(core_->options.max_connections)) {
        auto [error, socket] = co_await acceptor_.async_accept(kAwait);
        if (!error) {
          auto connection = std::make_shared<Connection>(core_, std::move(socket));
          asio::co_spawn(
              core_->io, [connection = std::move(connection)] { return connection->run(); }, asio::detached);
          continue;
        }
        if (!acceptor_.is_open()) break;
        if (error == asio::error::connection_aborted) continue;
      }
      pause.expires_after(kAcceptPause);
      (void)co_await pause.async_wait(kAwait);
    }
  }

  asio::awaitable<void> sweep() {
    while (sweeping_) {
      sweeper_.expires_after(sweep_interval(core_->options));
      (void)co_await sweeper_.async_wait(kAwait);
      const auto now = Connection::Clock::now();
      for_each_connection(&Connection::check_deadline, now);
    }
  }

  /// Closing may end connections, so the set is not walked itself.
  template <typename... Args>
  void for_each_connection(void (Connection::*member)(Args...), Args... args) {
    const std::vector<Connection*> all(core_->connections.begin(), core_->connections.end());
    for (Connection* connection : all) (connection->*member)(args...);
  }

  std::shared_ptr<Core> core_;
  tcp::acceptor acceptor_;
  std::uint16_t port_;
  asio::steady_timer sweeper_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::atomic<bool> drain_begun_{false};
  bool sweeping_ = true;  ///< io thread only
  std::thread thread_;
};

Server::Server(ServerOptions options, api::Handler& handler)
    : impl_(std::make_unique<Impl>(std::move(options), handler)) {}

Server::~Server() { stop(std::chrono::milliseconds(0)); }

void Server::start() { impl_->start(); }

bool Server::stop(std::chrono::milliseconds drain_timeout) { return impl_->stop(drain_timeout); }

std::uint16_t Server::port() const { return impl_->port(); }

std::size_t Server::connections() const { return impl_->connections(); }

void raise_open_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace galley::http
