// POST /v1/completions (OpenAI).
#pragma once
#include <memory>

#include "api/exchange.h"
#include "api/service.h"

namespace galley::api {

/// Throws Error when the request can't be taken; otherwise answers through `responder`. Several prompts make several
/// choices; streamed, their chunks interleave, told apart by `index`.
void completions(const Service& service, const Request& request, std::shared_ptr<Responder> responder);

}  // namespace galley::api
