// Paths and methods to dialects.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "api/exchange.h"
#include "api/service.h"

namespace galley::api {

/// Serves, with or without the /v1 prefix:
///   POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{id}
/// and GET /health, GET /stats. HEAD answers wherever GET does.
class Router final : public Handler {
 public:
  explicit Router(std::shared_ptr<Service> service) : service_(std::move(service)) {}

  void handle(Request request, std::shared_ptr<Responder> responder) noexcept override;
  [[nodiscard]] std::string allowed_methods(std::string_view path) const override;

 private:
  std::shared_ptr<Service> service_;
};

}  // namespace galley::api
