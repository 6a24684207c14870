// The scheduling policies, tick by tick, over a scripted forward that checks its contract at every call.
#include "serve/scheduler.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "serve/prefill_plan.h"
#include "serve/serial_lane.h"
#include "support/scripted_forward.h"

namespace galley::serve {
namespace {

using test::bytes_of;
using test::RecordingSink;
using test::ScriptedForward;
using test::ScriptedOptions;

models::ForwardTraits traits(bool split, bool look_ahead) {
  return {.split_forwards = split, .look_ahead = look_ahead, .invariant = true, .vocab = test::kVocab};
}

std::vector<std::int32_t> prompt_of(int tokens, int salt = 0) {
  std::vector<std::int32_t> prompt;
  for (int i = 0; i < tokens; ++i) prompt.push_back('a' + (i * 7 + salt) % 26);
  return prompt;
}

struct Client {
  std::shared_ptr<RecordingSink> sink = std::make_shared<RecordingSink>();
  std::shared_ptr<Ticket> ticket = std::make_shared<Ticket>();
  std::vector<std::int32_t> tokens;  ///< every token taken
};

/// A scheduler driven by hand; remembers every plan.
class Bench {
 public:
  Bench(ScriptedOptions options, SchedulerOptions scheduling) {
    options.on_launch = [this, hook = options.on_launch](const models::StepPlan& plan, int launch) {
      plans.push_back(plan);
      if (hook) hook(plan, launch);
    };
    forward = std::make_unique<ScriptedForward>(options);
    scheduler = std::make_unique<Scheduler>(*forward, scheduling, &tally);
  }
  ~Bench() {
    scheduler.reset();
    forward.reset();
  }

  std::shared_ptr<Client> add(std::vector<std::int32_t> prompt, int max_tokens, std::vector<std::string> stop = {},
                              bool ignore_eos = false) {
    auto client = std::make_shared<Client>();
    GenerationRequest request;
    request.prompt = std::move(prompt);
    request.max_tokens = max_tokens;
    request.stop = std::move(stop);
    request.ignore_eos = ignore_eos;
    auto row = std::make_unique<Row>(context, std::move(request), client->sink, client->ticket);
    row->observe([client](const sample::Choice& choice) { client->tokens.push_back(choice.token); });
    ++tally.live;
    scheduler->enqueue(std::move(row));
    return client;
  }
  int run(int most = 10000) {
    int ticks = 0;
    for (; !scheduler->idle() && ticks < most; ++ticks) scheduler->tick();
    return ticks;
  }

