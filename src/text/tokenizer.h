// Tokenizer, incremental decoding and stop strings: the C++ face of the text crate.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/assets.h"

namespace galley::text {

/// Turns ids into text piece by piece. Never returns part of a UTF-8 character; what is incomplete is held back until
/// the next id or flush(). The pieces concatenate to the whole text. One thread at a time.
class StreamDecoder {
 public:
  virtual ~StreamDecoder() = default;
  virtual std::string push(std::int32_t id) = 0;
  /// What was held back; incomplete bytes become U+FFFD. The decoder starts afresh afterwards.
  virtual std::string flush() = 0;
};

/// Immutable and shared between threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// `parse_special`: whether text like "<|im_end|>" becomes its special token (templates) or plain text (users'
  /// words). With it, every U+FDD0 is dropped once special tokens are cut out: ChatTemplate::render puts this
  /// noncharacter into special tokens within people's own text, which so become plain text, spelled exactly as written.
  /// Nothing is added (no BOS). Throws galley::Error 400 when `text` is not UTF-8.
  [[nodiscard]] virtual std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const = 0;
  /// Whole text of ids; special tokens are left out.
  [[nodiscard]] virtual std::string decode(std::span<const std::int32_t> ids) const = 0;
  /// The raw bytes a token stands for (not necessarily valid UTF-8); empty for special tokens.
  [[nodiscard]] virtual std::string token_bytes(std::int32_t id) const = 0;
  /// The vocabulary's own spelling, which also special tokens have ("<|im_end|>"); empty outside the vocabulary.
  [[nodiscard]] virtual std::string token_name(std::int32_t id) const = 0;
  /// Exact vocabulary entry to id; -1 when absent.
  [[nodiscard]] virtual std::int32_t token_id(std::string_view token) const = 0;
  /// Highest id + 1 (the logits may be wider).
  [[nodiscard]] virtual int vocab_size() const = 0;
  /// Bytes of the longest token's text: what bounds a text's number of tokens from below.
  [[nodiscard]] virtual std::size_t longest_token() const = 0;
  [[nodiscard]] virtual std::unique_ptr<StreamDecoder> stream() const = 0;
};

/// Throws ModelError when the assets make no tokenizer.
std::shared_ptr<const Tokenizer> make_tokenizer(const Assets& assets);

/// Looks for stop strings in streamed text, across pieces. Text that might be the beginning of a stop string is held
/// back; flush() returns it when no stop came. Earliest match wins; of several at one place the longest.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);
  struct Result {
    std::string text;      ///< safe to show; ends before a matched stop string
    bool stopped = false;  ///< a stop string was found; nothing follows
  };
  Result push(std::string_view piece);
  /// The end of the text: what was held back, up to a stop string completed inside it ("bcd" was waited for, "bc" came
  /// and "c" is a stop string too). The matcher starts afresh.
  Result finish();
  /// finish().text, for callers whose row has ended for another reason anyway.
  std::string flush();
  [[nodiscard]] bool empty() const { return stops_.empty(); }

 private:
  std::vector<std::string> stops_;
  std::string held_;
};

}  // namespace galley::text
