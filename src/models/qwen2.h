// The qwen2 family: Qwen2, Qwen2.5 and what was distilled into them.
#pragma once
#include <memory>

#include "models/model.h"

namespace galley::models {

std::unique_ptr<Model> load_qwen2(const Checkpoint& checkpoint, ops::Ops& ops);

}  // namespace galley::models
