// The qwen3 family (dense).
#pragma once
#include <memory>

#include "models/model.h"

namespace galley::models {

std::unique_ptr<Model> load_qwen3(const Checkpoint& checkpoint, ops::Ops& ops);

}  // namespace galley::models
