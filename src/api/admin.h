// What the server tells about itself: models, health, statistics.
#pragma once
#include <string_view>

#include "api/exchange.h"
#include "api/service.h"

namespace galley::api {

/// GET /v1/models; 503 while there is no working model.
Response list_models(const Service& service);
/// GET /v1/models/{id}; `id` still percent-encoded. Throws 404 model_not_found.
Response show_model(const Service& service, std::string_view id);
/// GET /health: 200 {"status":"ok"}, or 503 while loading, draining, or after the engine died.
Response health(const Service& service);
/// GET /stats: batch, kv, lanes, throughput, requests, server.
Response stats(const Service& service);

}  // namespace galley::api
