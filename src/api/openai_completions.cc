#include "api/openai_completions.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "api/answer.h"
#include "api/errors.h"
#include "api/fields.h"
#include "api/generation.h"
#include "api/json.h"
#include "api/logprobs.h"
#include "api/prompt_text.h"
#include "api/sampling.h"

namespace galley::api {
namespace {

constexpr std::size_t kMostPrompts = 128;
constexpr std::string_view kObject = "text_completion";

constexpr std::array kInertCompletionFields = {InertField{"suffix", R"([""])"}};

struct CompletionPlan {
  AnswerHead head;
  Streaming streaming;
  bool logprobs = false;
  std::size_t choices = 1;
  std::shared_ptr<const text::Tokenizer> tokenizer;
};

void add(serve::Usage& sum, const serve::Usage& usage) {
  sum.prompt_tokens += usage.prompt_tokens;
  sum.completion_tokens += usage.completion_tokens;
  sum.cached_tokens += usage.cached_tokens;
}

/// All choices in one body.
class CompletionBody final : public Generation {
 public:
  CompletionBody(std::shared_ptr<Responder> responder, CompletionPlan plan)
      : Generation(std::move(responder)), plan_(std::move(plan)), choices_(plan_.choices) {}

 private:
  struct Choice {
    std::string text;
    std::vector<serve::TokenInfo> tokens;
    serve::FinishReason finish = serve::FinishReason::stop;
  };

  void on_event(std::size_t index, serve::TokenEvent& event) override {
    if (event.error) {
      responder().respond(error_response(*event.error));
      return abandon();
    }
    Choice& choice = choices_[index];
    choice.text += event.text;
    std::move(event.tokens.begin(), event.tokens.end(), std::back_inserter(choice.tokens));
    if (!event.finish) return;
    choice.finish = *event.finish;
    add(usage_, event.usage);
    if (++finished_ == choices_.size()) responder().respond(body());
  }

  Response body() const {
    OutJson all = OutJson::array();
    for (std::size_t i = 0; i < choices_.size(); ++i) {
      OutJson choice;
      choice["index"] = i;
      choice["text"] = choices_[i].text;
      choice["logprobs"] = nullptr;
      if (plan_.logprobs) {
        std::size_t offset = 0;
        choice["logprobs"] = completion_logprobs(choices_[i].tokens, *plan_.tokenizer, offset);
      }
      choice["finish_reason"] = finish_word(choices_[i].finish);
      all.push_back(std::move(choice));
    }
    OutJson json = head_json(plan_.head, kObject);
    json["choices"] = std::move(all);
    json["usage"] = usage_json(usage_);
    Response response;
    response.body = to_text(json);
    return response;
  }

  CompletionPlan plan_;
  std::vector<Choice> choices_;
  std::size_t finished_ = 0;
  serve::Usage usage_;
};

/// Server-sent events; begun by the first event of any choice.
class CompletionStream final : public Generation {
 public:
  CompletionStream(std::shared_ptr<Responder> responder, CompletionPlan plan)
      : Generation(std::move(responder)), plan_(std::move(plan)), offsets_(plan_.choices) {
    head_ = to_text(head_json(plan_.head, kObject));
    head_.back() = ',';
  }

 private:
  void on_event(std::size_t index, serve::TokenEvent& event) override {
    if (event.error && !begun_) {
      responder().respond(error_response(*event.error));
      return abandon();
    }
    if (!begun_) responder().begin(sse_head());
    begun_ = true;
    if (event.error) {
      responder().write(sse_error(*event.error));
      responder().end();
      return abandon();
    }
    std::string out;
    if (!event.text.empty() || !event.tokens.empty() || event.finish) out += chunk(index, event);
    if (event.finish) {
      add(usage_, event.usage);
      if (++finished_ == plan_.choices) {
        if (plan_.streaming.include_usage) {
          OutJson usage = head_json(plan_.head, kObject);
          usage["choices"] = OutJson::array();
          usage["usage"] = usage_json(usage_);
          out += sse_data(to_text(usage));
        }
        out += kSseDone;
      }
    }
    if (!out.empty()) responder().write(std::move(out));
    if (finished_ == plan_.choices) responder().end();
  }

  std::string chunk(std::size_t index, const serve::TokenEvent& event) {
    std::string json = head_;
    json += R"("choices":[{"index":)" + std::to_string(index) + R"(,"text":)" + quote(event.text) + R"(,"logprobs":)";
    json +=
        event.tokens.empty() ? "null" : to_text(completion_logprobs(event.tokens, *plan_.tokenizer, offsets_[index]));
    json += R"(,"finish_reason":)";
    json += event.finish ? quote(finish_word(*event.finish)) : "null";
    json += plan_.streaming.include_usage ? R"(}],"usage":null})" : "}]}";
    return sse_data(json);
  }

