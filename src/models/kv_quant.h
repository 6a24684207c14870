// How the KV of each layer is stored: what --kv-quant asks for.
#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ops/kv_format.h"
#include "ops/ops.h"

namespace galley::models {

class Checkpoint;

class KvQuant {
 public:
  /// Nothing is quantized.
  KvQuant() = default;

  /// What the user asked for:
  ///   off     nothing
  ///   8, 4    every layer at so many bits, in groups of 64 where they divide the heads and of 32 elsewhere
  ///   config  layer by layer, as the model's own kv_config.json says; layers that it leaves out are not quantized
  ///   ""      nobody asked: with one row at a time as `config` where the model has that file, else off
  /// kv_config.json is what `optiq kv-cache` writes: a list of {"layer_idx": 0, "bits": 4, "group_size": 64}, the
  /// group size being 64 where it is not named. Throws Error for another word or a missing file, ModelError for a file
  /// that makes no sense.
  static KvQuant choose(const std::string& choice, const Checkpoint& checkpoint, int batch);

  [[nodiscard]] bool off() const { return bits_ == 0 && layers_.empty(); }
  /// The formats of these layers. Throws Error naming the layer whose heads can't be cut into groups.
  [[nodiscard]] std::vector<ops::KvFormat> formats(std::span<const ops::AttentionSpec> layers) const;

 private:
  static std::map<int, ops::KvFormat> read(const std::filesystem::path& file, int layers);

  int bits_ = 0;  ///< of every layer; 0: see layers_
  std::map<int, ops::KvFormat> layers_;
  std::filesystem::path file_;  ///< where they come from
};

/// For people: "8-bit", "f16 in 20 layers, 4-bit in 10 layers". `plain`: what to call layers that are not quantized;
/// all of them when `formats` is empty.
std::string describe(std::span<const ops::KvFormat> formats, const std::string& plain);

}  // namespace galley::models
