#include "api/openai_chat.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "api/answer.h"
#include "api/errors.h"
#include "api/fields.h"
#include "api/generation.h"
#include "api/json.h"
#include "api/logprobs.h"
#include "api/openai_messages.h"
#include "api/prompt_text.h"
#include "api/sampling.h"

namespace galley::api {
namespace {

constexpr std::string_view kChunk = "chat.completion.chunk";

constexpr std::array kInertChatFields = {
    InertField{"parallel_tool_calls"},  // tools are refused below, so there is nothing to run in parallel
    InertField{"tools", "[[]]"},
    InertField{"tool_choice", R"(["none","auto"])"},
    InertField{"functions", "[[]]"},
    InertField{"function_call", R"(["none","auto"])"},
    InertField{"reasoning_effort", "[]"},
    InertField{"reasoning", "[]"},
    InertField{"verbosity", "[]"},
    InertField{"modalities", R"([["text"]])"},
    InertField{"audio", "[]"},
    InertField{"prediction", "[]"},
    InertField{"web_search_options", "[]"},
    InertField{"add_generation_prompt", "[true]"},
    InertField{"continue_final_message", "[false]"},
};

struct ChatPlan {
  AnswerHead head;
  Streaming streaming;
  bool logprobs = false;
  std::shared_ptr<const text::Tokenizer> tokenizer;
};

/// The whole answer as one body.
class ChatBody final : public Generation {
 public:
  ChatBody(std::shared_ptr<Responder> responder, ChatPlan plan)
      : Generation(std::move(responder)), plan_(std::move(plan)) {}

 private:
  void on_event(std::size_t, serve::TokenEvent& event) override {
    if (event.error) return responder().respond(error_response(*event.error));
    text_ += event.text;
    std::move(event.tokens.begin(), event.tokens.end(), std::back_inserter(tokens_));
    if (event.finish) responder().respond(body(event));
  }

  Response body(const serve::TokenEvent& last) const {
    OutJson choice;
    choice["index"] = 0;
    choice["message"] = {{"role", "assistant"}, {"content", text_}, {"refusal", nullptr}};
    choice["logprobs"] = nullptr;
    if (plan_.logprobs) {
      choice["logprobs"] = {{"content", chat_logprobs(tokens_, *plan_.tokenizer)}, {"refusal", nullptr}};
    }
    choice["finish_reason"] = finish_word(*last.finish);
    OutJson json = head_json(plan_.head, "chat.completion");
    json["choices"] = OutJson::array({std::move(choice)});
    json["usage"] = usage_json(last.usage);
    Response response;
    response.body = to_text(json);
    return response;
  }

  ChatPlan plan_;
  std::string text_;
  std::vector<serve::TokenInfo> tokens_;
};

/// The answer as server-sent events. The stream begins with the first event, so that a request that fails before it
/// has said anything still gets its status.
class ChatStream final : public Generation {
 public:
  ChatStream(std::shared_ptr<Responder> responder, ChatPlan plan)
      : Generation(std::move(responder)), plan_(std::move(plan)) {
    // A chunk with text alone, by far the most common, is put together from three strings.
    OutJson head = head_json(plan_.head, kChunk);
    text_before_ = to_text(head);
    text_before_.back() = ',';
    text_before_ += R"("choices":[{"index":0,"delta":{"content":)";
    text_after_ = R"(},"logprobs":null,"finish_reason":null}])";
    text_after_ += plan_.streaming.include_usage ? R"(,"usage":null})" : "}";
  }

 private:
  void on_event(std::size_t, serve::TokenEvent& event) override {
    if (event.error && !begun_) return responder().respond(error_response(*event.error));
    std::string out;
    if (!begun_) {
      begun_ = true;
      responder().begin(sse_head());
      out += chunk({{"role", "assistant"}, {"content", ""}}, nullptr, nullptr);
    }
    if (event.error) {
      out += sse_error(*event.error);
    } else {
      if (!event.tokens.empty()) {
        OutJson logprobs{{"content", chat_logprobs(event.tokens, *plan_.tokenizer)}, {"refusal", nullptr}};
        out += chunk({{"content", event.text}}, std::move(logprobs), nullptr);
      } else if (!event.text.empty()) {
        out += sse_data(text_before_ + quote(event.text) + text_after_);
      }
      if (event.finish) out += ending(event);
    }
    if (!out.empty()) responder().write(std::move(out));
    if (event.error || event.finish) responder().end();
  }

