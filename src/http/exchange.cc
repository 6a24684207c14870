#include "http/exchange.h"

#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <utility>

#include "api/errors.h"
#include "http/connection.h"

namespace galley::http {

void Exchange::leave() {
  client_left = true;
  auto callback = std::exchange(on_disconnect, nullptr);
  if (callback && !complete) callback();
}

struct HttpResponder::Shared {
  std::shared_ptr<Core> core;
  std::weak_ptr<Connection> connection;
  std::shared_ptr<Exchange> exchange;

  void wake() const {
    if (const auto alive = connection.lock()) alive->wake();
  }
  void finish(Exchange& answer) const {
    answer.complete = true;
    answer.on_disconnect = nullptr;
    wake();
  }
};

namespace {

/// Runs action(shared, exchange) on the io thread, at once when this is it.
template <typename Shared, typename Action>
void on_io_thread(const std::shared_ptr<Shared>& shared, Action action) {
  if (shared->core->stopped.load()) return;  // every client is gone
  boost::asio::dispatch(shared->core->io,
                        [shared, action = std::move(action)]() mutable { action(*shared, *shared->exchange); });
}

}  // namespace

HttpResponder::HttpResponder(std::shared_ptr<Core> core, std::weak_ptr<Connection> connection,
                             std::shared_ptr<Exchange> exchange)
    : shared_(std::make_shared<Shared>(Shared{std::move(core), std::move(connection), std::move(exchange)})) {}

HttpResponder::~HttpResponder() {
  on_io_thread(shared_, [](const Shared& shared, Exchange& exchange) {
    if (exchange.complete || exchange.client_left) return;
    if (exchange.form == Exchange::Form::none) {
      exchange.form = Exchange::Form::whole;
      exchange.head = api::error_response(Error(500, "the request was dropped without an answer", "internal_error"));
      shared.finish(exchange);
    } else if (const auto connection = shared.connection.lock()) {
      connection->close();  // half an answer must not look like a whole one
    }
  });
}

void HttpResponder::respond(api::Response response) noexcept {
  on_io_thread(shared_, [response = std::move(response)](const Shared& shared, Exchange& exchange) mutable {
    if (exchange.form != Exchange::Form::none) return;
    exchange.form = Exchange::Form::whole;
    exchange.head = std::move(response);
    shared.finish(exchange);
  });
}

void HttpResponder::begin(api::Response head) noexcept {
  on_io_thread(shared_, [head = std::move(head)](const Shared& shared, Exchange& exchange) mutable {
    if (exchange.form != Exchange::Form::none) return;
    exchange.form = Exchange::Form::stream;
    exchange.head = std::move(head);
    shared.wake();
  });
}

void HttpResponder::write(std::string bytes) noexcept {
  on_io_thread(shared_, [bytes = std::move(bytes)](const Shared& shared, Exchange& exchange) {
    if (exchange.form != Exchange::Form::stream || exchange.complete || exchange.client_left) return;
    exchange.pending += bytes;
    exchange.unsent += bytes.size();
    if (exchange.unsent <= shared.core->options.backlog_limit) return shared.wake();
    if (const auto connection = shared.connection.lock()) connection->close();
  });
}

void HttpResponder::end() noexcept {
  on_io_thread(shared_, [](const Shared& shared, Exchange& exchange) { shared.finish(exchange); });
}

void HttpResponder::post(std::function<void()> task) noexcept {
  if (!shared_->core->stopped.load()) boost::asio::post(shared_->core->io, std::move(task));
}

void HttpResponder::on_disconnect(std::function<void()> callback) noexcept {
  on_io_thread(shared_, [callback = std::move(callback)](const Shared&, Exchange& exchange) mutable {
    if (exchange.complete) return;
    if (exchange.client_left) return callback();
    exchange.on_disconnect = std::move(callback);
  });
}

}  // namespace galley::http
