// Qwen3: llama's block without biases, with an RMS norm over every query and key head before the rotation; the head
// size is its own, not hidden / heads.
//   Yang et al. 2025, "Qwen3 technical report".
#include "models/qwen3.h"

#include "models/decoder.h"

namespace galley::models {

std::unique_ptr<Model> load_qwen3(const Checkpoint& checkpoint, ops::Ops& ops) {
  DecoderBuilder decoder(checkpoint, ops);
  for (int layer = 0; layer < checkpoint.config().layers; ++layer) {
    decoder.attention(layer, {.head_norms = true});
    decoder.mlp(layer);
  }
  return decoder.build();
}

}  // namespace galley::models
