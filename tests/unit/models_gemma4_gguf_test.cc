// Gemma 4 from GGUF files: in all its shapes and on both rungs the logits are those of the same numbers elsewhere.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include "gemma4_gguf.h"
#include "models/runtime.h"

namespace galley::models {
namespace {

using galley::testing::gemma4_metadata;
using galley::testing::Gemma4Tensors;
using galley::testing::MemoryCheckpoint;

TEST(Gemma4Gguf, SaysTheSameAsTheSameNumbersElsewhere) {
  using Gemma4 = MemoryCheckpoint::Gemma4;
  for (const Gemma4 shape : {Gemma4::dense, Gemma4::per_layer, Gemma4::experts}) {
    Config config = MemoryCheckpoint::tiny_gemma4(shape);
    config.tied_head = shape != Gemma4::dense;
    const MemoryCheckpoint memory(config);
    test::GgufWriter writer = gemma4_metadata(config);
    Gemma4Tensors(writer, memory).write();
    const test::TempFolder folder;
    const auto file = open_checkpoint(folder.write("model.gguf", writer.bytes()));
    EXPECT_EQ(file->config().full.keys_are_values, config.full.keys_are_values);
    EXPECT_EQ(file->config().shared_kv.layers, config.shared_kv.layers);
    EXPECT_EQ(file->config().tied_head, config.tied_head);
    std::vector<std::int32_t> prompt;
    for (int i = 0; i < 60; ++i) prompt.push_back((i * 31 + i * i * 7) % config.vocab);  // past the window twice
    RuntimeOptions options;
    for (const bool fused : {false, true}) {
      options.fused = fused;
      EXPECT_EQ(prompt_logits(*file, options, prompt), prompt_logits(memory, options, prompt))
          << static_cast<int>(shape) << (fused ? " fused" : " stock");
    }
  }
}

}  // namespace
}  // namespace galley::models
