#include "serve/prefill_pace.h"

#include <gtest/gtest.h>

namespace galley::serve {
namespace {

using Seconds = PrefillPace::Duration;

/// A machine on which rows and tokens take fixed times.
struct Machine {
  double decode = 0.030, token = 0.001;
  PrefillPace pace{2.5, 256};

  /// Makes a step as the pace asks for, and tells how long it took.
  double step(std::size_t decoding, std::size_t prompts) {
    const std::size_t tokens = pace.budget(decoding, prompts);
    const double taken = (decoding > 0 ? decode : 0) + static_cast<double>(tokens) * token;
    pace.note(decoding, tokens, Seconds(taken));
    return taken;
  }
};

TEST(PrefillPace, NobodyRunsSoPromptsTakeAll) {
  const PrefillPace pace(2.5, 256);
  EXPECT_EQ(pace.budget(0, 3), 256U);
}

TEST(PrefillPace, NoBoundMeansAll) {
  const PrefillPace pace(0, 256);
  EXPECT_EQ(pace.budget(4, 1), 256U);
}

TEST(PrefillPace, AStepWithAPromptStaysWithinTheStretch) {
  Machine machine;
  EXPECT_EQ(machine.pace.budget(4, 1), 0U) << "what a step takes must be seen first";
  std::size_t tokens = 0;
  for (int i = 0; i < 200; ++i) {
    tokens += machine.pace.budget(4, 1);
    EXPECT_LE(machine.step(4, 1), 2.5 * machine.decode * 1.01) << i;
  }
  // 45 tokens fill the 45 ms; some steps go without.
  EXPECT_GT(tokens, 190U * 43U);
}

TEST(PrefillPace, SlowerTokensMeanFewer) {
  Machine machine;
  for (int i = 0; i < 20; ++i) machine.step(4, 1);
  machine.token = 0.003;  // a long context, say
  for (int i = 0; i < 20; ++i) machine.step(4, 1);
  EXPECT_LE(machine.step(4, 1), 2.5 * machine.decode * 1.01);
  machine.decode = 0.060;  // and slower steps allow for more: seen at the next step without a prompt
  double longest = 0;
  for (int i = 0; i < 200; ++i) longest = std::max(longest, machine.step(4, 1));
  EXPECT_GT(longest, 2.2 * machine.decode);
}

TEST(PrefillPace, PromptsThatWaitCountLikeRowsThatRun) {
  Machine machine;
  for (int i = 0; i < 10; ++i) machine.step(2, 1);
  const std::size_t one = machine.pace.budget(2, 1);
  EXPECT_EQ(machine.pace.budget(2, 2), one);
  EXPECT_NEAR(static_cast<double>(machine.pace.budget(2, 6)), 3.0 * static_cast<double>(one), 3.0);
  EXPECT_EQ(machine.pace.budget(2, 1000), 256U) << "never more than a step may take";
}

TEST(PrefillPace, AnUnknownNumberOfRowsTakesAsLongAsTheNearest) {
  Machine machine;
  for (int i = 0; i < 10; ++i) machine.step(4, 1);
  const std::size_t known = machine.pace.budget(4, 1);
  EXPECT_EQ(machine.pace.budget(7, 1), known);
  EXPECT_EQ(machine.pace.budget(1, 1), known);
}

TEST(PrefillPace, PromptsGoOnHoweverDearTheyAre) {
  Machine machine;
  machine.token = 1.0;
  std::size_t tokens = 0;
  for (int i = 0; i < 100; ++i) {
    tokens += machine.pace.budget(4, 1);
    machine.step(4, 1);
  }
  EXPECT_GE(tokens, 95U);
}

}  // namespace
}  // namespace galley::serve