  CompletionPlan plan_;
  std::string head_;  ///< the part all chunks begin with
  std::vector<std::size_t> offsets_;
  bool begun_ = false;
  std::size_t finished_ = 0;
  serve::Usage usage_;
};

using Prompt = std::vector<std::int32_t>;

Prompt encode_text(const Json& text, const ServedModel& model, const std::string& path) {
  Prompt prompt = encode_prompt(text.get_ref<const std::string&>(), model, path);
  if (model.add_bos && model.bos_id >= 0 && (prompt.empty() || prompt.front() != model.bos_id)) {
    prompt.insert(prompt.begin(), model.bos_id);
  }
  if (prompt.empty()) throw Error(400, path + ": the prompt is empty", "empty_prompt", path);
  return prompt;
}

Prompt read_tokens(const Json& ids, const ServedModel& model, const std::string& path) {
  Prompt prompt;
  prompt.reserve(ids.size());
  const int vocabulary = model.tokenizer->vocab_size();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Json& id = ids[i];
    const std::string here = path + "[" + std::to_string(i) + "]";
    if (!id.is_number_integer()) {
      throw Error(400, here + ": expected a token id, found " + type_in_words(id) + ": " + excerpt(id), "invalid_type",
                  here);
    }
    if ((!id.is_number_unsigned() && id.get<std::int64_t>() < 0) ||
        id.get<std::uint64_t>() >= static_cast<std::uint64_t>(vocabulary)) {
      throw Error(400, here + ": " + excerpt(id) + " is no token id; allowed is 0 to " + std::to_string(vocabulary - 1),
                  "invalid_value", here);
    }
    prompt.push_back(id.get<std::int32_t>());
  }
  if (prompt.empty()) throw Error(400, path + ": the prompt is empty", "empty_prompt", path);
  return prompt;
}

/// A string, strings, token ids, or arrays of token ids.
std::vector<Prompt> read_prompts(const Json* value, const ServedModel& model) {
  const std::string path = "prompt";
  if (!value) throw Error(400, "prompt: required", "missing_field", path);
  if (value->is_string()) return {encode_text(*value, model, path)};
  if (!value->is_array()) {
    throw Error(400,
                "prompt: expected a string, an array of strings or an array of token ids, found " +
                    type_in_words(*value) + ": " + excerpt(*value),
                "invalid_type", path);
  }
  if (value->empty()) throw Error(400, "prompt: the prompt is empty", "empty_prompt", path);
  if (value->front().is_number()) return {read_tokens(*value, model, path)};
  if (value->size() > kMostPrompts) {
    throw Error(400,
                "prompt: found " + std::to_string(value->size()) + " prompts; allowed are up to " +
                    std::to_string(kMostPrompts),
                "invalid_value", path);
  }
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < value->size(); ++i) {
    const Json& item = (*value)[i];
    const std::string here = path + "[" + std::to_string(i) + "]";
    if (item.is_string()) {
      prompts.push_back(encode_text(item, model, here));
    } else if (item.is_array()) {
      prompts.push_back(read_tokens(item, model, here));
    } else {
      throw Error(
          400,
          here + ": expected a string or an array of token ids, found " + type_in_words(item) + ": " + excerpt(item),
          "invalid_type", here);
    }
  }
  return prompts;
}

}  // namespace

void completions(const Service& service, const Request& request, std::shared_ptr<Responder> responder) {
  const auto model = service.ready_model();
  const Json body = parse_body(request.body);
  Fields fields(body);

  CompletionPlan plan;
  plan.tokenizer = model->tokenizer;
  plan.head = {random_id("cmpl-"), unix_now(), read_model(fields, service, *model),
               "galley-" + service.options().version};
  plan.streaming = read_streaming(fields);
  serve::GenerationRequest common = read_generation(fields, service, *model);
  if (const auto logprobs = fields.integer("logprobs", 0, kMostTopLogprobs)) {
    common.sampling.logprobs = plan.logprobs = true;
    common.sampling.top_logprobs = static_cast<int>(*logprobs);
  }
  const Json* prompt = fields.find("prompt");
  fields.inert(common_inert_fields());
  fields.inert(kInertCompletionFields);
  fields.finish();

  std::vector<Prompt> prompts = read_prompts(prompt, *model);
  plan.choices = prompts.size();
  std::vector<serve::GenerationRequest> rows;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    serve::GenerationRequest row = common;
    row.id = prompts.size() == 1 ? plan.head.id : plan.head.id + "/" + std::to_string(i);
    row.prompt = std::move(prompts[i]);
    settle_max_tokens(row, service, *model);
    rows.push_back(std::move(row));
  }
  std::shared_ptr<Generation> generation;
  if (plan.streaming.stream) {
    generation = std::make_shared<CompletionStream>(std::move(responder), std::move(plan));
  } else {
    generation = std::make_shared<CompletionBody>(std::move(responder), std::move(plan));
  }
  try {
    generation->start(*model->engine, std::move(rows));
  } catch (const Error& error) {
    constexpr std::string_view kInChats = "messages";  // the engine knows a prompt by its name in chats
    if (!error.param().starts_with(kInChats)) throw;
    const std::string which = error.param().substr(kInChats.size()), param = "prompt" + which;
    throw Error(error.status(), (which.empty() ? "" : param + ": ") + error.what(), error.code(), param);
  }
}

}  // namespace galley::api
