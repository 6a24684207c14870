#include "api/router.h"

#include <exception>

#include "api/admin.h"
#include "api/errors.h"
#include "api/openai_chat.h"
#include "api/openai_completions.h"

namespace galley::api {
namespace {

enum class Route { none, chat, completions, models, model, health, stats };

constexpr std::string_view kModelsPrefix = "/models/";

/// Without /v1 and a trailing slash.
std::string_view plain_path(std::string_view path) {
  if (path.starts_with("/v1/")) path.remove_prefix(3);
  if (path.size() > 1 && path.ends_with('/')) path.remove_suffix(1);
  return path;
}

Route find_route(std::string_view path) {
  path = plain_path(path);
  if (path == "/chat/completions") return Route::chat;
  if (path == "/completions") return Route::completions;
  if (path == "/models") return Route::models;
  if (path.size() > kModelsPrefix.size() && path.starts_with(kModelsPrefix)) return Route::model;
  if (path == "/health") return Route::health;
  if (path == "/stats") return Route::stats;
  return Route::none;
}

bool is_post(Route route) { return route == Route::chat || route == Route::completions; }

Response answer_get(Route route, const Service& service, std::string_view path) {
  switch (route) {
    case Route::models:
      return list_models(service);
    case Route::model:
      return show_model(service, plain_path(path).substr(kModelsPrefix.size()));
    case Route::health:
      return health(service);
    default:
      return stats(service);
  }
}

void check_encoding(const Request& request) {
  const std::string_view encoding = request.header("content-encoding");
  if (!encoding.empty() && encoding != "identity") {
    throw Error(415, "Content-Encoding " + std::string(encoding) + " is not supported; send the body as it is",
                "unsupported_encoding");
  }
}

}  // namespace

std::string Router::allowed_methods(std::string_view path) const {
  const Route route = find_route(path);
  if (route == Route::none) return {};
  return is_post(route) ? "POST" : "GET, HEAD";
}

void Router::handle(Request request, std::shared_ptr<Responder> responder) noexcept {
  try {
    const Route route = find_route(request.path);
    if (route == Route::none) {
      throw Error(404, "there is nothing at " + request.path, "not_found");
    }
    const bool get = request.method == "GET" || request.method == "HEAD";
    if (is_post(route) ? request.method != "POST" : !get) {
      Response refusal =
          error_response(Error(405, request.path + " does not answer to " + request.method, "method_not_allowed"));
      refusal.headers.push_back({"Allow", allowed_methods(request.path)});
      return responder->respond(std::move(refusal));
    }
    check_encoding(request);
    if (route == Route::chat) return chat_completions(*service_, request, responder);
    if (route == Route::completions) return completions(*service_, request, responder);
    responder->respond(answer_get(route, *service_, request.path));
  } catch (const Error& error) {
    responder->respond(error_response(error));
  } catch (const std::exception& error) {
    responder->respond(error_response(Error(500, std::string("internal error: ") + error.what(), "internal_error")));
  }
}

}  // namespace galley::api