  std::shared_ptr<const text::Tokenizer> tokenizer = test::byte_tokenizer();
  std::vector<std::int32_t> end_ids{test::kEos};
  Tally tally;
  RowContext context{tokenizer.get(), end_ids, &tally};
  std::vector<models::StepPlan> plans;  ///< spans in them are void after the launch
  std::unique_ptr<ScriptedForward> forward;
  std::unique_ptr<Scheduler> scheduler;
};

std::string plan_text(const models::StepPlan& plan) {  // "d0,1 p2:5 e3:1"
  std::ostringstream text;
  const char* between = "d";
  for (const auto id : plan.decode) {
    text << between << id;
    between = ",";
  }
  between = plan.decode.empty() ? "" : " ";
  for (const auto& part : plan.prompt) {
    text << between << (part.emits ? 'e' : 'p') << part.row << ':' << part.tokens.size();
    between = " ";
  }
  return text.str();
}

std::vector<std::string> plan_texts(const std::vector<models::StepPlan>& plans) {
  std::vector<std::string> texts;
  for (const auto& plan : plans) texts.push_back(plan_text(plan));
  return texts;
}

using Lines = std::vector<std::string>;

TEST(PrefillPlan, OldestIsSureOfItsShareAndShortOnesGoFirst) {
  const auto share = [](std::vector<std::size_t> left, std::size_t budget) { return share_prefill(left, budget); };
  using Shares = std::vector<std::size_t>;
  EXPECT_EQ(share({1000}, 512), (Shares{512}));
  EXPECT_EQ(share({1000, 10}, 512), (Shares{502, 10}));
  EXPECT_EQ(share({1000, 900, 10}, 300), (Shares{100, 190, 10}));
  EXPECT_EQ(share({130, 130, 130, 130, 130}, 512), (Shares{130, 130, 130, 122, 0}));
  EXPECT_EQ(share({5, 5, 5}, 2), (Shares{2, 0, 0}));
  EXPECT_EQ(share({3, 4}, 100), (Shares{3, 4}));
}

TEST(RaggedTick, ChunksPrefillBetweenDecodeStepsAndJoinsMidDecode) {
  ScriptedOptions options;
  options.traits = traits(false, false);
  options.script = test::say("abcdefgh");
  options.max_prompt_tokens = 4;
  Bench bench(options, {.batch = 4, .prompt_concurrency = 2, .prefill_step = 4});
  auto a = bench.add(prompt_of(3), 4);
  bench.scheduler->tick();
  auto b = bench.add(prompt_of(10), 4);
  auto c = bench.add(prompt_of(1), 2);
  bench.run();
  EXPECT_EQ(plan_texts(bench.plans), (Lines{"e0:3", "d0 p1:3 e2:1", "d0,2 p1:4", "d0 e1:3", "d1", "d1", "d1"}));
  EXPECT_EQ(a->sink->text(), "abcd");
  EXPECT_EQ(b->sink->text(), "abcd");
  EXPECT_EQ(c->sink->text(), "ab");
  EXPECT_EQ(a->sink->finish(), FinishReason::length);
  EXPECT_EQ(bench.forward->rows(), 0);
  EXPECT_EQ(bench.tally.prompt_tokens, 14U);
  EXPECT_EQ(bench.tally.completion_tokens, 10U);
}

TEST(RaggedTick, LookAheadRidesAlongOnlyPastUnforeseenEnds) {
  ScriptedOptions options;
  options.traits = traits(false, true);
  options.script = test::say("ab");  // then end of sequence
  Bench bench(options, {.batch = 2, .prompt_concurrency = 2, .prefill_step = 16});
  auto by_length = bench.add(prompt_of(2), 2);
  bench.run();
  EXPECT_EQ(plan_texts(bench.plans), (Lines{"e0:2", "d0"}));  // the last token is foreseen: nothing rides
  EXPECT_EQ(bench.forward->dropped(), 0);
  bench.plans.clear();
  auto by_eos = bench.add(prompt_of(2), 8);
  bench.run();
  EXPECT_EQ(plan_texts(bench.plans), (Lines{"e1:2", "d1", "d1", "d1"}));  // the last one rode along
  EXPECT_EQ(bench.forward->dropped(), 1);
  EXPECT_EQ(by_eos->sink->finish(), FinishReason::stop);
  EXPECT_EQ(by_eos->sink->text(), "ab");
  EXPECT_EQ(by_eos->sink->usage().completion_tokens, 3);
}

TEST(SplitTick, IsMlxLmsTick) {
  ScriptedOptions options;
  options.traits = traits(true, true);
  options.script = test::say("abcdefgh");
  options.max_prompt_tokens = 4;
  Bench bench(options, {.batch = 3, .prompt_concurrency = 2, .prefill_step = 4});
  bench.add(prompt_of(6), 3);
  bench.add(prompt_of(1), 2);
  bench.add(prompt_of(2), 1);
  bench.add(prompt_of(3), 1);
  bench.run();
  EXPECT_EQ(plan_texts(bench.plans),
            (Lines{
                "e1:1 p0:4",  // tick 1: row 1 has one token left at once
                "d1",         // tick 2: decode G
                "p0:1 p2:1",  //         P is refilled; a piece never crosses into the last token
                "d1",         // tick 3: row 1's second token is seen here, it rides along
                "e0:1 e2:1",  //         both leave P, emitting alone
                "d0,2",       // tick 4: row 2's only token is seen, it rides
                "p3:2",       //         a place is free in G
                "d0",         // tick 5
                "e3:1",       //
                "d0,3",       // tick 6: row 0's third and row 3's first are seen
            }));
}

TEST(SplitTick, FullBatchStallsPromptsAndOvershootNeedsLeave) {
  for (const int max_rows : {0, 4}) {
    ScriptedOptions options;
    options.traits = traits(true, true);
    options.script = test::say("abcdefghijklmnop");
    Bench bench(options, {.batch = 2, .prompt_concurrency = 2, .prefill_step = 4, .max_rows = max_rows});
    bench.add(prompt_of(1), 12);
    bench.scheduler->tick();
    bench.add(prompt_of(5), 4);
    bench.scheduler->tick();
    bench.add(prompt_of(5), 4);
    bench.run();
    EXPECT_EQ(bench.forward->peak_rows(), max_rows == 0 ? 2 : 3);
    EXPECT_EQ(bench.tally.finished, 3U);
  }
}

TEST(Scheduler, EveryPolicyGivesEveryRowItsSoloAnswer) {
  for (const bool split : {false, true}) {
    for (const bool look_ahead : {false, true}) {
      ScriptedOptions options;
      options.traits = traits(split, look_ahead);
      options.script = test::babble(20);
      options.max_prompt_tokens = 5;
      options.max_rows = 4;
      Bench bench(options, {.batch = 4, .prompt_concurrency = 3, .prefill_step = 5});
      std::vector<std::shared_ptr<Client>> clients;
      for (int i = 0; i < 30; ++i) clients.push_back(bench.add(prompt_of(1 + i * 5 % 17, i), 1 + i * 3 % 23));
      bench.run();
      for (int i = 0; i < 30; ++i) {
        Bench solo(options, {.batch = 1, .prompt_concurrency = 1, .prefill_step = 5});
        auto alone = solo.add(prompt_of(1 + i * 5 % 17, i), 1 + i * 3 % 23);
        solo.run();
        const auto& client = clients[static_cast<std::size_t>(i)];
        EXPECT_EQ(client->tokens, alone->tokens) << i;
        EXPECT_EQ(client->sink->finish(), alone->sink->finish());
        EXPECT_EQ(client->sink->last_events(), 1);
      }
      EXPECT_EQ(bench.forward->rows(), 0);
      EXPECT_EQ(bench.forward->kv().reserved_bytes, 0U);
      EXPECT_EQ(bench.tally.live, 0);
    }
  }
}

TEST(SerialLane, GivesTheSameAnswersInGenerateStepsOrder) {
  for (const bool split : {false, true}) {
    for (const bool look_ahead : {false, true}) {
      ScriptedOptions options;
      options.traits = traits(split, look_ahead);
      options.script = test::say("abc");
      options.max_rows = 1;
      std::vector<models::StepPlan> plans;
      options.on_launch = [&](const models::StepPlan& plan, int) { plans.push_back(plan); };
      ScriptedForward forward(options);
      SerialLane lane(forward, 4);
      const RowContext context{nullptr, {}, nullptr};  // no tokenizer: tokens only
      GenerationRequest request;
      request.prompt = prompt_of(9);
      request.max_tokens = 3;
      auto row = std::make_unique<Row>(context, request, nullptr, nullptr);
      std::vector<std::int32_t> tokens;
      row->observe([&](const sample::Choice& choice) { tokens.push_back(choice.token); });
      lane.start(std::move(row));
      while (lane.busy()) lane.step();
      EXPECT_EQ(tokens, bytes_of("abc"));
      EXPECT_EQ(plan_texts(plans), (Lines{"p0:4", "p0:4", "e0:1", "d0", "d0"}));
      EXPECT_EQ(forward.rows(), 0);
      EXPECT_EQ(forward.in_flight(), 0);
    }
  }
}

TEST(Scheduler, RowsLeaveWithinOneTickForEveryReason) {
  for (const bool look_ahead : {false, true}) {
    ScriptedOptions options;
    options.traits = traits(false, look_ahead);
    options.script = test::say("one two three four five six");
    Bench bench(options, {.batch = 4, .prompt_concurrency = 4, .prefill_step = 64});
    auto stopped = bench.add(prompt_of(2), 100, {"two"});
    auto length = bench.add(prompt_of(2), 9);
    auto cancelled = bench.add(prompt_of(2), 100);
    auto ended = bench.add(prompt_of(2), 100);
    const int lag = look_ahead ? 1 : 0;
    for (int i = 0; i < 7 + lag; ++i) {
      EXPECT_EQ(bench.scheduler->active(), i == 0 ? 0 : 4);
      bench.scheduler->tick();
    }
    EXPECT_EQ(stopped->sink->text(), "one ");  // seven tokens complete the stop string
    EXPECT_EQ(stopped->sink->finish(), FinishReason::stop);
    EXPECT_EQ(stopped->sink->usage().completion_tokens, 7);
    EXPECT_EQ(bench.forward->rows(), 3);
    bench.scheduler->tick();
    cancelled->ticket->cancel();
    bench.scheduler->tick();
    EXPECT_EQ(cancelled->sink->finish(), FinishReason::cancelled);
    EXPECT_EQ(length->sink->finish(), FinishReason::length);
    EXPECT_EQ(length->sink->text(), "one two t");
    EXPECT_EQ(bench.forward->rows(), 1);
    bench.run();
    EXPECT_EQ(ended->sink->text(), "one two three four five six");
    EXPECT_EQ(ended->sink->finish(), FinishReason::stop);
    EXPECT_EQ(bench.forward->rows(), 0);
    EXPECT_EQ(bench.tally.finished, 3U);
    EXPECT_EQ(bench.tally.cancelled, 1U);
  }
}

TEST(Scheduler, CancelIsHonouredInEveryState) {
  for (const bool split : {false, true}) {
    ScriptedOptions options;
    options.traits = traits(split, true);
    Bench bench(options, {.batch = 2, .prompt_concurrency = 2, .prefill_step = 4});
    auto decoding = bench.add(prompt_of(2), 50);
    auto prefilling = bench.add(prompt_of(100), 50);
    auto queued = bench.add(prompt_of(2), 50);
    for (int i = 0; i < 4; ++i) bench.scheduler->tick();
    EXPECT_EQ(bench.scheduler->prefilling(), 1);
    EXPECT_EQ(bench.scheduler->pending(), 1);
    const int joins = bench.forward->joins();
    for (const auto& client : {queued, prefilling, decoding}) {
      client->ticket->cancel();
      bench.scheduler->tick();
      EXPECT_EQ(client->sink->finish(), FinishReason::cancelled);
      EXPECT_EQ(client->sink->last_events(), 1);
    }
    EXPECT_EQ(bench.forward->joins(), joins);  // the queued one never ran
    EXPECT_EQ(bench.forward->rows(), 0);
    bench.run();
    EXPECT_TRUE(bench.scheduler->idle());
  }
}

TEST(Scheduler, TheHeadWaitsForMemoryAndNobodyPassesIt) {
  ScriptedOptions options;
  options.script = test::say("abcdefghijklmnopqrstuvwxyz");
  options.budget_tokens = 40;
  Bench bench(options, {.batch = 8, .prompt_concurrency = 8, .prefill_step = 64});
  auto a = bench.add(prompt_of(10), 10);    // 20 tokens
  auto big = bench.add(prompt_of(20), 15);  // 35: waits for a
  auto small = bench.add(prompt_of(1), 2);  // would fit, but came later
  bench.scheduler->tick();
  EXPECT_EQ(bench.scheduler->active(), 1);
  EXPECT_EQ(bench.scheduler->pending(), 2);
  bench.run();
  EXPECT_EQ(small->sink->text(), "ab");
  EXPECT_EQ(big->sink->usage().completion_tokens, 15);
  EXPECT_LE(bench.forward->peak_reserved_tokens(), 40);
  EXPECT_EQ(bench.forward->joins(), 3);
  // What can never fit is refused as that row's own affair.
  auto never = bench.add(prompt_of(30), 30);
  auto after = bench.add(prompt_of(1), 1);
  bench.run();
  ASSERT_TRUE(never->sink->error().has_value());
  EXPECT_EQ(never->sink->error()->status(), 503);
  EXPECT_EQ(after->sink->finish(), FinishReason::length);
}

TEST(Scheduler, OneRowsFaultIsItsOwn) {
  for (const bool look_ahead : {false, true}) {
    ScriptedOptions options;
    options.traits = traits(false, look_ahead);
    options.fault = [](std::span<const std::int32_t> history, int prompt) -> std::optional<std::string> {
      if (prompt == 5 && history.size() == 8) return "grammar broke";
      return std::nullopt;
    };
    options.script = [inner = test::babble()](std::span<const std::int32_t> history, int prompt,
                                              std::span<float> logits) {
      inner(history, prompt, logits);
      if (prompt == 6 && history.size() == 8) logits[0] = std::numeric_limits<float>::quiet_NaN();
    };
    Bench bench(options, {.batch = 4, .prompt_concurrency = 4, .prefill_step = 64});
    auto good = bench.add(prompt_of(4), 20);
    auto faulty = bench.add(prompt_of(5), 20);
    auto infinite = bench.add(prompt_of(6), 20);
    bench.run();
    ASSERT_TRUE(faulty->sink->error().has_value());
    EXPECT_EQ(faulty->sink->error()->status(), 500);
    EXPECT_NE(std::string(faulty->sink->error()->what()).find("grammar broke"), std::string::npos);
    EXPECT_EQ(faulty->tokens.size(), 3U);
    EXPECT_EQ(infinite->sink->error()->code(), "non_finite_logits");
    EXPECT_EQ(infinite->tokens.size(), 2U);
    EXPECT_EQ(good->tokens.size(), 20U);
    EXPECT_EQ(bench.tally.failed, 2U);
    EXPECT_EQ(bench.forward->rows(), 0);
  }
}

class Recovery : public testing::TestWithParam<bool> {  // split forwards?
 protected:
  static constexpr std::int32_t kPoison = '#';  // the script never says it
  using Hook = std::function<void(const models::StepPlan&, int)>;
  std::vector<std::shared_ptr<Client>> run(Hook hook) {
    ScriptedOptions options;
    options.traits = traits(GetParam(), GetParam());
    options.script = test::babble();
    options.recovers = true;
    options.on_launch = std::move(hook);
    bench_ = std::make_unique<Bench>(options, SchedulerOptions{4, 4, 4, 0});
    std::vector<std::shared_ptr<Client>> clients;
    for (int i = 0; i < 5; ++i) {
      auto prompt = prompt_of(3 + 3 * i, i);
      if (i == 2) prompt.back() = kPoison;
      clients.push_back(bench_->add(std::move(prompt), 12 + i, {}, /*ignore_eos=*/true));
    }
    bench_->run();
    EXPECT_TRUE(bench_->scheduler->idle());
    EXPECT_EQ(bench_->tally.live, 0);
    return clients;
  }
  std::unique_ptr<Bench> bench_;
};

TEST_P(Recovery, AStepThatFailsOnceCostsNobodyAnything) {
  const auto expected = run({});
  for (const int failing : {0, 3, 9}) {
    int tried = 0;  // a launch that throws is not counted as one
    const auto clients = run([&tried, failing](const models::StepPlan&, int) {
      if (tried++ == failing) throw std::runtime_error("out of memory");
    });
    for (std::size_t i = 0; i < clients.size(); ++i) {
      EXPECT_EQ(clients[i]->sink->finish(), FinishReason::length) << i;
      EXPECT_EQ(clients[i]->sink->text(), expected[i]->sink->text()) << i;
      EXPECT_EQ(clients[i]->sink->usage().prompt_tokens, static_cast<int>(3 + 3 * i));
    }
  }
}

TEST_P(Recovery, OnlyTheRowThatFailsAgainAloneHasFailed) {
  const auto expected = run({});
  const auto poisoned = [](const models::StepPlan& plan, int) {
    for (const auto& part : plan.prompt) {
      if (part.tokens.back() == kPoison) throw std::runtime_error("bad token");
    }
  };
  const auto clients = run(poisoned);
  for (std::size_t i = 0; i < clients.size(); ++i) {
    if (i == 2) {
      ASSERT_TRUE(clients[i]->sink->error());
      EXPECT_EQ(clients[i]->sink->error()->code(), "row_fault");
      EXPECT_NE(std::string(clients[i]->sink->error()->what()).find("bad token"), std::string::npos);
    } else {
      EXPECT_EQ(clients[i]->sink->text(), expected[i]->sink->text()) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryPolicy, Recovery, testing::Bool(),
                         [](const auto& p) { return p.param ? "split" : "ragged"; });

}  // namespace
}  // namespace galley::serve
