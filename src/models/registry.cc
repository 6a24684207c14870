#include <array>
#include <string>
#include <string_view>

#include "models/llama.h"
#include "models/model.h"
#include "ops/error.h"

namespace galley::models {
namespace {

struct Family {
  std::string_view name;
  std::unique_ptr<Model> (*load)(const Checkpoint&, ops::Ops&);
};

// One line a family, sorted by name.
constexpr std::array families{
    Family{"llama", load_llama},
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
