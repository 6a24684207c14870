// A small byte-level vocabulary: the 256 bytes, a few merges, ChatML's special tokens.
#pragma once
#include <string>

#include "text/assets.h"

namespace galley::text::fixture {

inline void append_utf8(std::string& out, unsigned c) {  // below U+0800
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else {
    out += static_cast<char>(0xC0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

/// GPT-2's printable spelling of a byte.
inline std::string spell(unsigned byte) {
  unsigned next = 0x100;
  for (unsigned b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    const unsigned c = printable ? b : next++;
    if (b == byte) {
      std::string out;
      append_utf8(out, c);
      return out;
    }
  }
  return {};
}

inline constexpr std::int32_t kEndOfText = 0, kImStart = 1, kImEnd = 2, kThink = 3, kFirstByte = 4;
inline constexpr std::int32_t kHe = kFirstByte + 256, kLl = kHe + 1, kHell = kHe + 2, kHello = kHe + 3,
                              kSpaceH = kHe + 4;

inline Assets chatml() {
  Assets assets;
  GgufVocabulary& v = assets.vocabulary;
  v.model = "gpt2";
  v.pre = "smollm";
  v.tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"};
  v.types = {3, 3, 3, 4};
  for (unsigned b = 0; b < 256; ++b) v.tokens.push_back(spell(b));
  const std::string space = spell(' ');
  for (const auto& token :
       {std::string("he"), std::string("ll"), std::string("hell"), std::string("hello"), space + "h"}) {
    v.tokens.push_back(token);
  }
  v.types.resize(v.tokens.size(), 1);
  v.merges = {"h e", "l l", "he ll", "hell o", space + " h"};
  v.add_space_prefix = false;
  assets.eos_token = "<|im_end|>";
  assets.chat_template =
      "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
      "You are a helpful AI assistant<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
      "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
      "' }}{% endif %}";
  return assets;
}

}  // namespace galley::text::fixture
