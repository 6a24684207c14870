// Rotary position embedding as a config asks for it.
#pragma once
#include "models/config.h"
#include "ops/ops.h"

namespace galley::models {

/// The RoPE of a full head. Scaling types: "" and "default" (none), "linear", "llama3". Throws ModelError for others.
ops::Rope make_rope(const Config& config);

}  // namespace galley::models
