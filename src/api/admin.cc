#include "api/admin.h"

#include <chrono>
#include <string>

#include "api/errors.h"
#include "api/json.h"
#include "ops/error.h"

namespace galley::api {
namespace {

Response json_response(const OutJson& json, int status = 200) {
  Response response;
  response.status = status;
  response.body = to_text(json);
  return response;
}

std::int64_t unix_seconds(std::chrono::system_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch()).count();
}

OutJson model_json(const Service& service, const ServedModel& model) {
  OutJson json;
  json["id"] = model.id;
  json["object"] = "model";
  json["created"] = unix_seconds(service.started_at());
  json["owned_by"] = "galley";
  json["max_model_len"] = model.context;
  return json;
}

/// A working model: also served while draining, as what runs is still answered.
std::shared_ptr<const ServedModel> working_model(const Service& service) {
  auto model = service.model();
  if (!model) throw Error(503, "the model is still loading; try again in a moment", "loading");
  if (!model->engine->healthy()) throw Error(503, "the engine has failed; the server must be restarted", "engine_dead");
  return model;
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string percent_decode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hex_value(text[i + 1]) >= 0 && hex_value(text[i + 2]) >= 0) {
      out += static_cast<char>(hex_value(text[i + 1]) * 16 + hex_value(text[i + 2]));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

OutJson kv_json(const models::KvUsage& kv) {
  OutJson json;
  json["budget_bytes"] = kv.budget_bytes;
  json["used_bytes"] = kv.used_bytes;
  json["unused_bytes"] = kv.unused_bytes;
  json["cached_bytes"] = kv.cached_bytes;
  json["reserved_bytes"] = kv.reserved_bytes;
  json["window_used_bytes"] = kv.window_used_bytes;
  json["window_cached_bytes"] = kv.window_cached_bytes;
  json["blocks_total"] = kv.blocks_total;
  json["blocks_free"] = kv.blocks_free;
  json["blocks_cached"] = kv.blocks_cached;
  json["block_tokens"] = kv.block_tokens;
  return json;
}

OutJson engine_json(const serve::Stats& stats) {
  OutJson json;
  json["batch"] = {{"configured", stats.batch.configured},
                   {"active_rows", stats.batch.active_rows},
                   {"prefilling_rows", stats.batch.prefilling_rows},
                   {"pending_rows", stats.batch.pending_rows},
                   {"peak_rows", stats.batch.peak_rows}};
  json["kv"] = kv_json(stats.kv);
  OutJson reasons = OutJson::object();
  for (const auto& [reason, count] : stats.lanes.serial_reasons) reasons[reason] = count;
  json["lanes"] = {{"serial", {{"requests", stats.lanes.serial}, {"reasons", std::move(reasons)}}},
                   {"batched", {{"requests", stats.lanes.batched}}}};
  json["throughput"] = {{"decode_tok_s", stats.throughput.decode_tok_s},
                        {"prefill_tok_s", stats.throughput.prefill_tok_s},
                        {"prompt_tokens", stats.throughput.prompt_tokens},
                        {"completion_tokens", stats.throughput.completion_tokens},
                        {"steps", stats.throughput.steps}};
  json["requests"] = {{"accepted", stats.requests.accepted},   {"finished", stats.requests.finished},
                      {"cancelled", stats.requests.cancelled}, {"failed", stats.requests.failed},
                      {"refused", stats.requests.refused},     {"preempted", stats.requests.preempted}};
  return json;
}

std::string status_word(const Service& service) {
  const auto model = service.model();
  if (!model) return "loading";
  if (!model->engine->healthy()) return "dead";
  return service.draining() ? "draining" : "ok";
}

}  // namespace

Response list_models(const Service& service) {
  OutJson json;
  json["object"] = "list";
  json["data"] = OutJson::array();
  json["data"].push_back(model_json(service, *working_model(service)));
  return json_response(json);
}

Response show_model(const Service& service, std::string_view id) {
  const auto model = working_model(service);
  const std::string asked = percent_decode(id);
  if (asked != model->id) {
    throw Error(404, "the model " + quote(asked) + " does not exist here; this server has " + quote(model->id),
                "model_not_found", "model");
  }
  return json_response(model_json(service, *model));
}

Response health(const Service& service) {
  const std::string word = status_word(service);
  if (word == "ok") return json_response({{"status", word}});
  Response response = error_response(Error(503, "the server is not ready: " + word, word));
  OutJson json = error_json(Error(503, "the server is not ready: " + word, word));
  json["status"] = word;
  response.body = to_text(json);
  return response;
}

Response stats(const Service& service) {
  const auto model = service.model();
  serve::Stats seen;
  seen.batch.configured = service.options().rows;
  if (model) seen = model->engine->stats();
  OutJson json = engine_json(seen);
  json["server"] = {{"model", model ? OutJson(model->id) : OutJson(nullptr)},
                    {"status", status_word(service)},
                    {"started_at", unix_seconds(service.started_at())},
                    {"uptime_s", unix_seconds(std::chrono::system_clock::now()) - unix_seconds(service.started_at())},
                    {"version", service.options().version}};
  return json_response(json);
}

}  // namespace galley::api
