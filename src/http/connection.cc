#include "http/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http.hpp>
#include <ctime>
#include <utility>

#include "api/errors.h"
#include "http/cors.h"

namespace galley::http {
namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bhttp = boost::beast::http;
using boost::system::error_code;

namespace {

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr std::size_t kReadSize = 16'384;
constexpr std::size_t kPipelineLimit = 65'536;  ///< bytes of next requests read while one is being answered
constexpr std::chrono::milliseconds kLingerTimeout{2'000};

/// "Mon, 30 Nov 2026 06:33:25 GMT"
std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return {text.data(), size};
}

/// The path of "/a/b?query" or "http://host/a/b?query".
std::string path_of(std::string_view target) {
  if (const auto scheme = target.find("://"); !target.starts_with('/') && scheme != std::string_view::npos) {
    target.remove_prefix(scheme + 3);
    const auto slash = target.find('/');
    target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
  }
  return std::string(target.substr(0, target.find_first_of("?#")));
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return out;
}

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

struct Connection::Incoming {
  api::Request request;
  unsigned version = 11;
  bool keep_alive = false;

  [[nodiscard]] bool head_only() const { return request.method == "HEAD"; }
};

Connection::Connection(std::shared_ptr<Core> core, asio::ip::tcp::socket socket)
    : core_(std::move(core)), socket_(std::move(socket)), event_(core_->io) {
  core_->connections.insert(this);
  core_->connection_count = core_->connections.size();
  error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  if (const auto peer = socket_.remote_endpoint(ignored); !ignored) client_ = peer.address().to_string();
  if (core_->options.send_buffer > 0) {
    socket_.set_option(asio::socket_base::send_buffer_size(core_->options.send_buffer), ignored);
  }
}

Connection::~Connection() {
  core_->connections.erase(this);
  core_->connection_count = core_->connections.size();
  set_busy(false);
}

asio::awaitable<void> Connection::run() {
  const auto self = shared_from_this();
  // GCC 12 does not short-circuit a co_await behind && in the condition of a loop; hence the plain steps.
  while (!core_->draining) {
    const bool begun = co_await wait_for_request();
    if (!begun) break;
    Incoming incoming;
    const bool whole = co_await read_request(incoming);
    if (!whole) break;
    clear_deadline();
    const auto arrived = Clock::now();
    hand_over(incoming);
    watch();
    const bool again = co_await write_answer(incoming);
    report(incoming, arrived);
    exchange_.reset();
    if (!again) break;
    set_busy(false);
  }
  if (!ended_) co_await linger();
  close();
}

asio::awaitable<bool> Connection::wait_for_request() {
  set_deadline(core_->options.idle_timeout);
  while (buffer_.size() == 0 && !ended_) {
    watch();
    co_await wait_for_event();
  }
  if (ended_) co_return false;
  set_busy(true);
  set_deadline(core_->options.request_timeout);
  if (watching_) {  // bytes read while the last answer was made, and a read for more still under way
    socket_.cancel();
    while (watching_) co_await wait_for_event();
  }
  co_return !ended_;
}

asio::awaitable<bool> Connection::read_request(Incoming& incoming) {
  bhttp::request_parser<bhttp::string_body> parser;
  parser.header_limit(static_cast<std::uint32_t>(core_->options.header_limit));
  parser.body_limit(core_->options.body_limit);
  auto [error, size] = co_await bhttp::async_read_header(socket_, buffer_, parser, kAwait);
  if (!error) {
    if (!parser.is_done() && beast::iequals(parser.get()[bhttp::field::expect], "100-continue")) {
      static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      (void)co_await asio::async_write(socket_, asio::buffer(kContinue), kAwait);
    }
    std::tie(error, size) = co_await bhttp::async_read(socket_, buffer_, parser, kAwait);
  }
  if (error == bhttp::error::body_limit) {
    co_await refuse(Error(413,
                          "the request body is larger than " + std::to_string(core_->options.body_limit) + " bytes",
                          "body_too_large"));
    co_return false;
  }
  if (error == bhttp::error::header_limit || error == bhttp::error::buffer_overflow) {
    co_await refuse(
        Error(431, "the request's headers are larger than " + std::to_string(core_->options.header_limit) + " bytes",
              "headers_too_large"));
    co_return false;
  }
  if (error) {
    const bool malformed = error.category() == bhttp::make_error_code(bhttp::error::bad_method).category() &&
                           error != bhttp::error::end_of_stream && error != bhttp::error::partial_message;
    if (malformed) co_await refuse(Error(400, "malformed HTTP request: " + error.message(), "malformed_http"));
    if (!malformed) ended_ = true;
    co_return false;
  }
  incoming.keep_alive = parser.keep_alive();
  incoming.version = parser.get().version();
  api::Request& request = incoming.request;
  request.method = std::string(view(parser.get().method_string()));
  request.path = path_of(view(parser.get().target()));
  for (const auto& field : parser.get()) {
    request.headers.push_back({lower(view(field.name_string())), std::string(view(field.value()))});
  }
  request.body = std::move(parser.get().body());
  co_return true;
}

void Connection::report(const Incoming& incoming, Clock::time_point arrived) const {
  if (!core_->options.on_answer) return;
  const auto printable = [](const std::string& text) {
    std::string out = text.substr(0, 200);
    std::ranges::replace_if(
        out, [](char c) { return c <= ' ' || c > '~'; }, '?');
    return out;
  };
  Answered answered;
  answered.client = client_;
  answered.method = printable(incoming.request.method);
  answered.path = printable(incoming.request.path);
  answered.status = exchange_->head.status;
  answered.client_left = exchange_->client_left;
  answered.seconds = std::chrono::duration<double>(Clock::now() - arrived).count();
  core_->options.on_answer(answered);
}

/// An answer to something that is no proper request; the connection ends with it.
asio::awaitable<void> Connection::refuse(const Error& error) {
  const api::Response response = api::error_response(error);
  const Incoming incoming;
  const auto arrived = Clock::now();
  co_await write_whole(incoming, response);
  Answered answered;
  answered.client = client_;
  answered.method = answered.path = "-";
  answered.status = response.status;
  answered.seconds = std::chrono::duration<double>(Clock::now() - arrived).count();
  if (core_->options.on_answer) core_->options.on_answer(answered);
}

void Connection::hand_over(Incoming& incoming) {
  exchange_ = std::make_shared<Exchange>();
  auto responder = std::make_shared<HttpResponder>(core_, weak_from_this(), exchange_);
  api::Request& request = incoming.request;
  if (request.method == "OPTIONS") {
    api::Response response;
    std::string methods = request.path == "*" ? "GET, HEAD, POST" : core_->handler.allowed_methods(request.path);
    if (methods.empty()) {
      response = api::error_response(Error(404, "there is nothing at " + request.path, "not_found"));
    } else {
      response.status = 204;
      methods += ", OPTIONS";
      response.headers.push_back({"Allow", methods});
      if (!request.header("access-control-request-method").empty()) {
        response.headers.push_back({"Access-Control-Allow-Methods", methods});
        response.headers.push_back({"Access-Control-Max-Age", "86400"});
        if (const auto names = request.header("access-control-request-headers"); !names.empty()) {
          response.headers.push_back({"Access-Control-Allow-Headers", std::string(names)});
        }
      }
    }
    return responder->respond(std::move(response));
  }
  // The headers stay here too: the answer depends on them.
  api::Request copy{request.method, request.path, request.headers, std::move(request.body)};
  if (copy.body.empty()) return core_->handler.handle(std::move(copy), std::move(responder));
  asio::post(core_->workers, [core = core_, copy = std::move(copy), responder = std::move(responder)]() mutable {
    core->handler.handle(std::move(copy), std::move(responder));
  });
}

asio::awaitable<bool> Connection::write_answer(const Incoming& incoming) {
  const auto exchange = exchange_;
  while (exchange->form == Exchange::Form::none && !exchange->client_left) co_await wait_for_event();
  if (exchange->client_left) co_return false;
  if (exchange->form == Exchange::Form::stream) co_return co_await write_stream(incoming);
  co_return co_await write_whole(incoming, exchange->head);
}

namespace {

template <typename Message>
void set_head(Message& message, const api::Response& response, const ServerOptions& options, std::string_view origin) {
  message.result(static_cast<unsigned>(response.status));
  message.set(bhttp::field::server, "galley");
  message.set(bhttp::field::date, http_date());
  if (response.status != 204) message.set(bhttp::field::content_type, response.content_type);
  for (const api::Header& header : response.headers) message.set(header.name, header.value);
  if (!origin.empty()) {
    message.set(bhttp::field::vary, "Origin");
    if (origin_allowed(options.allowed_origins, origin)) {
      message.set(bhttp::field::access_control_allow_origin, beast::string_view(origin.data(), origin.size()));
    }
  }
}

}  // namespace

asio::awaitable<bool> Connection::write_whole(const Incoming& incoming, const api::Response& response) {
  bhttp::response<bhttp::empty_body> head;
  head.version(incoming.version);
  set_head(head, response, core_->options, incoming.request.header("origin"));
  if (response.status != 204) head.content_length(response.body.size());
  const bool keep_alive = incoming.keep_alive && !core_->draining && !ended_;
  head.keep_alive(keep_alive);

  bhttp::response_serializer<bhttp::empty_body> serializer(head);
  set_deadline(core_->options.write_timeout);
  auto [error, size] = co_await bhttp::async_write_header(socket_, serializer, kAwait);
  if (!error && !incoming.head_only() && !response.body.empty()) {
    std::tie(error, size) = co_await asio::async_write(socket_, asio::buffer(response.body), kAwait);
  }
  clear_deadline();
  if (error) ended_ = true;
  co_return keep_alive && !error;
}

asio::awaitable<bool> Connection::write_stream(const Incoming& incoming) {
  const auto exchange = exchange_;
  const bool chunked = incoming.version >= 11;
  bhttp::response<bhttp::empty_body> head;
  head.version(incoming.version);
  set_head(head, exchange->head, core_->options, incoming.request.header("origin"));
  bool keep_alive = chunked && incoming.keep_alive && !core_->draining;
  head.chunked(chunked);
  head.keep_alive(keep_alive);
  bhttp::response_serializer<bhttp::empty_body> serializer(head);
  set_deadline(core_->options.write_timeout);
  auto [error, size] = co_await bhttp::async_write_header(socket_, serializer, kAwait);
  clear_deadline();

  std::string bytes;
  while (!error && !exchange->client_left) {
    if (exchange->pending.empty()) {
      if (exchange->complete) break;
      co_await wait_for_event();
      continue;
    }
    bytes.clear();
    bytes.swap(exchange->pending);
    set_deadline(core_->options.write_timeout);
    if (incoming.head_only()) {
      // Nothing of the body goes out.
    } else if (chunked) {
      std::tie(error, size) = co_await asio::async_write(socket_, bhttp::make_chunk(asio::buffer(bytes)), kAwait);
    } else {
      std::tie(error, size) = co_await asio::async_write(socket_, asio::buffer(bytes), kAwait);
    }
    clear_deadline();
    exchange->unsent -= bytes.size();
  }
  if (!error && chunked && !exchange->client_left && !incoming.head_only()) {
    set_deadline(core_->options.write_timeout);
    std::tie(error, size) = co_await asio::async_write(socket_, bhttp::make_chunk_last(), kAwait);
    clear_deadline();
  }
  if (error) client_left();
  co_return keep_alive && !error && !ended_ && !core_->draining;
}

/// Closing a socket with unread bytes resets it, and the client may lose the answer; so the client closes first.
asio::awaitable<void> Connection::linger() {
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  set_busy(false);
  set_deadline(kLingerTimeout);
  while (!ended_) {
    if (!watching_) buffer_.clear();
    watch();
    co_await wait_for_event();
  }
}

asio::awaitable<void> Connection::wait_for_event() {
  event_.expires_at(Clock::time_point::max());
  (void)co_await event_.async_wait(kAwait);
}

void Connection::watch() {
  if (watching_ || ended_ || buffer_.size() >= kPipelineLimit) return;
  watching_ = true;
  socket_.async_read_some(buffer_.prepare(kReadSize),
                          [self = shared_from_this()](const error_code& error, std::size_t size) {
                            self->watching_ = false;
                            self->buffer_.commit(size);
                            if (error && error != asio::error::operation_aborted) {
                              self->client_left();
                            } else if (!error && self->exchange_) {
                              self->watch();
                            }
                            self->wake();
                          });
}

void Connection::client_left() {
  ended_ = true;
  // A client may close its side and still read an answer that is already complete.
  if (exchange_ && !exchange_->complete) close();
}

void Connection::close() {
  ended_ = true;
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
  if (exchange_) exchange_->leave();
  wake();
}

void Connection::close_when_idle() {
  if (!busy_) close();
}

void Connection::check_deadline(Clock::time_point now) {
  if (now >= deadline_) close();
}

void Connection::set_busy(bool busy) {
  if (busy == busy_) return;
  busy_ = busy;
  core_->add_busy(busy ? 1 : -1);
}

}  // namespace galley::http
