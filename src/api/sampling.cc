#include "api/sampling.h"

#include <algorithm>
#include <array>
#include <limits>

#include "api/json.h"

namespace galley::api {
namespace {

constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
constexpr std::size_t kMostStops = 16;
constexpr double kMostTemperature = 2.0;  // OpenAI's bound

// Accepted by OpenAI, vLLM or llama-server; here without effect or without support.
constexpr std::array kCommonInert = {
    // Labels and advice.
    InertField{"user"},
    InertField{"metadata"},
    InertField{"store"},
    InertField{"service_tier"},
    InertField{"prompt_cache_key"},
    InertField{"prompt_cache_retention"},
    InertField{"safety_identifier"},
    InertField{"cache_prompt"},
    InertField{"request_id"},
    // Not supported: only values that change nothing.
    InertField{"n", "[1]"},
    InertField{"best_of", "[1]"},
    InertField{"echo", "[false]"},
    InertField{"presence_penalty", "[0]"},
    InertField{"frequency_penalty", "[0]"},
    InertField{"repetition_penalty", "[1]"},
    InertField{"repeat_penalty", "[1]"},
    InertField{"length_penalty", "[1]"},
    InertField{"logit_bias", "[{}]"},
    InertField{"min_tokens", "[0]"},
    InertField{"stop_token_ids", "[[]]"},
    InertField{"include_stop_str_in_output", "[false]"},
    InertField{"skip_special_tokens", "[true]"},
    InertField{"use_beam_search", "[false]"},
    InertField{"typical_p", "[1]"},
    InertField{"xtc_probability", "[0]"},
    InertField{"dry_multiplier", "[0]"},
    InertField{"mirostat", "[0]"},
    InertField{"dynatemp_range", "[0]"},
    InertField{"priority", "[0]"},
    InertField{"prompt_logprobs", "[]"},
    InertField{"response_format", R"([{"type":"text"}])"},
    InertField{"grammar", R"([""])"},
    InertField{"json_schema", "[]"},
};

template <typename T>
T first_of(const std::optional<T>& a, const std::optional<T>& b, T built_in) {
  return a ? *a : b.value_or(built_in);
}

/// Off is 0; vLLM writes -1.
int read_top_k(Fields& fields, const SamplingDefaults& flags, const SamplingDefaults& config) {
  const auto asked = fields.integer("top_k", -1, kMostTokens);
  const int top_k = asked ? static_cast<int>(*asked) : first_of(flags.top_k, config.top_k, 0);
  return std::max(top_k, 0);
}

std::optional<std::uint64_t> read_seed(Fields& fields) {
  const Json* value = fields.find("seed");
  if (value && value->is_number_unsigned()) return value->get<std::uint64_t>();
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
  if (value && value->is_number_float() && std::abs(value->get<double>()) >= 9.2e18) {
    throw Error(400,
                "seed: " + excerpt(*value) + " is out of range; allowed is " + std::to_string(kLeast) + " to " +
                    std::to_string(std::numeric_limits<std::uint64_t>::max()),
                "invalid_value", "seed");
  }
  const auto seed = fields.integer("seed", kLeast, std::numeric_limits<std::int64_t>::max());
  if (!seed || *seed == -1) return std::nullopt;  // -1: a fresh one, as in vLLM and llama-server
  return static_cast<std::uint64_t>(*seed);
}

}  // namespace

serve::GenerationRequest read_generation(Fields& fields, const Service& service, const ServedModel& model) {
  serve::GenerationRequest request;
  const auto old_name = fields.integer("max_tokens", 1, kMostTokens);
  const auto new_name = fields.integer("max_completion_tokens", 1, kMostTokens);
  request.max_tokens = static_cast<int>(new_name ? *new_name : old_name.value_or(0));

  const SamplingDefaults& flags = service.options().sampling;
  const SamplingDefaults& config = model.generation_config;
  sample::Params& sampling = request.sampling;
  const auto temperature = fields.number("temperature", 0, kMostTemperature);
  const auto top_p = fields.number("top_p", 0, 1);
  const auto min_p = fields.number("min_p", 0, 1);
  sampling.temperature =
      static_cast<float>(temperature ? *temperature : first_of(flags.temperature, config.temperature, 1.0));
  sampling.top_k = read_top_k(fields, flags, config);
  sampling.top_p = static_cast<float>(top_p ? *top_p : first_of(flags.top_p, config.top_p, 1.0));
  sampling.min_p = static_cast<float>(min_p ? *min_p : first_of(flags.min_p, config.min_p, 0.0));
  if (sampling.top_p <= 0.0F) {  // the smallest set that holds any mass at all is the most likely token
    sampling.top_k = 1;
    sampling.top_p = 1.0F;
  }
  sampling.seed = read_seed(fields);
  request.stop = fields.strings("stop", kMostStops);
  request.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  return request;
}

void settle_max_tokens(serve::GenerationRequest& request, const Service& service, const ServedModel& model) {
  if (request.max_tokens > 0) return;
  // A prompt that fills the context is the engine's to refuse, with both counts.
  const int rest = std::max(model.context - static_cast<int>(request.prompt.size()), 1);
  request.max_tokens = std::min(service.options().default_max_tokens, rest);
}

Streaming read_streaming(Fields& fields) {
  static constexpr std::array kInertOptions = {InertField{"include_obfuscation"},
                                               InertField{"continuous_usage_stats", "[false]"}};
  Streaming streaming;
  streaming.stream = fields.boolean("stream").value_or(false);
  if (const Json* options = fields.find("stream_options")) {
    Fields inner(*options, fields.path_of("stream_options"));
    streaming.include_usage = inner.boolean("include_usage").value_or(false);
    inner.inert(kInertOptions);
    inner.finish();
  }
  return streaming;
}

std::string read_model(Fields& fields, const Service& service, const ServedModel& model) {
  const auto asked = fields.string("model");
  if (!asked || asked->empty()) return model.id;
  if (service.options().strict_model && *asked != model.id) {
    throw Error(404, "the model " + quote(*asked) + " does not exist here; this server has " + quote(model.id),
                "model_not_found", "model");
  }
  return *asked;
}

std::span<const InertField> common_inert_fields() { return kCommonInert; }

}  // namespace galley::api
