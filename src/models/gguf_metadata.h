// What GGUF metadata says about a model and about its text side.
#pragma once
#include "models/config.h"
#include "models/gguf.h"
#include "text/assets.h"

namespace galley::models {

/// Throws ModelError for an architecture that isn't known, for missing keys and for options this build doesn't have.
Config gguf_config(const GgufFile& file);

/// Tokenizer, chat template and end ids. `vocab`: rows of the embedding, which the tokenizer must match.
text::Assets gguf_assets(const GgufFile& file, int vocab);

}  // namespace galley::models
