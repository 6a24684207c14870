#include <gtest/gtest.h>

#include "text/tokenizer.h"

namespace galley::text {
namespace {

struct Outcome {
  std::string text;
  bool stopped;
  bool operator==(const Outcome&) const = default;
};

Outcome run(std::vector<std::string> stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(std::move(stops));
  std::string text;
  for (const std::string& piece : pieces) {
    const auto result = matcher.push(piece);
    text += result.text;
    if (result.stopped) return {text, true};
  }
  const auto rest = matcher.finish();
  return {text + rest.text, rest.stopped};
}

TEST(StopMatcher, WithoutStopsEverythingPasses) {
  StopMatcher matcher({});
  EXPECT_TRUE(matcher.empty());
  EXPECT_EQ(matcher.push("abc").text, "abc");
  EXPECT_TRUE(StopMatcher({""}).empty());
}

TEST(StopMatcher, AcrossPieces) {
  StopMatcher matcher({"END"});
  EXPECT_EQ(matcher.push("xE").text, "x");
  EXPECT_EQ(matcher.push("N").text, "");
  const auto result = matcher.push("Dy");
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.text, "");
}

TEST(StopMatcher, HeldTextComesBackWhenItIsNoStop) {
  StopMatcher matcher({"END"});
  EXPECT_EQ(matcher.push("EN").text, "");
  EXPECT_EQ(matcher.push("EN").text, "EN");
  EXPECT_EQ(matcher.push("x").text, "ENx");
  EXPECT_EQ(matcher.push("E").text, "");
  EXPECT_EQ(matcher.flush(), "E");
  EXPECT_EQ(matcher.flush(), "");
}

TEST(StopMatcher, AtTheFirstCharacter) { EXPECT_EQ(run({"a"}, {"abc"}), (Outcome{"", true})); }

TEST(StopMatcher, EarliestWins) {
  EXPECT_EQ(run({"c", "b"}, {"abc"}), (Outcome{"a", true}));
  EXPECT_EQ(run({"aab"}, {"aaaab"}), (Outcome{"aa", true}));
}

TEST(StopMatcher, ResultDoesNotDependOnTheCut) {
  const std::string text = "ab bc b\xF0\x9F\x98\x80 bcdx";
  for (const auto& stops : std::vector<std::vector<std::string>>{
           {"bcd", "c"}, {"bcd"}, {"\xF0\x9F\x98\x80"}, {"\xF0\x9F\x98\x80 b", "x"}, {"zz"}, {"dxy", "x"}}) {
    const Outcome whole = run(stops, {text});
    std::vector<std::string> single;
    for (char c : text) single.emplace_back(1, c);
    EXPECT_EQ(run(stops, single), whole);
    for (std::size_t cut = 0; cut <= text.size(); ++cut) {
      EXPECT_EQ(run(stops, {text.substr(0, cut), text.substr(cut)}), whole) << cut;
    }
  }
}

TEST(StopMatcher, AShorterStopInsideALongerUnfinishedOne) {
  EXPECT_EQ(run({"bcd", "c"}, {"ab", "c"}), (Outcome{"ab", true}));
  EXPECT_EQ(run({"bcd", "c"}, {"ab", "c", "d"}), (Outcome{"a", true}));
}

}  // namespace
}  // namespace galley::text
