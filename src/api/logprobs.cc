#include "api/logprobs.h"

#include <array>
#include <string>
#include <string_view>

#include "api/json.h"

namespace galley::api {
namespace {

bool is_utf8(std::string_view bytes) {
  const OutJson text{std::string(bytes)};
  try {
    (void)text.dump();
    return true;
  } catch (const OutJson::type_error&) {
    return false;
  }
}

/// A special token stands for no text and is shown by its name.
OutJson chat_entry(const text::Tokenizer& tokenizer, std::int32_t id, const std::string& bytes, float logprob) {
  OutJson entry;
  // What is not UTF-8 is replaced when the answer is printed.
  entry["token"] = bytes.empty() ? tokenizer.token_name(id) : bytes;
  entry["logprob"] = logprob;
  OutJson raw = OutJson::array();
  for (const char byte : bytes) raw.push_back(static_cast<unsigned char>(byte));
  entry["bytes"] = std::move(raw);
  return entry;
}

std::string completion_token(const text::Tokenizer& tokenizer, std::int32_t id, const std::string& bytes) {
  if (bytes.empty()) return tokenizer.token_name(id);
  if (is_utf8(bytes)) return bytes;
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string shown = "bytes:";
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    shown += "\\x";
    shown += kHex[value >> 4U];
    shown += kHex[value & 15U];
  }
  return shown;
}

std::size_t characters(std::string_view bytes) {
  std::size_t count = 0;
  for (const char byte : bytes) count += (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U ? 1 : 0;
  return count;
}

}  // namespace

OutJson chat_logprobs(std::span<const serve::TokenInfo> tokens, const text::Tokenizer& tokenizer) {
  OutJson all = OutJson::array();
  for (const serve::TokenInfo& info : tokens) {
    OutJson entry = chat_entry(tokenizer, info.choice.token, info.bytes, info.choice.logprob);
    OutJson top = OutJson::array();
    for (const sample::TokenLogprob& other : info.choice.top) {
      top.push_back(chat_entry(tokenizer, other.token, tokenizer.token_bytes(other.token), other.logprob));
    }
    entry["top_logprobs"] = std::move(top);
    all.push_back(std::move(entry));
  }
  return all;
}

OutJson completion_logprobs(std::span<const serve::TokenInfo> tokens, const text::Tokenizer& tokenizer,
                            std::size_t& offset) {
  OutJson names = OutJson::array();
  OutJson logprobs = OutJson::array();
  OutJson tops = OutJson::array();
  OutJson offsets = OutJson::array();
  for (const serve::TokenInfo& info : tokens) {
    const std::string name = completion_token(tokenizer, info.choice.token, info.bytes);
    OutJson top = OutJson::object();
    for (const sample::TokenLogprob& other : info.choice.top) {
      const std::string other_name = completion_token(tokenizer, other.token, tokenizer.token_bytes(other.token));
      if (!top.contains(other_name)) top[other_name] = other.logprob;  // the likelier of two that look alike
    }
    if (!top.contains(name)) top[name] = info.choice.logprob;
    names.push_back(name);
    logprobs.push_back(info.choice.logprob);
    tops.push_back(std::move(top));
    offsets.push_back(offset);
    offset += characters(info.bytes);
  }
  OutJson json;
  json["tokens"] = std::move(names);
  json["token_logprobs"] = std::move(logprobs);
  json["top_logprobs"] = std::move(tops);
  json["text_offset"] = std::move(offsets);
  return json;
}

}  // namespace galley::api
