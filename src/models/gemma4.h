// The Gemma 4 family's text models.
#pragma once
#include <memory>

#include "models/model.h"

namespace galley::models {

std::unique_ptr<Model> load_gemma4(const Checkpoint& checkpoint, ops::Ops& ops);

}  // namespace galley::models
