// What clients get back: bodies, chunk sequences, errors, and the server's own pages.
#include <gtest/gtest.h>

#include <chrono>

#include "unit/api_support.h"

namespace galley::test {
namespace {

struct Answers : testing::Test {
  std::shared_ptr<ManualEngine> engine = std::make_shared<ManualEngine>();
  ApiFixture api{engine};
};

serve::TokenInfo token(std::int32_t id, std::string bytes, float logprob, std::vector<sample::TokenLogprob> top = {}) {
  serve::TokenInfo info;
  info.choice.token = id;
  info.choice.logprob = logprob;
  info.choice.top = std::move(top);
  info.bytes = std::move(bytes);
  return info;
}

TEST_F(Answers, ChatBody) {
  const auto responder = api.chat({{"model", "any-name"}});
  engine->say(0, "Hel");
  engine->say(0, "");
  engine->finish(0, serve::FinishReason::length, {7, 3, 2}, "lo");
  ASSERT_TRUE(responder->run());
  const Json body = json_of(*responder);
  EXPECT_EQ(responder->whole->status, 200);
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["model"], "any-name");
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_GT(body["created"].get<std::int64_t>(), 1'600'000'000);
  EXPECT_EQ(body["choices"], Json::parse(R"([{"index":0,"message":{"role":"assistant","content":"Hello","refusal":null},
                                             "logprobs":null,"finish_reason":"length"}])"));
  EXPECT_EQ(body["usage"], Json::parse(R"({"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,
                                           "prompt_tokens_details":{"cached_tokens":2}})"));
}

TEST_F(Answers, ChatStreamSequence) {
  const auto responder = api.chat({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
  EXPECT_FALSE(responder->stream_head) << "a stream must not begin before the row has said anything";
  engine->say(0, "He said \"x\"\n");
  engine->say(0, "");  // a character still incomplete
  engine->finish(0, serve::FinishReason::stop, {7, 3, 0}, "\xF0\x9F\x98\x80");
  ASSERT_TRUE(responder->run());
  EXPECT_TRUE(responder->stream_head->content_type.starts_with("text/event-stream"));
  const auto payloads = sse_payloads(responder->body);
  ASSERT_EQ(payloads.size(), 6U) << responder->body;
  EXPECT_EQ(payloads.back(), "[DONE]");
  std::vector<Json> chunks;
  for (std::size_t i = 0; i + 1 < payloads.size(); ++i) chunks.push_back(Json::parse(payloads[i]));
  for (const Json& chunk : chunks) {
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    EXPECT_EQ(chunk["id"], chunks[0]["id"]);
    EXPECT_EQ(chunk["created"], chunks[0]["created"]);
    EXPECT_EQ(chunk["model"], "org/tiny");
    ASSERT_TRUE(chunk.contains("usage"));
  }
  const auto choice = [](const char* delta, const char* finish) {
    return Json::parse(std::string(R"([{"index":0,"delta":)") + delta + R"(,"logprobs":null,"finish_reason":)" +
                       finish + "}]");
  };
  EXPECT_EQ(chunks[0]["choices"], choice(R"({"role":"assistant","content":""})", "null"));
  EXPECT_EQ(chunks[1]["choices"], choice(R"({"content":"He said \"x\"\n"})", "null"));
  EXPECT_EQ(chunks[2]["choices"], choice(R"({"content":"😀"})", "null"));
  EXPECT_EQ(chunks[3]["choices"], choice("{}", R"("stop")"));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(chunks[static_cast<std::size_t>(i)]["usage"].is_null());
  EXPECT_EQ(chunks[4]["choices"], Json::array());
  EXPECT_EQ(chunks[4]["usage"]["total_tokens"], 10);
}

TEST_F(Answers, UsageIsOptIn) {
  const auto responder = api.chat({{"stream", true}});
  engine->finish(0);
  ASSERT_TRUE(responder->run());
  EXPECT_EQ(responder->body.find("usage"), std::string::npos);
  EXPECT_EQ(sse_payloads(responder->body).size(), 3U);  // role, finish, [DONE]
}

TEST_F(Answers, ChatLogprobsCarryRawBytes) {
  const std::vector<serve::TokenInfo> tokens = {
      token('H', "H", -0.5F, {{'H', -0.5F}, {'J', -1.5F}}),
      token(0xF0, "\xF0", -0.25F, {{0xF0, -0.25F}, {'x', -3.0F}}),
  };
  const Json expected = Json::parse(R"([
    {"token":"H","logprob":-0.5,"bytes":[72],"top_logprobs":[{"token":"H","logprob":-0.5,"bytes":[72]},
      {"token":"J","logprob":-1.5,"bytes":[74]}]},
    {"token":"\ufffd","logprob":-0.25,"bytes":[240],"top_logprobs":[{"token":"\ufffd","logprob":-0.25,"bytes":[240]},
      {"token":"x","logprob":-3.0,"bytes":[120]}]}])");
  const Json fields = {{"logprobs", true}, {"top_logprobs", 2}};
  auto responder = api.chat(fields);
  engine->say(0, "H", tokens);
  engine->finish(0);
  ASSERT_TRUE(responder->run());
  EXPECT_EQ(json_of(*responder)["choices"][0]["logprobs"]["content"], expected);

  Json streamed = fields;
  streamed["stream"] = true;
  responder = api.chat(streamed);
  engine->say(1, "H", {tokens[0]});
  engine->say(1, "", {tokens[1]});  // no text yet, but a token
  engine->finish(1);
  ASSERT_TRUE(responder->run());
  Json content = Json::array();
  for (const std::string& payload : sse_payloads(responder->body)) {
    if (payload == "[DONE]") continue;
    const Json logprobs = Json::parse(payload)["choices"][0]["logprobs"];
    if (!logprobs.is_null()) content.insert(content.end(), logprobs["content"].begin(), logprobs["content"].end());
  }
  EXPECT_EQ(content, expected);
}

TEST_F(Answers, CompletionBodyOfSeveralPrompts) {
  const auto responder = api.complete({{"prompt", {"a", "b"}}});
  engine->say(1, "second");
  engine->finish(1, serve::FinishReason::length, {1, 2, 0});
  engine->say(0, "first");
  responder->run_posted();
  EXPECT_FALSE(responder->complete());
  engine->finish(0, serve::FinishReason::stop, {10, 20, 5});
  ASSERT_TRUE(responder->run());
  const Json body = json_of(*responder);
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(body["choices"], Json::parse(R"([{"index":0,"text":"first","logprobs":null,"finish_reason":"stop"},
                                             {"index":1,"text":"second","logprobs":null,"finish_reason":"length"}])"));
  EXPECT_EQ(body["usage"]["prompt_tokens"], 11);
  EXPECT_EQ(body["usage"]["completion_tokens"], 22);
}

TEST_F(Answers, CompletionStreamInterleaves) {
  const auto responder =
      api.complete({{"prompt", {"a", "b"}}, {"stream", true}, {"stream_options", {{"include_usage", true}}}});
  engine->say(0, "x");
  engine->say(1, "y");
  engine->say(0, "z");
  engine->finish(0);
  engine->finish(1, serve::FinishReason::length);
  ASSERT_TRUE(responder->run());
  const auto payloads = sse_payloads(responder->body);
  ASSERT_EQ(payloads.size(), 7U) << responder->body;
  std::string said;
  for (std::size_t i = 0; i < 5; ++i) {
    const Json chunk = Json::parse(payloads[i]);
    EXPECT_TRUE(chunk["usage"].is_null() && chunk.contains("usage"));
    const Json& choice = chunk["choices"][0];
    said += std::to_string(choice["index"].get<int>()) + choice["text"].get<std::string>() +
            (choice["finish_reason"].is_null() ? "" : choice["finish_reason"].get<std::string>()) + " ";
  }
  EXPECT_EQ(said, "0x 1y 0z 0stop 1length ");
  EXPECT_EQ(Json::parse(payloads[5])["usage"]["total_tokens"], 20);
  EXPECT_EQ(payloads[6], "[DONE]");
}

TEST_F(Answers, CompletionLogprobs) {
  const auto responder = api.complete({{"logprobs", 1}});
  engine->say(0, "é!",
              {token(0xC3, "\xC3", -0.5F, {{0xC3, -0.5F}}), token(0xA9, "\xA9", -0.25F, {{'x', -0.125F}}),
               token('!', "!", -1.0F, {{'!', -1.0F}})});
  engine->finish(0);
  ASSERT_TRUE(responder->run());
  EXPECT_EQ(json_of(*responder)["choices"][0]["logprobs"], Json::parse(R"({
    "tokens":["bytes:\\xc3","bytes:\\xa9","!"],"token_logprobs":[-0.5,-0.25,-1.0],
    "top_logprobs":[{"bytes:\\xc3":-0.5},{"x":-0.125,"bytes:\\xa9":-0.25},{"!":-1.0}],"text_offset":[0,1,1]})"));
}

TEST_F(Answers, LogprobsShowSpecialTokensByName) {
  auto responder = api.complete({{"logprobs", 1}});
  engine->say(0, "!", {token('!', "!", -1.0F, {{kTurnEnd, -0.5F}}), token(kEos, "", -0.25F)});
  engine->finish(0);
  ASSERT_TRUE(responder->run());
  EXPECT_EQ(json_of(*responder)["choices"][0]["logprobs"], Json::parse(R"({
    "tokens":["!","</s>"],"token_logprobs":[-1.0,-0.25],
    "top_logprobs":[{"<|im_end|>":-0.5,"!":-1.0},{"</s>":-0.25}],"text_offset":[0,1]})"));

  responder = api.chat({{"logprobs", true}, {"top_logprobs", 1}});
  engine->say(1, "!", {token('!', "!", -1.0F, {{kTurnEnd, -0.5F}})});
  engine->finish(1);
  ASSERT_TRUE(responder->run());
  const Json top = json_of(*responder)["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0];
  EXPECT_EQ(top, Json::parse(R"({"token":"<|im_end|>","logprob":-0.5,"bytes":[]})"));
}

TEST_F(Answers, ErrorBeforeAndInTheMiddleOfAStream) {
  auto responder = api.chat({{"stream", true}});
  engine->fail(0, Error(503, "the engine has died", "engine_dead"));
  ASSERT_TRUE(responder->run());
  ASSERT_TRUE(responder->whole) << "nothing was said yet, so the status can still tell";
  EXPECT_EQ(responder->whole->status, 503);

  responder = api.chat({{"stream", true}});
  engine->say(1, "so far");
  engine->fail(1, Error(500, "this row failed", "row_failed"));
  ASSERT_TRUE(responder->run());
  const auto payloads = sse_payloads(responder->body);
  ASSERT_EQ(payloads.size(), 3U);
  EXPECT_EQ(Json::parse(payloads[2])["error"], Json::parse(R"({"message":"this row failed","type":"server_error",
                                                               "param":null,"code":"row_failed"})"));
}

TEST_F(Answers, OneFailedChoiceEndsTheOthers) {
  auto responder = api.complete({{"prompt", {"a", "b"}}});
  engine->fail(0, Error(500, "boom"));
  ASSERT_TRUE(responder->run());
  EXPECT_EQ(responder->whole->status, 500);
  EXPECT_TRUE(engine->rows[1].ticket->cancelled());

  responder = api.complete({{"prompt", {"a", "b"}}, {"stream", true}});
  engine->say(2, "x");
  engine->fail(3, Error(500, "boom"));
  engine->say(2, "late");
  ASSERT_TRUE(responder->run());
  EXPECT_TRUE(engine->rows[2].ticket->cancelled());
  EXPECT_EQ(responder->body.find("late"), std::string::npos);
}

TEST_F(Answers, RefusedSubmissions) {
  engine->refusal = Error(429, "the queue is full (256 waiting)", "queue_full");
  auto responder = api.chat();
  ASSERT_TRUE(responder->whole);
  EXPECT_EQ(responder->whole->status, 429);
  EXPECT_EQ(json_of(*responder)["error"]["type"], "rate_limit_error");
  EXPECT_EQ(responder->whole->headers.at(0).name, "Retry-After");

  responder = api.complete({{"prompt", {"a", "b"}}});
  ASSERT_TRUE(responder->whole);
  EXPECT_EQ(responder->whole->status, 429);
  EXPECT_TRUE(engine->rows.empty());

  engine->refusal = Error(400, "the context length is 8 tokens", "context_length_exceeded", "messages[1]");
  responder = api.complete({{"prompt", {"a", "b"}}});
  EXPECT_EQ(json_of(*responder)["error"]["param"], "prompt[1]");
  EXPECT_EQ(json_of(*responder)["error"]["message"], "prompt[1]: the context length is 8 tokens");
  engine->refusal =
      Error(400, "prompt of 9 tokens and max_tokens 5 exceed the context of 8", "context_length_exceeded", "messages");
  responder = api.chat();
  EXPECT_EQ(responder->whole->status, 400);
  EXPECT_EQ(json_of(*responder)["error"]["code"], "context_length_exceeded");
}

TEST_F(Answers, DisconnectCancelsEveryRow) {
  const auto responder = api.complete({{"prompt", {"a", "b"}}, {"stream", true}});
  engine->say(0, "x");
  responder->run_posted();
  responder->disconnect();
  EXPECT_TRUE(engine->rows[0].ticket->cancelled());
  EXPECT_TRUE(engine->rows[1].ticket->cancelled());
  const std::string before = responder->body;
  engine->finish(0, serve::FinishReason::cancelled);
  engine->finish(1, serve::FinishReason::cancelled);
  responder->run_posted();
  EXPECT_EQ(responder->body, before);
}

TEST_F(Answers, NothingIsKeptAliveAfterTheEnd) {
  std::weak_ptr<RecordingResponder> weak;
  {
    auto responder = api.chat();
    weak = responder;
    engine->finish(0);
    ASSERT_TRUE(responder->run());
  }
  engine->rows.clear();  // the engine lets go of the sink
  EXPECT_TRUE(weak.expired());
}

TEST_F(Answers, StrictModel) {
  ApiFixture strict(engine, {.version = "1", .strict_model = true});
  auto responder = strict.chat({{"model", "other"}});
  ASSERT_TRUE(responder->whole);
  EXPECT_EQ(responder->whole->status, 404);
  EXPECT_EQ(json_of(*responder)["error"]["code"], "model_not_found");
  EXPECT_FALSE(strict.chat({{"model", "org/tiny"}})->whole);
  EXPECT_FALSE(strict.chat()->whole);
}

TEST_F(Answers, Models) {
  auto responder = api.send("GET", "/v1/models");
  EXPECT_EQ(json_of(*responder)["object"], "list");
  EXPECT_EQ(json_of(*responder)["data"][0]["id"], "org/tiny");
  EXPECT_EQ(json_of(*api.send("GET", "/v1/models/org/tiny"))["object"], "model");
  EXPECT_EQ(json_of(*api.send("GET", "/models/org%2Ftiny"))["id"], "org/tiny");
  EXPECT_EQ(api.send("GET", "/v1/models/other")->whole->status, 404);
}

TEST_F(Answers, HealthFollowsTheServersLife) {
  EXPECT_EQ(api.send("GET", "/health")->whole->status, 200);
  EXPECT_EQ(json_of(*api.send("GET", "/health")), Json({{"status", "ok"}}));
  const auto expect = [&](const char* word) {
    const auto responder = api.send("GET", "/health");
    EXPECT_EQ(responder->whole->status, 503);
    EXPECT_EQ(json_of(*responder)["status"], word);
    EXPECT_EQ(json_of(*responder)["error"]["code"], word);
    const auto chat = api.chat();
    ASSERT_TRUE(chat->whole);
    EXPECT_EQ(chat->whole->status, 503);
  };
  api.service->set_model(nullptr);
  expect("loading");
  EXPECT_EQ(api.send("GET", "/v1/models")->whole->status, 503);
  const auto stats = api.send("GET", "/stats");
  EXPECT_EQ(stats->whole->status, 200);
  EXPECT_EQ(json_of(*stats)["batch"]["configured"], 7);
  api.service->set_model(api.model);
  api.service->set_draining();
  expect("draining");
  EXPECT_EQ(api.send("GET", "/v1/models")->whole->status, 200);
  engine->alive = false;
  expect("dead");
  EXPECT_EQ(api.send("GET", "/v1/models")->whole->status, 503);
}

TEST_F(Answers, Stats) {
  engine->counters.batch = {16, 3, 1, 2, 9};
  engine->counters.kv.budget_bytes = 1000;
  engine->counters.lanes.serial_reasons["batch_size_1"] = 4;
  engine->counters.requests.cancelled = 5;
  const Json stats = json_of(*api.send("GET", "/stats"));
  EXPECT_EQ(stats["batch"], Json::parse(R"({"configured":16,"active_rows":3,"prefilling_rows":1,"pending_rows":2,
                                            "peak_rows":9})"));
  for (const char* key : {"budget_bytes", "used_bytes", "blocks_total", "blocks_free"}) {
    EXPECT_TRUE(stats["kv"].contains(key)) << key;
  }
  EXPECT_EQ(stats["lanes"]["serial"]["reasons"]["batch_size_1"], 4);
  EXPECT_TRUE(stats["lanes"].contains("batched"));
  EXPECT_TRUE(stats["throughput"].contains("decode_tok_s"));
  EXPECT_EQ(stats["requests"]["cancelled"], 5);
  EXPECT_EQ(stats["server"]["model"], "org/tiny");
  EXPECT_EQ(stats["server"]["version"], "1.2.3");
  EXPECT_TRUE(stats["server"].contains("started_at"));
}

TEST_F(Answers, PathsAndMethods) {
  auto responder = api.send("GET", "/nothing");
  EXPECT_EQ(responder->whole->status, 404);
  EXPECT_EQ(json_of(*responder)["error"]["code"], "not_found");
  responder = api.send("GET", "/v1/chat/completions");
  EXPECT_EQ(responder->whole->status, 405);
  EXPECT_EQ(responder->whole->headers.at(0).name, "Allow");
  EXPECT_EQ(responder->whole->headers.at(0).value, "POST");
  EXPECT_EQ(api.send("DELETE", "/health")->whole->headers.at(0).value, "GET, HEAD");
  EXPECT_EQ(api.send("HEAD", "/health")->whole->status, 200);
  EXPECT_EQ(api.send("GET", "/v1/models/")->whole->status, 200);
  EXPECT_EQ(api.send("POST", "/v1/completions", "{}", {{"content-encoding", "gzip"}})->whole->status, 415);
  EXPECT_FALSE(api.post("/completions", {{"prompt", "x"}})->whole);
  EXPECT_FALSE(api.post("/chat/completions", Json::parse(R"({"messages":[{"role":"user","content":"x"}]})"))->whole);
}

/// The real scheduler over a scripted forward: streamed and whole answers are the same text.
TEST(AnswersOfTheEngine, DeltasConcatenateToTheBody) {
  const std::string text = "A stop comes: naïve 😀 text, then STOP and more";
  ScriptedOptions scripted;
  scripted.script = say(text);
  std::shared_ptr<serve::Engine> engine = scripted_engine({.batch = 4, .context = 4096}, scripted);
  ApiFixture api(engine);
  const Json fields = {{"stop", "STOP"}, {"temperature", 0}, {"logprobs", true}};
  auto whole = api.chat(fields);
  ASSERT_TRUE(whole->run());
  const Json choice = json_of(*whole)["choices"][0];
  EXPECT_EQ(choice["message"]["content"], text.substr(0, text.find("STOP")));
  EXPECT_EQ(choice["finish_reason"], "stop");

  Json streaming = fields;
  streaming["stream"] = true;
  auto stream = api.chat(streaming);
  ASSERT_TRUE(stream->run());
  std::string said;
  std::string finish;
  for (const std::string& payload : sse_payloads(stream->body)) {
    if (payload == "[DONE]") continue;
    const Json delta = Json::parse(payload)["choices"][0];
    said += delta["delta"].value("content", "");
    if (!delta["finish_reason"].is_null()) finish = delta["finish_reason"];
  }
  EXPECT_EQ(said, choice["message"]["content"]);
  EXPECT_EQ(finish, "stop");
}

TEST_F(Answers, ATextThatNoSpellingFitsIsRefusedUntokenized) {
  const std::string text(100'000, 'x');  // one byte a token, and a context of 4096
  for (const auto& responder :
       {api.complete({{"prompt", text}}), api.chat({{"messages", {{{"role", "user"}, {"content", text}}}}})}) {
    ASSERT_TRUE(responder->whole);
    EXPECT_EQ(responder->whole->status, 400);
    const Json error = json_of(*responder)["error"];
    EXPECT_EQ(error["code"], "context_length_exceeded");
    EXPECT_NE(error["message"].get<std::string>().find("4096"), std::string::npos);
    EXPECT_NE(error["message"].get<std::string>().find(" bytes make at least 2500"), std::string::npos) << error;
  }
  EXPECT_TRUE(engine->rows.empty());
}

TEST(AnswersOfTheEngine, OverlongPromptNamesBothCounts) {
  std::shared_ptr<serve::Engine> engine = scripted_engine({.batch = 2, .context = 64}, {});
  ApiFixture api(engine);
  api::ServedModel model = *api.model;
  model.context = 64;
  api.service->set_model(std::make_shared<api::ServedModel>(model));
  const auto responder = api.complete({{"prompt", std::string(100, 'x')}});
  ASSERT_TRUE(responder->whole);
  EXPECT_EQ(responder->whole->status, 400);
  const Json error = json_of(*responder)["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(error["param"], "prompt");
  EXPECT_NE(error["message"].get<std::string>().find("100"), std::string::npos);
  EXPECT_NE(error["message"].get<std::string>().find("64"), std::string::npos);
}

}  // namespace
}  // namespace galley::test
