// The engine as its callers see it: admission, lanes, cancelling, drain, death; over a scripted forward.
#include "serve/engine.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <thread>

#include "serve/stats.h"
#include "support/scripted_forward.h"

namespace galley::serve {
namespace {

using namespace std::chrono_literals;
using test::bytes_of;
using test::RecordingSink;
using test::ScriptedForward;
using test::ScriptedOptions;
using test::StepGate;

GenerationRequest request(std::string_view prompt, int max_tokens) {
  GenerationRequest made;
  made.prompt = bytes_of(prompt);
  made.max_tokens = max_tokens;
  return made;
}

/// The snapshot is published once a step, shortly after a row's last event.
template <typename Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

/// The status of the Error that submitting throws; 0: none.
int refusal(Engine& engine, GenerationRequest made, std::string* code = nullptr, std::string* message = nullptr) {
  try {
    engine.submit(std::move(made), std::make_shared<RecordingSink>());
    return 0;
  } catch (const Error& error) {
    if (code != nullptr) *code = error.code();
    if (message != nullptr) *message = error.what();
    return error.status();
  }
}

std::string answer(Engine& engine, GenerationRequest made) {
  auto sink = std::make_shared<RecordingSink>();
  engine.submit(std::move(made), sink);
  EXPECT_TRUE(sink->wait());
  EXPECT_FALSE(sink->error().has_value());
  return sink->text();
}

TEST(Engine, AnswersOnBothLanes) {
  for (const int batch : {1, 4}) {
    ScriptedOptions options;
    options.script = test::echo();
    auto engine = test::scripted_engine({.batch = batch, .prefill_step = 4, .context = 100}, options);
    EXPECT_EQ(answer(*engine, request("héllo wörld 🎉!", 50)), "héllo wörld 🎉!");
    EXPECT_TRUE(eventually([&] { return engine->stats().requests.finished == 1; }));
    const Stats stats = engine->stats();
    EXPECT_EQ(stats.batch.configured, batch);
    EXPECT_EQ(stats.batch.peak_rows, 1);
    EXPECT_EQ(stats.batch.active_rows, 0);
    EXPECT_EQ(stats.lanes.serial, batch == 1 ? 1U : 0U);
    EXPECT_EQ(stats.lanes.batched, batch == 1 ? 0U : 1U);
    if (batch == 1) {
      EXPECT_EQ(stats.lanes.serial_reasons.at("batch_size_1"), 1U);
    }
    EXPECT_EQ(stats.kv.used_bytes, 0U);
    EXPECT_GT(stats.throughput.decode_tok_s, 0.0);
    EXPECT_GT(stats.throughput.prefill_tok_s, 0.0);
    EXPECT_EQ(stats.throughput.prompt_tokens, bytes_of("héllo wörld 🎉!").size());
    EXPECT_TRUE(engine->drain(5s));
  }
}

TEST(Engine, LogprobsCarryTheTokensOfTheAnswer) {
  ScriptedOptions options;
  options.script = test::say("aé END rest");
  auto engine = test::scripted_engine({.batch = 2, .context = 100}, options);
  auto made = request("x", 50);
  made.sampling.logprobs = true;
  made.sampling.top_logprobs = 2;
  made.stop = {" END"};
  auto sink = std::make_shared<RecordingSink>();
  engine->submit(made, sink);
  ASSERT_TRUE(sink->wait());
  std::string bytes;
  for (const auto& event : sink->events()) {
    for (const auto& token : event.tokens) {
      bytes += token.bytes;
      EXPECT_EQ(token.choice.top.size(), 2U);
    }
  }
  EXPECT_EQ(bytes, "aé");  // those of the stop string don't belong to the answer
  EXPECT_EQ(sink->text(), "aé");
  EXPECT_EQ(sink->finish(), FinishReason::stop);
  EXPECT_EQ(sink->usage().completion_tokens, 7);
}

TEST(Engine, HeldBackTextComesWithTheEnd) {
  ScriptedOptions options;
  options.script = test::say("ab EN\xF0\x9F");
  auto engine = test::scripted_engine({.batch = 2, .context = 100}, options);
  auto made = request("x", 5);
  made.stop = {" END"};
  EXPECT_EQ(answer(*engine, made), "ab EN");
  made = request("x", 7);
  EXPECT_EQ(answer(*engine, made), "ab EN\xEF\xBF\xBD");
  made = request("x", 100);
  made.ignore_eos = true;
  auto sink = std::make_shared<RecordingSink>();
  made.max_tokens = 20;
  engine->submit(made, sink);
  ASSERT_TRUE(sink->wait());
  EXPECT_EQ(sink->finish(), FinishReason::length);
  EXPECT_EQ(sink->usage().completion_tokens, 20);
}

TEST(Engine, RefusesWhatCanNeverRun) {
  ScriptedOptions options;
  options.budget_tokens = 60;
  auto engine = test::scripted_engine({.batch = 2, .context = 100}, options);
  std::string code;
  std::string message;
  EXPECT_EQ(refusal(*engine, request(std::string(95, 'x'), 10), &code, &message), 400);
  EXPECT_EQ(code, "context_length_exceeded");
  EXPECT_NE(message.find("95"), std::string::npos);
  EXPECT_NE(message.find("100"), std::string::npos);
  EXPECT_EQ(refusal(*engine, request(std::string(55, 'x'), 10), &code, &message), 400);
  EXPECT_EQ(code, "context_over_budget");
  for (const char* number : {"65 tokens", "65000 bytes", "60 tokens", "60000 bytes"}) {
    EXPECT_NE(message.find(number), std::string::npos) << message;
  }
  EXPECT_EQ(refusal(*engine, request("", 10)), 400);
  EXPECT_EQ(refusal(*engine, request("x", 0)), 400);
  EXPECT_EQ(refusal(*engine, request(std::string(50, 'x'), 10)), 0);
  EXPECT_TRUE(engine->drain(20s));
  EXPECT_EQ(engine->stats().requests.refused, 4U);
  EXPECT_EQ(engine->stats().requests.accepted, 1U);
}

TEST(Engine, FullQueueIs429AndDrainIs503) {
  StepGate gate;
  gate.close();
  ScriptedOptions options;
  options.on_launch = [&](const models::StepPlan&, int) { gate.pass(); };
  auto engine = test::scripted_engine({.batch = 2, .max_queue = 3, .context = 100}, options);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 5; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    engine->submit(request("x", 5), sinks.back());
  }
  std::string code;
  EXPECT_EQ(refusal(*engine, request("x", 5), &code), 429);
  EXPECT_EQ(code, "queue_full");
  EXPECT_FALSE(engine->drain(20ms));
  EXPECT_EQ(refusal(*engine, request("x", 5), &code), 503);
  EXPECT_EQ(code, "draining");
  gate.open();
  EXPECT_TRUE(engine->drain(20s));
  for (const auto& sink : sinks) EXPECT_EQ(sink->finish(), FinishReason::length);
  EXPECT_EQ(engine->stats().requests.refused, 2U);
}

TEST(Engine, SeveralRequestsAreTakenTogetherOrNotAtAll) {
  StepGate gate;
  gate.close();
  ScriptedOptions options;
  options.on_launch = [&](const models::StepPlan&, int) { gate.pass(); };
  auto engine = test::scripted_engine({.batch = 2, .max_queue = 2, .context = 100}, options);
  const auto refused = [&](int count, int prompt) {
    std::vector<Submission> together;
    for (int i = 0; i < count; ++i) {
      together.push_back({request(std::string(i == 1 ? static_cast<std::size_t>(prompt) : 1, 'x'), 5),
                          std::make_shared<RecordingSink>()});
    }
    try {
      engine->submit_all(std::move(together));
    } catch (const Error& error) {
      return std::tuple(error.status(), error.code(), error.param());
    }
    return std::tuple(0, std::string(), std::string());
  };
  EXPECT_EQ(refused(5, 1), std::tuple(400, std::string("too_many_prompts"), std::string("prompt")))
      << "waiting would be no use";
  EXPECT_EQ(refused(3, 99), std::tuple(400, std::string("context_length_exceeded"), std::string("messages[1]")));
  EXPECT_EQ(refused(3, 1), std::tuple(0, std::string(), std::string()));
  EXPECT_EQ(std::get<1>(refused(2, 1)), "queue_full") << "one would fit, two don't";
  EXPECT_EQ(engine->stats().requests.accepted, 3U);
  EXPECT_EQ(refused(1, 1), std::tuple(0, std::string(), std::string()));
  gate.open();
  EXPECT_TRUE(engine->drain(20s));
  EXPECT_EQ(engine->stats().requests.finished, 4U);
}

TEST(Engine, AFaultIsToldToTheOperatorToo) {
  std::mutex mutex;
  std::vector<std::string> told;
  EngineOptions engine_options{.batch = 2, .context = 100};
  engine_options.on_fault = [&](const std::string& message) {
    const std::lock_guard lock(mutex);
    told.push_back(message);
  };
  ScriptedOptions options;
  options.fault = [](std::span<const std::int32_t> history, int prompt_tokens) {
    return prompt_tokens == 3 && history.size() > 5 ? std::optional<std::string>("a broken weight") : std::nullopt;
  };
  auto engine = test::scripted_engine(engine_options, options);
  const auto good = std::make_shared<RecordingSink>(), bad = std::make_shared<RecordingSink>();
  engine->submit(request("x", 9), good);
  auto broken = request("xyz", 9);
  broken.id = "cmpl-7";
  engine->submit(std::move(broken), bad);
  EXPECT_TRUE(engine->drain(20s));
  EXPECT_FALSE(good->error());
  ASSERT_TRUE(bad->error());
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0], "cmpl-7: " + std::string(bad->error()->what()));
}

