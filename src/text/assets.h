// The text side of a checkpoint, as found in its files.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace galley::text {

/// A vocabulary from GGUF metadata (tokenizer.ggml.*).
struct GgufVocabulary {
  std::string model;  ///< "gpt2", "llama" or "gemma4"
  std::string pre;    ///< pre-tokenizer's name; an unknown one is an error
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;  ///< 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
  std::vector<float> scores;
  std::vector<std::string> merges;
  bool add_space_prefix = true;
};

struct Assets {
  std::string tokenizer_json;  ///< whole text of tokenizer.json; empty when `vocabulary` is to be used
  GgufVocabulary vocabulary;
  std::string chat_template;  ///< Jinja source; empty: the model has none
  std::string bos_token, eos_token;
  std::int32_t bos_id = -1;
  bool add_bos = false;               ///< whether plain completions begin with BOS
  std::vector<std::int32_t> end_ids;  ///< end of generation: union of eos, eot, eom, generation_config, template
};

}  // namespace galley::text
