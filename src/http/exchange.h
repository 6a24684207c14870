// The HTTP side of a Responder. Private to the HTTP room.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "api/exchange.h"

namespace galley::http {

struct Core;
class Connection;

/// An answer in the making; touched on the io thread only. The connection takes from it what the responder puts in.
struct Exchange {
  enum class Form { none, whole, stream };
  Form form = Form::none;
  api::Response head;      ///< with the body when `form` is whole
  std::string pending;     ///< bytes of a stream not yet handed to the socket
  std::size_t unsent = 0;  ///< those, and the ones the socket has not taken yet
  bool complete = false;   ///< nothing more to come
  bool client_left = false;
  std::function<void()> on_disconnect;

  /// The client is gone: says so once, unless the answer is complete.
  void leave();
};

/// What the dialects hold. Marshals every call onto the io thread.
class HttpResponder final : public api::Responder {
 public:
  HttpResponder(std::shared_ptr<Core> core, std::weak_ptr<Connection> connection, std::shared_ptr<Exchange> exchange);
  ~HttpResponder() override;

  void respond(api::Response response) noexcept override;
  void begin(api::Response head) noexcept override;
  void write(std::string bytes) noexcept override;
  void end() noexcept override;
  void post(std::function<void()> task) noexcept override;
  void on_disconnect(std::function<void()> callback) noexcept override;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace galley::http