  std::string ending(const serve::TokenEvent& last) const {
    std::string out = chunk(OutJson::object(), nullptr, finish_word(*last.finish));
    if (plan_.streaming.include_usage) {
      OutJson usage = head_json(plan_.head, kChunk);
      usage["choices"] = OutJson::array();
      usage["usage"] = usage_json(last.usage);
      out += sse_data(to_text(usage));
    }
    out += kSseDone;
    return out;
  }

  std::string chunk(OutJson delta, OutJson logprobs, OutJson finish) const {
    OutJson choice;
    choice["index"] = 0;
    choice["delta"] = std::move(delta);
    choice["logprobs"] = std::move(logprobs);
    choice["finish_reason"] = std::move(finish);
    OutJson json = head_json(plan_.head, kChunk);
    json["choices"] = OutJson::array({std::move(choice)});
    if (plan_.streaming.include_usage) json["usage"] = nullptr;
    return sse_data(to_text(json));
  }

  ChatPlan plan_;
  bool begun_ = false;
  std::string text_before_, text_after_;
};

std::vector<std::int32_t> render_prompt(const ServedModel& model, const Json& messages, const Json* template_kwargs) {
  if (!model.chat_template) {
    throw Error(400, "the model " + quote(model.id) + " has no chat template; use /v1/completions with a plain prompt",
                "no_chat_template");
  }
  const std::string text =
      model.chat_template->render(messages.dump(), {}, template_kwargs ? template_kwargs->dump() : std::string(), true);
  std::vector<std::int32_t> prompt = encode_prompt(text, model, "messages");
  if (prompt.empty())
    throw Error(400, "messages: the chat template made an empty prompt of them", "empty_prompt", "messages");
  return prompt;
}

void read_logprobs(Fields& fields, sample::Params& sampling) {
  sampling.logprobs = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, kMostTopLogprobs);
  if (top.value_or(0) > 0 && !sampling.logprobs) {
    throw Error(400, "top_logprobs: needs logprobs to be true", "invalid_value", "top_logprobs");
  }
  sampling.top_logprobs = static_cast<int>(top.value_or(0));
}

}  // namespace

void chat_completions(const Service& service, const Request& request, std::shared_ptr<Responder> responder) {
  const auto model = service.ready_model();
  const Json body = parse_body(request.body);
  Fields fields(body);

  ChatPlan plan;
  plan.tokenizer = model->tokenizer;
  plan.head = {random_id("chatcmpl-"), unix_now(), read_model(fields, service, *model),
               "galley-" + service.options().version};
  plan.streaming = read_streaming(fields);
  serve::GenerationRequest generation = read_generation(fields, service, *model);
  generation.id = plan.head.id;
  read_logprobs(fields, generation.sampling);
  plan.logprobs = generation.sampling.logprobs;
  const Json* template_kwargs = fields.find("chat_template_kwargs");
  if (template_kwargs) (void)Fields(*template_kwargs, "chat_template_kwargs");  // any object
  const Json messages = read_messages(fields.find("messages"));
  fields.inert(common_inert_fields());
  fields.inert(kInertChatFields);
  fields.finish();

  generation.prompt = render_prompt(*model, messages, template_kwargs);
  settle_max_tokens(generation, service, *model);
  std::vector<serve::GenerationRequest> rows;
  rows.push_back(std::move(generation));
  if (plan.streaming.stream) {
    std::make_shared<ChatStream>(std::move(responder), std::move(plan))->start(*model->engine, std::move(rows));
  } else {
    std::make_shared<ChatBody>(std::move(responder), std::move(plan))->start(*model->engine, std::move(rows));
  }
}

}  // namespace galley::api
