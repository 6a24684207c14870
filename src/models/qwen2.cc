// Qwen2: llama's block with biases on q, k and v (not on the output projection).
//   Yang et al. 2024, "Qwen2 technical report".
#include "models/qwen2.h"

#include "models/decoder.h"
#include "ops/error.h"

namespace galley::models {

std::unique_ptr<Model> load_qwen2(const Checkpoint& checkpoint, ops::Ops& ops) {
  const Config& config = checkpoint.config();
  if (config.head_dim * config.heads != config.hidden) {
    throw ModelError(checkpoint.path().string() + ": qwen2 needs heads that add up to the hidden size, found " +
                     std::to_string(config.heads) + " heads of " + std::to_string(config.head_dim) + " and " +
                     std::to_string(config.hidden));
  }
  DecoderBuilder decoder(checkpoint, ops);
  for (int layer = 0; layer < config.layers; ++layer) {
    decoder.attention(layer, {.qkv_bias = true});
    decoder.mlp(layer);
  }
  return decoder.build();
}

}  // namespace galley::models
