// The llama family: Llama 2/3, SmolLM2, MiniCPM5 and everything else of this shape.
#pragma once
#include <memory>

#include "models/model.h"

namespace galley::models {

std::unique_ptr<Model> load_llama(const Checkpoint& checkpoint, ops::Ops& ops);

}  // namespace galley::models
