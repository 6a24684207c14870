#include "text/tokenizer.h"

#include <utility>

#include "ops/error.h"
#include "text/bridge.h"

namespace galley::text {
namespace {

[[noreturn]] void raise_request_error(const std::string& message) { throw Error(400, message, "invalid_text"); }

class CrateStreamDecoder final : public StreamDecoder {
 public:
  explicit CrateStreamDecoder(rust::Box<bridge::Stream> stream) : stream_(std::move(stream)) {}

  std::string push(std::int32_t id) override {
    return call_crate([&] { return std::string(bridge::stream_push(*stream_, id)); }, raise_engine_error);
  }

  std::string flush() override {
    return call_crate([&] { return std::string(bridge::stream_flush(*stream_)); }, raise_engine_error);
  }

 private:
  [[noreturn]] static void raise_engine_error(const std::string& message) {
    throw Error(500, "can't decode the model's output: " + message, "decode_error");
  }

  rust::Box<bridge::Stream> stream_;
};

class CrateTokenizer final : public Tokenizer {
 public:
  explicit CrateTokenizer(rust::Box<bridge::Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)), vocab_size_(bridge::tokenizer_vocab_size(*tokenizer_)) {}

  std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const override {
    return call_crate(
        [&] {
          const auto ids = bridge::tokenizer_encode(*tokenizer_, to_rust(text), parse_special);
          return std::vector<std::int32_t>(ids.begin(), ids.end());
        },
        raise_request_error);
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    return call_crate([&] { return std::string(bridge::tokenizer_decode(*tokenizer_, to_slice(ids))); },
                      raise_request_error);
  }

  std::string token_bytes(std::int32_t id) const override {
    const auto bytes = bridge::tokenizer_token_bytes(*tokenizer_, id);
    return std::string(bytes.begin(), bytes.end());
  }

  std::string token_name(std::int32_t id) const override {
    return std::string(bridge::tokenizer_token_name(*tokenizer_, id));
  }

  std::int32_t token_id(std::string_view token) const override {
    return call_crate([&] { return bridge::tokenizer_token_id(*tokenizer_, to_rust(token)); }, raise_request_error);
  }

  int vocab_size() const override { return vocab_size_; }
  std::size_t longest_token() const override { return bridge::tokenizer_longest_token(*tokenizer_); }

  std::unique_ptr<StreamDecoder> stream() const override {
    return std::make_unique<CrateStreamDecoder>(bridge::stream_new(*tokenizer_));
  }

 private:
  rust::Box<bridge::Tokenizer> tokenizer_;
  int vocab_size_;
};

}  // namespace

std::shared_ptr<const Tokenizer> make_tokenizer(const Assets& assets) {
  if (!assets.tokenizer_json.empty()) {
    return call_crate(
        [&] {
          return std::make_shared<const CrateTokenizer>(bridge::tokenizer_from_json(to_rust(assets.tokenizer_json)));
        },
        [](const std::string& message) { throw ModelError("tokenizer: " + message); });
  }
  const GgufVocabulary& vocabulary = assets.vocabulary;
  if (vocabulary.tokens.empty()) {
    throw ModelError("the model has no tokenizer: neither a tokenizer.json nor tokenizer.ggml.* metadata");
  }
  return call_crate(
      [&] {
        return std::make_shared<const CrateTokenizer>(bridge::tokenizer_from_gguf(
            to_rust(vocabulary.model), to_rust(vocabulary.pre), vocabulary.tokens, to_slice(vocabulary.types),
            to_slice(vocabulary.scores), vocabulary.merges, vocabulary.add_space_prefix));
      },
      [](const std::string& message) { throw ModelError("tokenizer metadata: " + message); });
}

}  // namespace galley::text
