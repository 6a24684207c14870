// What requests may contain: every field is read, inert, or refused by name.
#include <gtest/gtest.h>

#include "unit/api_support.h"

namespace galley::test {
namespace {

struct Api : testing::Test {
  std::shared_ptr<ManualEngine> engine = std::make_shared<ManualEngine>();
  ApiFixture api{engine};

  /// The error of a chat request with these extra fields; its shape is checked on the way.
  Json refusal(const std::shared_ptr<RecordingResponder>& responder, int status) {
    EXPECT_TRUE(responder->whole) << "the request was accepted";
    if (!responder->whole) return {{"param", nullptr}, {"message", ""}, {"code", nullptr}};
    EXPECT_EQ(responder->whole->status, status) << responder->whole->body;
    EXPECT_EQ(responder->whole->content_type, "application/json");
    const Json error = Json::parse(responder->whole->body).at("error");
    EXPECT_EQ(error.size(), 4U);
    EXPECT_TRUE(error.at("message").is_string());
    EXPECT_TRUE(error.at("type").is_string());
    EXPECT_TRUE(error.contains("param") && error.contains("code"));
    EXPECT_TRUE(engine->rows.empty());
    return error;
  }
  const serve::GenerationRequest& accepted(const std::shared_ptr<RecordingResponder>& responder) {
    EXPECT_FALSE(responder->whole) << responder->whole->body;
    if (engine->rows.empty()) {
      ADD_FAILURE() << "nothing was submitted";
      engine->rows.emplace_back();
    }
    return engine->rows.back().request;
  }
};

TEST_F(Api, ReadsEverySamplingField) {
  const auto& request = accepted(api.chat(Json::parse(R"({
    "max_tokens": 12, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 18446744073709551615,
    "stop": ["a", "b"], "ignore_eos": true, "logprobs": true, "top_logprobs": 3})")));
  EXPECT_EQ(request.max_tokens, 12);
  EXPECT_FLOAT_EQ(request.sampling.temperature, 0.5F);
  EXPECT_FLOAT_EQ(request.sampling.top_p, 0.9F);
  EXPECT_EQ(request.sampling.top_k, 40);
  EXPECT_FLOAT_EQ(request.sampling.min_p, 0.05F);
  EXPECT_EQ(request.sampling.seed, 18446744073709551615ULL);
  EXPECT_EQ(request.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(request.ignore_eos);
  EXPECT_TRUE(request.sampling.logprobs);
  EXPECT_EQ(request.sampling.top_logprobs, 3);
  EXPECT_EQ(request.prompt, bytes_of("user: Hi\n"));
}

TEST_F(Api, MaxCompletionTokensWins) {
  EXPECT_EQ(accepted(api.chat({{"max_tokens", 5}, {"max_completion_tokens", 9}})).max_tokens, 9);
  EXPECT_EQ(accepted(api.chat({{"max_tokens", 5}, {"max_completion_tokens", nullptr}})).max_tokens, 5);
  EXPECT_EQ(accepted(api.chat({{"max_tokens", 16.0}})).max_tokens, 16);
}

TEST_F(Api, DefaultLengthIsTheCapOrTheRestOfTheContext) {
  EXPECT_EQ(accepted(api.chat()).max_tokens, 2048);
  EXPECT_EQ(accepted(api.complete({{"prompt", std::string(4000, 'x')}})).max_tokens, 96);
  EXPECT_EQ(accepted(api.complete({{"prompt", std::string(5000, 'x')}})).max_tokens, 1);  // the engine's to refuse
}

TEST_F(Api, DefaultsComeFromRequestThenFlagsThenModelThenBuiltIn) {
  EXPECT_FLOAT_EQ(accepted(api.chat()).sampling.temperature, 1.0F);
  EXPECT_FALSE(engine->rows.back().request.sampling.seed);
  api::ServedModel model = *api.model;
  model.generation_config = {.temperature = 0.6, .top_k = 20, .top_p = {}, .min_p = {}};
  api.service->set_model(std::make_shared<api::ServedModel>(model));
  EXPECT_FLOAT_EQ(accepted(api.chat()).sampling.temperature, 0.6F);
  EXPECT_EQ(engine->rows.back().request.sampling.top_k, 20);

  api::ServiceOptions options{.version = "1"};
  options.sampling.temperature = 0.3;
  ApiFixture flagged(engine, options);
  flagged.service->set_model(std::make_shared<api::ServedModel>(model));
  EXPECT_FLOAT_EQ(accepted(flagged.chat()).sampling.temperature, 0.3F);
  EXPECT_EQ(engine->rows.back().request.sampling.top_k, 20);
  EXPECT_FLOAT_EQ(accepted(flagged.chat({{"temperature", 0}, {"top_k", -1}})).sampling.temperature, 0.0F);
  EXPECT_EQ(engine->rows.back().request.sampling.top_k, 0);
}

TEST_F(Api, EdgesOfSampling) {
  EXPECT_TRUE(accepted(api.chat({{"top_p", 0}})).sampling.greedy());
  EXPECT_FALSE(accepted(api.chat({{"seed", -1}})).sampling.seed);
  EXPECT_EQ(accepted(api.chat({{"seed", 0}})).sampling.seed, 0U);
  EXPECT_EQ(accepted(api.chat({{"stop", "END"}})).stop, std::vector<std::string>{"END"});
  EXPECT_TRUE(accepted(api.chat({{"stop", nullptr}})).stop.empty());
}

struct Wrong {
  const char* fields;
  const char* param;
  const char* says;  ///< part of the message
};

TEST_F(Api, RefusesWrongValuesByName) {
  const Wrong cases[] = {
      {R"({"max_tokens":0})", "max_tokens", "0 is out of range; allowed is 1"},
      {R"({"max_tokens":-3})", "max_tokens", "-3"},
      {R"({"max_completion_tokens":0})", "max_completion_tokens", "out of range"},
      {R"({"max_tokens":"5"})", "max_tokens", "expected an integer, found a string: \"5\""},
      {R"({"max_tokens":1.5})", "max_tokens", "expected an integer, found a number: 1.5"},
      {R"({"max_tokens":1e300})", "max_tokens", "out of range"},
      {R"({"max_tokens":18446744073709551615})", "max_tokens", "out of range"},
      {R"({"temperature":2.5})", "temperature", "2.5 is out of range; allowed is 0 to 2"},
      {R"({"temperature":-0.1})", "temperature", "out of range"},
      {R"({"temperature":true})", "temperature", "found a boolean"},
      {R"({"top_p":1.01})", "top_p", "allowed is 0 to 1"},
      {R"({"top_k":-2})", "top_k", "-2"},
      {R"({"min_p":7})", "min_p", "7"},
      {R"({"seed":"x"})", "seed", "a string"},
      {R"({"seed":0.5})", "seed", "0.5"},
      {R"({"stop":""})", "stop", "empty string"},
      {R"({"stop":["a",""]})", "stop[1]", "empty string"},
      {R"({"stop":[1]})", "stop[0]", "expected a string, found an integer: 1"},
      {R"({"stop":5})", "stop", "found an integer"},
      {R"({"stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]})", "stop", "17"},
      {R"({"stream":"yes"})", "stream", "expected a boolean"},
      {R"({"stream_options":{"include_usage":1}})", "stream_options.include_usage", "boolean"},
      {R"({"stream_options":{"other":1}})", "stream_options.other", "unknown field"},
      {R"({"stream_options":true})", "stream_options", "expected an object"},
      {R"({"logprobs":2})", "logprobs", "boolean"},
      {R"({"logprobs":true,"top_logprobs":21})", "top_logprobs", "0 to 20"},
      {R"({"top_logprobs":2})", "top_logprobs", "needs logprobs"},
      {R"({"ignore_eos":"no"})", "ignore_eos", "boolean"},
      {R"({"model":7})", "model", "string"},
      {R"({"chat_template_kwargs":[]})", "chat_template_kwargs", "expected an object"},
      // Asking for what this server does not do.
      {R"({"n":2})", "n", "2 is not supported"},
      {R"({"presence_penalty":0.5})", "presence_penalty", "not supported"},
      {R"({"frequency_penalty":1})", "frequency_penalty", "not supported"},
      {R"({"repetition_penalty":1.1})", "repetition_penalty", "not supported"},
      {R"({"logit_bias":{"5":1}})", "logit_bias", "not supported"},
      {R"({"tools":[{"type":"function"}]})", "tools", "not supported"},
      {R"({"tool_choice":"required"})", "tool_choice", "not supported"},
      {R"({"response_format":{"type":"json_object"}})", "response_format", "not supported"},
      {R"({"reasoning_effort":"high"})", "reasoning_effort", "not supported"},
      {R"({"modalities":["text","audio"]})", "modalities", "not supported"},
      {R"({"prediction":{}})", "prediction", "not supported"},
      {R"({"best_of":2})", "best_of", "not supported"},
      // Nobody knows these.
      {R"({"seed":18446744073709551616})", "seed", "to 18446744073709551615"},
      {R"({"temprature":1})", "temprature", "unknown field: temprature"},
      {R"({"temprature":null})", "temprature", "unknown field"},
      {R"({"suffix":"x"})", "suffix", "unknown field"},
  };
  for (const Wrong& wrong : cases) {
    const Json error = refusal(api.chat(Json::parse(wrong.fields)), 400);
    EXPECT_EQ(error["param"], wrong.param) << wrong.fields;
    EXPECT_NE(error["message"].get<std::string>().find(wrong.says), std::string::npos) << error;
    EXPECT_EQ(error["type"], "invalid_request_error");
  }
}

TEST_F(Api, AcceptsAdvisoryAndNeutralFields) {
  accepted(api.chat(Json::parse(R"({
    "user":"u","metadata":{"a":"b"},"store":true,"service_tier":"auto","prompt_cache_key":"k","safety_identifier":"s",
    "parallel_tool_calls":true,"n":1,"presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1,
    "logit_bias":{},"tools":[],"tool_choice":"auto","response_format":{"type":"text"},"reasoning_effort":null,
    "modalities":["text"],"prediction":null,"audio":null,"functions":null,"best_of":1,"stream_options":null,
    "chat_template_kwargs":{"enable_thinking":false}})")));
  EXPECT_EQ(api.chat_template->last_extra, R"({"enable_thinking":false})");
}

TEST_F(Api, RefusesWhatIsNoJsonObject) {
  const auto error_of = [&](const std::string& body) {
    return refusal(api.send("POST", "/v1/chat/completions", body), 400)["message"].get<std::string>();
  };
  EXPECT_NE(error_of("{\"messages\": [,]}").find("line 1, column 15"), std::string::npos)
      << error_of("{\"messages\": [,]}");
  EXPECT_NE(error_of("{\n  \"a\": tru\n}").find("line 2, column"), std::string::npos);
  EXPECT_NE(error_of("{\"a\":\"\xff\"}").find("UTF-8"), std::string::npos);
  EXPECT_NE(error_of("").find("empty"), std::string::npos);
  EXPECT_NE(error_of("  \n").find("empty"), std::string::npos);
  EXPECT_NE(error_of("[1]").find("must be a JSON object, found an array"), std::string::npos);
  EXPECT_NE(error_of("{\"temperature\":1e999}").find("too large: '1e999'"), std::string::npos);
  EXPECT_NE(error_of(std::string(1'000'000, '[')).find("deeper than 100"), std::string::npos);
  EXPECT_NE(error_of("{\"messages\":").find("line 1, column"), std::string::npos);
}

TEST_F(Api, FlattensMessages) {
  accepted(api.chat(Json::parse(R"({"messages":[
    {"role":"developer","content":"Be brief."},
    {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b","cache_control":{"type":"ephemeral"}}],"name":"Ann"},
    {"role":"assistant","content":null,"refusal":null,"annotations":[],"audio":null,"function_call":null,
     "tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},
    {"role":"tool","tool_call_id":"c1","content":"42"},
    {"role":"assistant","content":"ok","tool_calls":null}]})")));
  const Json expected = Json::parse(R"([
    {"role":"system","content":"Be brief."},
    {"role":"user","content":"ab","name":"Ann"},
    {"role":"assistant","content":"","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":{"x":1}}}]},
    {"role":"tool","tool_call_id":"c1","content":"42"},
    {"role":"assistant","content":"ok"}])");
  EXPECT_EQ(api.chat_template->last_messages, expected);
}

TEST_F(Api, RefusesWrongMessagesByName) {
  const Wrong cases[] = {
      {R"([])", "messages", "empty"},
      {R"("hi")", "messages", "expected an array"},
      {R"(["hi"])", "messages[0]", "expected an object"},
      {R"([{"content":"x"}])", "messages[0].role", "required"},
      {R"([{"role":"king","content":"x"}])", "messages[0].role", "allowed are system"},
      {R"([{"role":"user","content":5}])", "messages[0].content", "expected a string, null or an array"},
      {R"([{"role":"user","content":"x"},{"role":"user","content":[{"type":"image_url","image_url":{"url":"d"}}]}])",
       "messages[1].content[0]", "images (\"image_url\") are not supported"},
      {R"([{"role":"user","content":[{"type":"input_audio"}]}])", "messages[0].content[0]", "input_audio"},
      {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text", "required"},
      {R"([{"role":"user","content":[{"text":"x"}]}])", "messages[0].content[0].type", "required"},
      {R"([{"role":"user","content":"x","colour":"red"}])", "messages[0].colour", "unknown field"},
      {R"([{"role":"assistant","content":"","tool_calls":[{}]}])", "messages[0].tool_calls[0]", "function.name"},
  };
  for (const Wrong& wrong : cases) {
    const Json error = refusal(api.chat({{"messages", Json::parse(wrong.fields)}}), 400);
    EXPECT_EQ(error["param"], wrong.param) << wrong.fields;
    EXPECT_NE(error["message"].get<std::string>().find(wrong.says), std::string::npos) << error;
  }
  EXPECT_EQ(refusal(api.post("/v1/chat/completions", {{"model", "m"}}), 400)["param"], "messages");
  EXPECT_EQ(refusal(api.chat(Json::parse(R"({"messages":[{"role":"user","content":"raise"}]})")), 400)["message"],
            "the template refuses");
}

TEST_F(Api, ModelWithoutTemplateSaysSo) {
  api::ServedModel model = *api.model;
  model.chat_template = nullptr;
  api.service->set_model(std::make_shared<api::ServedModel>(model));
  EXPECT_NE(refusal(api.chat(), 400)["message"].get<std::string>().find("no chat template"), std::string::npos);
}

TEST_F(Api, PromptsOfCompletions) {
  EXPECT_EQ(accepted(api.complete({{"prompt", "Hi"}})).prompt, bytes_of("Hi"));
  EXPECT_EQ(accepted(api.complete({{"prompt", {"Hi"}}})).prompt, bytes_of("Hi"));
  EXPECT_EQ(accepted(api.complete({{"prompt", {72, 259}}})).prompt, (std::vector<std::int32_t>{72, 259}));
  engine->rows.clear();
  accepted(api.complete(Json::parse(R"({"prompt":["a","b",[99]],"suffix":null,"echo":false,"seed":5})")));
  ASSERT_EQ(engine->rows.size(), 3U);
  EXPECT_EQ(engine->rows[2].request.prompt, std::vector<std::int32_t>{99});
  EXPECT_EQ(engine->rows[1].request.sampling.seed, 5U);

  api::ServedModel model = *api.model;
  model.add_bos = true;
  model.bos_id = kBos;
  api.service->set_model(std::make_shared<api::ServedModel>(model));
  EXPECT_EQ(accepted(api.complete({{"prompt", ""}})).prompt, std::vector<std::int32_t>{kBos});
  EXPECT_EQ(accepted(api.complete({{"prompt", "a"}})).prompt, (std::vector<std::int32_t>{kBos, 97}));
}

TEST_F(Api, RefusesWrongCompletions) {
  const Wrong cases[] = {
      {R"({"prompt":""})", "prompt", "empty"},
      {R"({"prompt":[]})", "prompt", "empty"},
      {R"({"prompt":["a",""]})", "prompt[1]", "empty"},
      {R"({"prompt":[1,260]})", "prompt[1]", "260 is no token id; allowed is 0 to 259"},
      {R"({"prompt":[1,-1]})", "prompt[1]", "-1 is no token id"},
      {R"({"prompt":[1,18446744073709551615]})", "prompt[1]", "no token id"},
      {R"({"prompt":[1,"a"]})", "prompt[1]", "expected a token id"},
      {R"({"prompt":["a",1]})", "prompt[1]", "found an integer"},
      {R"({"prompt":{"a":1}})", "prompt", "found an object"},
      {R"({"prompt":null})", "prompt", "required"},
      {R"({"echo":true})", "echo", "not supported"},
      {R"({"suffix":"x"})", "suffix", "not supported"},
      {R"({"best_of":3})", "best_of", "not supported"},
      {R"({"logprobs":true})", "logprobs", "expected an integer"},
      {R"({"logprobs":21})", "logprobs", "0 to 20"},
      {R"({"messages":[]})", "messages", "unknown field"},
  };
  for (const Wrong& wrong : cases) {
    const Json error = refusal(api.complete(Json::parse(wrong.fields)), 400);
    EXPECT_EQ(error["param"], wrong.param) << wrong.fields;
    EXPECT_NE(error["message"].get<std::string>().find(wrong.says), std::string::npos) << error;
  }
  EXPECT_EQ(refusal(api.complete({{"prompt", std::vector<std::string>(129, "x")}}), 400)["param"], "prompt");
}

}  // namespace
}  // namespace galley::test
