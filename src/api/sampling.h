// Fields that chat and completions share: how long, how random, how to answer.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "api/fields.h"
#include "api/service.h"
#include "serve/request.h"

namespace galley::api {

/// Reads max_tokens, max_completion_tokens (wins), temperature, top_k, top_p, min_p, seed, stop, ignore_eos into a
/// request; everything but the prompt and log-probabilities. max_tokens stays 0 when the request names none.
serve::GenerationRequest read_generation(Fields& fields, const Service& service, const ServedModel& model);

/// Settles max_tokens for a request that named none: the server's cap, or what the context leaves when that is less.
void settle_max_tokens(serve::GenerationRequest& request, const Service& service, const ServedModel& model);

/// stream and stream_options.
struct Streaming {
  bool stream = false;
  bool include_usage = false;
};
Streaming read_streaming(Fields& fields);

/// The id to echo: the request's, else the served one. Throws 404 model_not_found for another under strict_model.
std::string read_model(Fields& fields, const Service& service, const ServedModel& model);

/// Fields of either dialect that are accepted while they ask for nothing.
std::span<const InertField> common_inert_fields();

}  // namespace galley::api
