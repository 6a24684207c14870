// A generation request and what it hears back. Knows nothing of HTTP, JSON or MLX.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/error.h"
#include "sample/sampler.h"

namespace galley::serve {

struct GenerationRequest {
  std::string id;                    ///< for logs
  std::vector<std::int32_t> prompt;  ///< not empty
  int max_tokens = 0;                ///< > 0
  sample::Params sampling;
  std::vector<std::string> stop;  ///< on decoded text; the stop string is not part of the answer
  bool ignore_eos = false;        ///< generate up to max_tokens whatever the model says
};

enum class FinishReason {
  stop,       ///< an end-of-generation token or a stop string
  length,     ///< max_tokens reached
  cancelled,  ///< the client went away
};

/// One generated token that contributed to the answer.
struct TokenInfo {
  sample::Choice choice;
  std::string bytes;  ///< raw bytes of the token; only with Params::logprobs
};

struct Usage {
  int prompt_tokens = 0;
  int completion_tokens = 0;
  int cached_tokens = 0;
};

/// One thing that happened to a row. Deltas concatenate to the whole text; a finishing event may carry text too.
struct TokenEvent {
  std::string text;
  std::vector<TokenInfo> tokens;       ///< tokens taken since the last event; empty unless logprobs were asked for
  std::optional<FinishReason> finish;  ///< set on the last event
  std::optional<Error> error;          ///< set on the last event instead, when the row failed
  Usage usage;                         ///< up to date on every event
};

/// Where a row's events go. push() is called on the engine thread and must neither block nor throw; a slow reader is
/// the sink's own affair. After an event with `finish` or `error` nothing follows.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void push(TokenEvent event) noexcept = 0;
};

}  // namespace galley::serve