TEST(Engine, StopEndsWhatRunsAndWhatWaits) {
  auto engine = test::scripted_engine({.batch = 1, .max_queue = 2, .context = 100000}, {});
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 2; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    engine->submit(request("x", 90000), sinks.back());
  }
  ASSERT_TRUE(sinks[0]->wait_events(2));
  engine->stop();
  EXPECT_TRUE(engine->drain(20s));
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->error());
    EXPECT_EQ(sink->error()->status(), 503);
  }
}

TEST(Engine, CancelFreesRowsWithinAStep) {
  StepGate gate;
  gate.close();
  ScriptedOptions options;
  options.on_launch = [&](const models::StepPlan&, int) { gate.pass(); };
  std::shared_ptr<ScriptedForward> forward;
  auto engine = test::scripted_engine({.batch = 1, .prefill_step = 64, .context = 1000}, options, &forward);
  auto running = std::make_shared<RecordingSink>();
  auto queued = std::make_shared<RecordingSink>();
  auto running_ticket = engine->submit(request("x", 500), running);
  auto queued_ticket = engine->submit(request("x", 500), queued);
  gate.allow(3);
  ASSERT_TRUE(running->wait_events(3));
  queued_ticket->cancel();
  gate.allow(2);
  ASSERT_TRUE(queued->wait());
  EXPECT_EQ(queued->finish(), FinishReason::cancelled);
  EXPECT_FALSE(running->finish().has_value());
  running_ticket->cancel();
  gate.allow(1);
  ASSERT_TRUE(running->wait());
  EXPECT_EQ(running->finish(), FinishReason::cancelled);
  gate.open();
  EXPECT_TRUE(engine->drain(20s));
  EXPECT_EQ(forward->joins(), 1);
  EXPECT_EQ(forward->rows(), 0);
  EXPECT_LE(forward->launches(), 6);
}

