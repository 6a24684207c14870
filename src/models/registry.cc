#include <array>
#include <string>
#include <string_view>

#include "models/gemma3.h"
#include "models/gemma4.h"
#include "models/llama.h"
#include "models/model.h"
#include "models/qwen2.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"
#include "ops/error.h"

namespace galley::models {
namespace {

struct Family {
  std::string_view name;
  std::unique_ptr<Model> (*load)(const Checkpoint&, ops::Ops&);
};

// One line a family, sorted by name.
constexpr std::array families{
    Family{"gemma3", load_gemma3}, Family{"gemma4", load_gemma4}, Family{"llama", load_llama},
    Family{"qwen2", load_qwen2},   Family{"qwen3", load_qwen3},   Family{"qwen3_moe", load_qwen3_moe},
};

}  // namespace

std::vector<std::string> model_families() {
  std::vector<std::string> names;
  for (const Family& family : families) names.emplace_back(family.name);
  return names;
}

std::unique_ptr<Model> load_model(const Checkpoint& checkpoint, ops::Ops& ops) {
  const std::string& wanted = checkpoint.config().family;
  for (const Family& family : families) {
    if (family.name == wanted) return family.load(checkpoint, ops);
  }
  std::string known;
  for (const Family& family : families) known += (known.empty() ? "" : ", ") + std::string(family.name);
  throw ModelError(checkpoint.path().string() + ": model family \"" + wanted + "\" is not known; this build knows " +
                   known);
}

}  // namespace galley::models
