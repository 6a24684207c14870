// The qwen3_moe family: Qwen3's mixtures of experts (30B-A3B, 235B-A22B).
#pragma once
#include <memory>

#include "models/model.h"

namespace galley::models {

std::unique_ptr<Model> load_qwen3_moe(const Checkpoint& checkpoint, ops::Ops& ops);

}  // namespace galley::models
