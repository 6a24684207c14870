#include <algorithm>
#include <array>
#include <utility>

#include "support/scripted_forward.h"

namespace galley::test {
namespace {

constexpr std::array<std::pair<std::string_view, std::int32_t>, 4> kSpecial{
    {{"<s>", kBos}, {"</s>", kEos}, {"<|im_start|>", kTurnStart}, {"<|im_end|>", kTurnEnd}}};

/// Bytes that the character beginning with `lead` has; 0: no character begins like this.
std::size_t character_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

class ByteDecoder final : public text::StreamDecoder {
 public:
  std::string push(std::int32_t id) override {
    if (id < 0 || id > 255) return {};
    held_.push_back(static_cast<char>(id));
    return take();
  }
  std::string flush() override {
    std::string out = take();
    if (!held_.empty()) out += kReplacement;
    held_.clear();
    return out;
  }

 private:
  std::string take() {
    std::string out;
    while (!held_.empty()) {
      const std::size_t length = character_length(static_cast<unsigned char>(held_[0]));
      std::size_t valid = 1;
      while (valid < std::min(length, held_.size()) && (static_cast<unsigned char>(held_[valid]) & 0xC0U) == 0x80U) {
        ++valid;
      }
      if (length == 0 || (valid < length && valid < held_.size())) {
        out += kReplacement;
        held_.erase(0, valid);
      } else if (valid == length) {
        out += held_.substr(0, length);
        held_.erase(0, length);
      } else {
        break;
      }
    }
    return out;
  }
  std::string held_;
};

class ByteTokenizer final : public text::Tokenizer {
 public:
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const override {
    std::vector<std::int32_t> ids;
    while (!text.empty()) {
      const auto special = std::ranges::find_if(kSpecial, [&](const auto& s) { return text.starts_with(s.first); });
      if (parse_special && special != kSpecial.end()) {
        ids.push_back(special->second);
        text.remove_prefix(special->first.size());
      } else {
        ids.push_back(static_cast<unsigned char>(text.front()));
        text.remove_prefix(1);
      }
    }
    return ids;
  }
  [[nodiscard]] std::string decode(std::span<const std::int32_t> ids) const override {
    ByteDecoder decoder;
    std::string out;
    for (const std::int32_t id : ids) out += decoder.push(id);
    return out + decoder.flush();
  }
  [[nodiscard]] std::string token_bytes(std::int32_t id) const override {
    return id >= 0 && id < 256 ? std::string(1, static_cast<char>(id)) : std::string{};
  }
  [[nodiscard]] std::string token_name(std::int32_t id) const override {
    for (const auto& [name, special] : kSpecial) {
      if (id == special) return std::string(name);
    }
    return token_bytes(id);
  }
  [[nodiscard]] std::int32_t token_id(std::string_view token) const override {
    for (const auto& [name, id] : kSpecial) {
      if (token == name) return id;
    }
    return token.size() == 1 ? static_cast<unsigned char>(token.front()) : -1;
  }
  [[nodiscard]] int vocab_size() const override { return kVocab; }
  [[nodiscard]] std::size_t longest_token() const override { return 1; }
  [[nodiscard]] std::unique_ptr<text::StreamDecoder> stream() const override { return std::make_unique<ByteDecoder>(); }
};

}  // namespace

std::shared_ptr<const text::Tokenizer> byte_tokenizer() { return std::make_shared<ByteTokenizer>(); }

std::vector<std::int32_t> bytes_of(std::string_view text) {
  std::vector<std::int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

}  // namespace galley::test
