// Rotary position embedding as a config asks for it.
#pragma once
#include "models/config.h"
#include "ops/ops.h"

namespace galley::models {

/// The RoPE of a head of config.head_dim. Scaling types: "" and "default" (none), "linear", "llama3", "proportional".
/// Throws ModelError for others.
ops::Rope make_rope(const Config& config);
/// The same for heads of another size.
ops::Rope make_rope(const Config& config, int head_dim);

}  // namespace galley::models
