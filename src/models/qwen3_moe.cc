// Qwen3 with mixtures of experts: qwen3's attention, and in most layers many small gated MLPs of which a router picks a
// few for each token.
//   Yang et al. 2025, "Qwen3 technical report"; Shazeer et al. 2017, "Outrageously large neural networks".
#include "models/qwen3_moe.h"

#include <algorithm>

#include "models/decoder.h"

namespace galley::models {
namespace {

bool has_experts(const Experts& experts, int layer) {
  return experts.count > 0 && std::ranges::find(experts.dense_layers, layer) == experts.dense_layers.end() &&
         (layer + 1) % experts.step == 0;
}

}  // namespace

std::unique_ptr<Model> load_qwen3_moe(const Checkpoint& checkpoint, ops::Ops& ops) {
  DecoderBuilder decoder(checkpoint, ops);
  for (int layer = 0; layer < checkpoint.config().layers; ++layer) {
    decoder.attention(layer, {.head_norms = true});
    if (has_experts(checkpoint.config().experts, layer)) {
      decoder.experts(layer);
    } else {
      decoder.mlp(layer);
    }
  }
  return decoder.build();
}

}  // namespace galley::models
