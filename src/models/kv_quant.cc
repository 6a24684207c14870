#include "models/kv_quant.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "models/checkpoint.h"
#include "models/config_json.h"
#include "models/config_keys.h"
#include "ops/error.h"

namespace galley::models {
namespace {

constexpr const char* kFileName = "kv_config.json";

/// The file beside the weights; empty: none. Several GGUF files may share a folder, so theirs would be anybody's.
std::filesystem::path file_of(const Checkpoint& checkpoint) {
  const std::filesystem::path file = checkpoint.path() / kFileName;
  return std::filesystem::is_directory(checkpoint.path()) && std::filesystem::exists(file) ? file
                                                                                           : std::filesystem::path{};
}

}  // namespace

KvQuant KvQuant::choose(const std::string& choice, const Checkpoint& checkpoint, int batch) {
  KvQuant chosen;
  const bool asked = choice == "config";
  if (choice == "8" || choice == "4") {
    chosen.bits_ = choice == "8" ? 8 : 4;
  } else if (asked || (choice.empty() && batch == 1)) {
    chosen.file_ = file_of(checkpoint);
    if (!chosen.file_.empty()) {
      chosen.layers_ = read(chosen.file_, checkpoint.config().layers);
    } else if (asked) {
      throw Error(400,
                  "--kv-quant config: " + checkpoint.path().string() + " has no " + kFileName +
                      " (a folder's list of layers and bits, as `optiq kv-cache` writes it); choose off, 8 or 4",
                  "", "kv-quant");
    }
  } else if (!choice.empty() && choice != "off") {
    throw Error(400, "--kv-quant " + choice + " is not known; choose off, 8, 4 or config", "", "kv-quant");
  }
  return chosen;
}

std::map<int, ops::KvFormat> KvQuant::read(const std::filesystem::path& file, int layers) {
  const auto fail = [&](const std::string& what) { throw ModelError(file.string() + ": " + what); };
  const nlohmann::json list = nlohmann::json::parse(read_text(file), nullptr, /*allow_exceptions=*/false);
  if (!list.is_array() || list.empty()) {
    fail("expected a list of {\"layer_idx\": 0, \"bits\": 4, \"group_size\": 64}, one entry a layer");
  }
  std::map<int, ops::KvFormat> formats;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string entry = "entry " + std::to_string(i);
    if (!list[i].is_object()) fail(entry + ": expected an object with layer_idx, bits and group_size");
    const Keys keys(file, list[i], entry + ": ");
    const int layer = keys.required_int("layer_idx");
    if (layer >= layers) {
      keys.wrong("layer_idx", "a layer of this model, 0 to " + std::to_string(layers - 1), list[i]["layer_idx"]);
    }
    const std::string at = entry + ", layer " + std::to_string(layer) + ": ";
    const ops::KvFormat format{keys.required_int("bits"), keys.integer("group_size").value_or(64)};
    if (format.bits != 4 && format.bits != 8) fail(at + "expected 4 or 8 bits, found " + std::to_string(format.bits));
    if (format.group != 32 && format.group != 64 && format.group != 128) {
      fail(at + "expected a group_size of 32, 64 or 128, found " + std::to_string(format.group));
    }
    if (!formats.emplace(layer, format).second) fail(at + "the layer has two entries");
  }
  return formats;
}

std::vector<ops::KvFormat> KvQuant::formats(std::span<const ops::AttentionSpec> layers) const {
  std::vector<ops::KvFormat> formats;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const int dim = layers[i].head_dim;
    ops::KvFormat format{bits_, dim % 64 == 0 ? 64 : 32};
    if (const auto own = layers_.find(static_cast<int>(i)); own != layers_.end()) format = own->second;
    if (format.quantized() && dim % format.group != 0) {
      const std::string asked = file_.empty() ? "--kv-quant " + std::to_string(bits_) : file_.string();
      throw Error(400,
                  asked + ": the heads of layer " + std::to_string(i) + " are " + std::to_string(dim) +
                      " wide, which groups of " + std::to_string(format.group) + " don't divide; choose " +
                      (file_.empty() ? "--kv-quant off" : "another group_size"),
                  "", "kv-quant");
    }
    formats.push_back(format.quantized() ? format : ops::KvFormat{});
  }
  return formats;
}

std::string describe(std::span<const ops::KvFormat> formats, const std::string& plain) {
  std::map<int, int> layers;
  for (const ops::KvFormat& format : formats) ++layers[format.bits];
  if (layers.empty()) return plain;
  std::string text;
  for (const auto& [bits, count] : layers) {
    if (!text.empty()) text += ", ";
    text += bits == 0 ? plain : std::to_string(bits) + "-bit";
    if (layers.size() > 1) text += " in " + std::to_string(count) + (count == 1 ? " layer" : " layers");
  }
  return text;
}

}  // namespace galley::models