TEST(Engine, SeededRowsOnAVariantForwardDrainToTheSerialLane) {
  StepGate gate;
  gate.close();
  ScriptedOptions options;
  options.traits = {.split_forwards = true, .look_ahead = true, .invariant = false, .vocab = test::kVocab};
  auto batched = std::make_shared<ScriptedForward>(options);
  int serial_saw_batched_rows = 0;
  options.on_launch = [&](const models::StepPlan&, int) { serial_saw_batched_rows += batched->rows(); };
  options.max_rows = 1;
  auto serial = std::make_shared<ScriptedForward>(options);
  options.on_launch = [&](const models::StepPlan&, int) { gate.pass(); };
  options.max_rows = 4;
  *batched = ScriptedForward(options);
  auto engine = start_engine({.batch = 4, .context = 200}, test::byte_tokenizer(), {test::kEos}, [&] {
    return Lanes{serial, batched};
  });
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 6; ++i) {
    auto made = request("abc", 10);
    if (i == 2 || i == 4) made.sampling = {.temperature = 1.0F, .seed = 7};
    if (i == 5) made.sampling = {.temperature = 0.0F, .seed = 7};  // greedy: a seed changes nothing
    sinks.push_back(std::make_shared<RecordingSink>());
    engine->submit(std::move(made), sinks.back());
  }
  gate.open();
  for (const auto& sink : sinks) ASSERT_TRUE(sink->wait());
  EXPECT_TRUE(engine->drain(20s));
  const Stats stats = engine->stats();
  EXPECT_EQ(stats.lanes.serial, 2U);
  EXPECT_EQ(stats.lanes.serial_reasons.at("seeded_on_stock"), 2U);
  EXPECT_EQ(stats.lanes.batched, 4U);
  EXPECT_EQ(serial_saw_batched_rows, 0);
  EXPECT_EQ(sinks[2]->text(), sinks[4]->text());
  EXPECT_EQ(sinks[0]->text(), sinks[5]->text());
}

