// A model family, written once in composite ops: the same file runs on every backend.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "models/checkpoint.h"
#include "models/config.h"
#include "ops/ops.h"

namespace galley::models {

/// A loaded model: prepared weights (in the layout of the Ops that loaded them) and the order in which to apply them.
/// Immutable after loading; used from the engine thread.
class Model {
 public:
  virtual ~Model() = default;

  [[nodiscard]] virtual const Config& config() const = 0;

  /// The attention layers that own a KV cache, in the order forward() expects their caches. What a cache must know
  /// (kv_heads, head_dim, window) is in the spec.
  [[nodiscard]] virtual std::span<const ops::AttentionSpec> attention_layers() const = 0;

  /// The step's logits. `ops` is the backend that loaded the weights; it already holds the tokens of the step in
  /// flight. `kv` holds one cache per entry of attention_layers(): this step's keys and values are written there.
  virtual ops::Value forward(ops::Ops& ops, std::span<ops::LayerKv* const> kv) const = 0;
};

/// Loads `checkpoint` with the family named in its config, preparing every weight through `ops`. Throws ModelError for
/// an unknown family, naming the known ones.
std::unique_ptr<Model> load_model(const Checkpoint& checkpoint, ops::Ops& ops);

/// The families load_model knows, sorted.
std::vector<std::string> model_families();

}  // namespace galley::models
