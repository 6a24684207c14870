// POST /v1/chat/completions (OpenAI).
#pragma once
#include <memory>

#include "api/exchange.h"
#include "api/service.h"

namespace galley::api {

/// Throws Error when the request can't be taken; otherwise answers through `responder`.
void chat_completions(const Service& service, const Request& request, std::shared_ptr<Responder> responder);

}  // namespace galley::api