TEST(Engine, DiesOnceAndSaysSo) {
  for (const int batch : {1, 4}) {
    ScriptedOptions options;
    options.on_launch = [](const models::StepPlan&, int launch) {
      if (launch == 5) throw std::runtime_error("device lost");
    };
    auto engine = test::scripted_engine({.batch = batch, .context = 200}, options);
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (int i = 0; i < 4; ++i) {
      sinks.push_back(std::make_shared<RecordingSink>());
      try {
        engine->submit(request("abc", 100), sinks.back());
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), 503);  // it may have died by now
        sinks.pop_back();
      }
    }
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->wait());
      ASSERT_TRUE(sink->error().has_value());
      EXPECT_EQ(sink->error()->status(), 500);
      EXPECT_EQ(sink->last_events(), 1);
    }
    EXPECT_FALSE(engine->healthy());
    std::string code;
    EXPECT_EQ(refusal(*engine, request("abc", 5), &code), 503);
    EXPECT_EQ(code, "engine_dead");
    EXPECT_TRUE(engine->drain(5s));
  }
}

TEST(Engine, LoaderErrorsReachTheCaller) {
  EXPECT_THROW(start_engine({}, test::byte_tokenizer(), {}, []() -> Lanes { throw ModelError("no such file"); }),
               ModelError);
  EXPECT_THROW(start_engine({.batch = 2}, test::byte_tokenizer(), {},
                            [] {
                              return Lanes{std::make_shared<ScriptedForward>(ScriptedOptions{}), nullptr};
                            }),
               Error);
}

TEST(Engine, DestructionEndsLivingRows) {
  for (const int batch : {1, 3}) {
    ScriptedOptions options;
    options.traits.look_ahead = true;
    options.step_time = 1ms;
    auto engine = test::scripted_engine({.batch = batch, .context = 100000}, options);
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (int i = 0; i < 5; ++i) {
      sinks.push_back(std::make_shared<RecordingSink>());
      engine->submit(request("abc", 90000), sinks.back());
    }
    ASSERT_TRUE(sinks[0]->wait_events(3));
    engine.reset();
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->error().has_value());
      EXPECT_EQ(sink->error()->status(), 503);
      EXPECT_EQ(sink->last_events(), 1);
    }
  }
}

struct Soaked {
  GenerationRequest made;
  std::shared_ptr<RecordingSink> sink = std::make_shared<RecordingSink>();
  std::shared_ptr<Ticket> ticket;
  bool cancelled = false;
};

