// What the tensors of a GGUF file are called, architecture by architecture.
#pragma once
#include <map>
#include <string>

#include "models/config.h"

namespace galley::models {

struct GgufName {
  std::string canonical;  ///< Hugging Face's name
  bool permuted = false;  ///< rows of q and k lie interleaved, pair by pair (llama's converter does that, no other)
};

/// Every tensor that a model of this config may have, by its name in the file.
std::map<std::string, GgufName> gguf_tensor_names(const Config& config);

}  // namespace galley::models
