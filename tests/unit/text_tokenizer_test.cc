#include <gtest/gtest.h>

#include "ops/error.h"
#include "text/tokenizer.h"
#include "text_fixture.h"

namespace galley::text {
namespace {

using namespace fixture;
using Ids = std::vector<std::int32_t>;

std::int32_t byte_id(unsigned byte) { return kFirstByte + static_cast<std::int32_t>(byte); }

class TokenizerTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Tokenizer> tokenizer_ = make_tokenizer(chatml());
};

TEST_F(TokenizerTest, MergesAndDecodes) {
  EXPECT_EQ(tokenizer_->encode("hello", false), (Ids{kHello}));
  EXPECT_EQ(tokenizer_->encode("hello h", false), (Ids{kHello, kSpaceH}));
  EXPECT_EQ(tokenizer_->encode("", true), Ids{});
  EXPECT_EQ(tokenizer_->decode(Ids{kHello, kSpaceH}), "hello h");
  EXPECT_EQ(tokenizer_->decode(Ids{}), "");
  const std::string text = "na\xC3\xAFve \xF0\x9F\x98\x80 12\t\n\n x";
  EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(text, true)), text);
}

TEST_F(TokenizerTest, SpecialTokens) {
  EXPECT_EQ(tokenizer_->encode("<|im_start|>hello<|im_end|>", true), (Ids{kImStart, kHello, kImEnd}));
  const Ids plain = tokenizer_->encode("<|im_end|>", false);
  EXPECT_EQ(plain.size(), 10u);
  EXPECT_EQ(tokenizer_->decode(plain), "<|im_end|>");
  EXPECT_EQ(tokenizer_->decode(Ids{kImStart, kHello, kImEnd}), "hello");
  EXPECT_EQ(tokenizer_->encode("<think>", false), (Ids{kThink}));
  EXPECT_EQ(tokenizer_->decode(Ids{kThink}), "<think>");
}

TEST_F(TokenizerTest, MarkedSpecialTokensAreTheirPlainSpelling) {
  EXPECT_EQ(tokenizer_->encode("he<\xEF\xB7\x90|im_end|>", true), tokenizer_->encode("he<|im_end|>", false));
  // The mark leaves no seam: words around it merge as if it were never there.
  EXPECT_EQ(tokenizer_->encode("h\xEF\xB7\x90"
                               "ello<|im_end|>",
                               true),
            (Ids{kHello, kImEnd}));
}

TEST_F(TokenizerTest, Vocabulary) {
  EXPECT_EQ(tokenizer_->vocab_size(), kSpaceH + 1);
  EXPECT_EQ(tokenizer_->token_id("<|im_end|>"), kImEnd);
  EXPECT_EQ(tokenizer_->token_id("hello"), kHello);
  EXPECT_EQ(tokenizer_->token_id("nothing"), -1);
  EXPECT_EQ(tokenizer_->token_name(kImEnd), "<|im_end|>");
  EXPECT_EQ(tokenizer_->token_name(kHello), "hello");
  EXPECT_EQ(tokenizer_->token_name(kSpaceH + 1), "");
  EXPECT_EQ(tokenizer_->token_name(-1), "");
  EXPECT_EQ(tokenizer_->longest_token(), std::string("<|endoftext|>").size());
  EXPECT_EQ(tokenizer_->token_bytes(kHello), "hello");
  EXPECT_EQ(tokenizer_->token_bytes(byte_id(0xF0)), "\xF0");
  EXPECT_EQ(tokenizer_->token_bytes(byte_id(0)), std::string(1, '\0'));
  EXPECT_EQ(tokenizer_->token_bytes(kSpaceH), " h");
  EXPECT_EQ(tokenizer_->token_bytes(kImEnd), "");
  EXPECT_EQ(tokenizer_->token_bytes(kThink), "<think>");
  EXPECT_EQ(tokenizer_->token_bytes(-1), "");
  EXPECT_EQ(tokenizer_->token_bytes(1 << 30), "");
}

TEST_F(TokenizerTest, EmojiSplitAcrossTokens) {
  auto stream = tokenizer_->stream();
  EXPECT_EQ(stream->push(kHello), "hello");
  EXPECT_EQ(stream->push(byte_id(0xF0)), "");
  EXPECT_EQ(stream->push(byte_id(0x9F)), "");
  EXPECT_EQ(stream->push(byte_id(0x98)), "");
  EXPECT_EQ(stream->push(byte_id(0x80)), "\xF0\x9F\x98\x80");
  EXPECT_EQ(stream->push(kImEnd), "");
  EXPECT_EQ(stream->push(kSpaceH), " h");
  EXPECT_EQ(stream->flush(), "");
}

TEST_F(TokenizerTest, IncompleteAndInvalidBytes) {
  auto stream = tokenizer_->stream();
  EXPECT_EQ(stream->push(byte_id(0xE2)), "");
  EXPECT_EQ(stream->push(byte_id(0x82)), "");
  EXPECT_EQ(stream->flush(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream->push(byte_id(0xAC)), "\xEF\xBF\xBD");  // afresh: no longer the end of a euro sign
  EXPECT_EQ(stream->push(byte_id(0xFF)), "\xEF\xBF\xBD");
  EXPECT_EQ(stream->push(byte_id(0xF0)), "");
  EXPECT_EQ(stream->push(kHe), "\xEF\xBF\xBDhe");
}

TEST_F(TokenizerTest, StreamedPiecesConcatenateToTheWholeText) {
  const Ids ids = {byte_id(0xF0), kHello,        byte_id(0xC3), byte_id(0xA9), kImEnd,
                   byte_id(0xE2), byte_id(0x82), byte_id(0xE2), byte_id(0x82), byte_id(0xAC),
                   byte_id(0x80), byte_id(0xF0), byte_id(0x9F)};
  auto stream = tokenizer_->stream();
  std::string text;
  for (const std::int32_t id : ids) text += stream->push(id);
  text += stream->flush();
  EXPECT_EQ(text, tokenizer_->decode(ids));
}

TEST_F(TokenizerTest, TextThatIsNotUtf8IsTheCallersFault) {
  try {
    (void)tokenizer_->encode("\xFF", true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), 400);
    EXPECT_STREQ(error.what(), "text is not valid UTF-8");
  }
}

TEST(MakeTokenizer, RefusesWhatItCannotUse) {
  const auto message_of = [](const Assets& assets) -> std::string {
    try {
      (void)make_tokenizer(assets);
    } catch (const ModelError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message_of({}).find("no tokenizer"), std::string::npos);
  Assets assets = chatml();
  assets.vocabulary.pre = "martian";
  EXPECT_NE(message_of(assets).find("martian"), std::string::npos);
  assets = chatml();
  assets.vocabulary.types.pop_back();
  EXPECT_NE(message_of(assets).find("token_type has"), std::string::npos);
  assets = chatml();
  assets.vocabulary.merges.push_back("q zz");
  EXPECT_NE(message_of(assets).find("tokenizer metadata: "), std::string::npos);
  assets = {};
  assets.tokenizer_json = "{\"version\": ";
  EXPECT_NE(message_of(assets).find("tokenizer: "), std::string::npos);
}

}  // namespace
}  // namespace galley::text