TEST(Engine, SoakTwoThousandRequestsEqualTheirSoloRuns) {
  constexpr int kRequests = 2000;
  ScriptedOptions options;
  options.traits.look_ahead = true;
  options.script = test::babble(12);
  options.budget_tokens = 300;
  options.max_rows = 8;
  options.max_prompt_tokens = 32;
  std::mt19937 random(20240601);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<Soaked> all(kRequests);
  for (Soaked& one : all) {
    std::string prompt;
    for (int n = 1 + below(below(10) == 0 ? 120 : 12); n > 0; --n) prompt += static_cast<char>('a' + below(26));
    one.made = request(prompt, 1 + below(24));
    if (below(2) == 0) one.made.sampling = {.temperature = 1.0F, .top_p = 0.9F, .seed = random()};
    if (below(4) == 0) one.made.stop = {std::string(1, static_cast<char>('a' + below(26))), "the"};
    one.made.ignore_eos = below(8) == 0;
    one.cancelled = below(6) == 0;
  }
  {
    std::shared_ptr<ScriptedForward> forward;
    const EngineOptions serving{
        .batch = 8, .prompt_concurrency = 4, .prefill_step = 32, .max_queue = kRequests, .context = 200};
    auto engine = test::scripted_engine(serving, options, &forward);
    std::vector<std::thread> clients;
    for (int c = 0; c < 4; ++c) {
      clients.emplace_back([&, c] {
        for (std::size_t i = static_cast<std::size_t>(c); i < all.size(); i += 4) {
          Soaked& one = all[i];
          one.ticket = engine->submit(one.made, one.sink);
          if (!one.cancelled) continue;
          if (i % 3 == 0) one.sink->wait_events(1 + i % 4);  // while it runs
          one.ticket->cancel();
        }
      });
    }
    for (auto& client : clients) client.join();
    ASSERT_TRUE(engine->drain(120s));
    EXPECT_TRUE(engine->healthy());
    EXPECT_TRUE(eventually([&] { return engine->stats().batch.active_rows == 0; }));
    const Stats stats = engine->stats();
    EXPECT_EQ(stats.requests.accepted, static_cast<std::uint64_t>(kRequests));
    EXPECT_EQ(stats.requests.finished + stats.requests.cancelled, static_cast<std::uint64_t>(kRequests));
    EXPECT_GT(stats.requests.cancelled, 50U);
    EXPECT_EQ(stats.batch.prefilling_rows, 0);
    EXPECT_EQ(stats.batch.pending_rows, 0);
    EXPECT_EQ(stats.batch.peak_rows, 8);
    EXPECT_EQ(stats.kv.used_bytes, 0U);
    EXPECT_EQ(stats.kv.reserved_bytes, 0U);
    EXPECT_LE(forward->peak_reserved_tokens(), 300);
    engine.reset();
    EXPECT_EQ(forward->rows(), 0);
    EXPECT_EQ(forward->in_flight(), 0);
  }
  auto solo = test::scripted_engine({.batch = 1, .prefill_step = 32, .max_queue = kRequests, .context = 200}, options);
  for (Soaked& one : all) {
    ASSERT_EQ(one.sink->last_events(), 1);
    if (one.sink->finish() == FinishReason::cancelled) {
      ASSERT_TRUE(one.cancelled);
      continue;
    }
    auto sink = std::make_shared<RecordingSink>();
    solo->submit(one.made, sink);
    ASSERT_TRUE(sink->wait());
    ASSERT_EQ(one.sink->text(), sink->text());
    ASSERT_EQ(one.sink->finish(), sink->finish());
    ASSERT_EQ(one.sink->usage().completion_tokens, sink->usage().completion_tokens);
  }
}

TEST(Throughput, SlidesOverTenSecondsOfClockAndCountsWork) {
  ThroughputWindow window;
  const ThroughputWindow::Clock::time_point start{};
  EXPECT_EQ(window.rates(start).decode_tok_s, 0.0);
  for (int i = 0; i < 40; ++i) window.add(start + i * 100ms, 50ms, 100, 10);
  EXPECT_NEAR(window.rates(start + 4s).decode_tok_s, 200.0, 1e-6);
  EXPECT_NEAR(window.rates(start + 4s).prefill_tok_s, 2000.0, 1e-6);
  EXPECT_EQ(window.rates(start + 15s).decode_tok_s, 0.0);
  window.add(start + 15s, 1s, 0, 7);
  EXPECT_NEAR(window.rates(start + 15s).decode_tok_s, 7.0, 1e-6);
}

}  // namespace
}  // namespace galley::serve
