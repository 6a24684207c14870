// Llama: pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP.
//   Touvron et al. 2023, "LLaMA: Open and efficient foundation language models"; Llama 3's RoPE scaling in rope.h.
#include "models/llama.h"

#include "models/decoder.h"
#include "ops/error.h"

namespace galley::models {

std::unique_ptr<Model> load_llama(const Checkpoint& checkpoint, ops::Ops& ops) {
  if (checkpoint.config().mlp_bias) {
    throw ModelError(checkpoint.path().string() + ": llama with mlp_bias is not supported");
  }
  const bool biased = checkpoint.config().attention_bias;
  DecoderBuilder decoder(checkpoint, ops);
  for (int layer = 0; layer < checkpoint.config().layers; ++layer) {
    decoder.attention(layer, {.qkv_bias = biased, .output_bias = biased});
    decoder.mlp(layer);
  }
  return decoder.build();
}

}  // namespace galley::models
