// Damaged files: whatever the damage, opening and reading either works or throws ModelError.
#include <gtest/gtest.h>

#include <random>

#include "checkpoint_files.h"
#include "gemma4_gguf.h"
#include "models/checkpoint.h"
#include "models/safetensors.h"
#include "ops/error.h"

namespace galley::models {
namespace {

std::string damage(std::string bytes, std::size_t header, std::mt19937& random) {
  const auto below = [&](std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(random); };
  // Mostly in the header: damage to the weights is only another weight.
  const auto place = [&] { return below(below(8) == 0 ? bytes.size() : std::min(header, bytes.size())); };
  for (std::size_t times = 1 + below(4); times > 0 && !bytes.empty(); --times) {
    switch (below(6)) {
      case 0:
        bytes[place()] ^= static_cast<char>(1U << below(8));
        break;
      case 1:
        bytes[place()] = static_cast<char>(below(256));
        break;
      case 2: {  // a whole word of extreme value
        static constexpr std::uint64_t extremes[] = {0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1ULL << 63, ~0ULL, ~0ULL - 7};
        const std::uint64_t value = extremes[below(std::size(extremes))];
        const std::size_t at = place();
        const std::size_t size = std::min<std::size_t>(below(2) == 0 ? 4 : 8, bytes.size() - at);
        std::memcpy(bytes.data() + at, &value, size);
        break;
      }
      case 3:
        bytes.resize(below(bytes.size()) + 1);
        break;
      case 4: {
        const std::size_t at = place();
        bytes.erase(at, 1 + below(16));
        break;
      }
      default:
        bytes.insert(place(), 1 + below(16), static_cast<char>(below(256)));
    }
  }
  return bytes;
}

void read_all(const ops::MatrixSource& matrix) {
  std::vector<float> values(static_cast<std::size_t>(matrix.cols()));
  for (int row = 0; row < matrix.rows(); ++row) matrix.values(row, values);
}

/// Reads every tensor of the small llama, whatever the config now says.
void read_all(const Checkpoint& checkpoint) {
  const Config& config = checkpoint.config();
  const auto matrix = [&](const char* name, int rows, int cols) {
    try {
      read_all(*checkpoint.matrix(name, rows, cols));
    } catch (const ModelError&) {
    }
  };
  matrix("model.embed_tokens.weight", config.vocab, config.hidden);
  matrix("model.layers.0.self_attn.q_proj.weight", config.heads * config.head_dim, config.hidden);
  matrix("model.layers.0.self_attn.k_proj.weight", config.kv_heads * config.head_dim, config.hidden);
  matrix("model.layers.0.self_attn.v_proj.weight", config.kv_heads * config.head_dim, config.hidden);
  matrix("model.layers.0.mlp.down_proj.weight", config.hidden, config.intermediate);
  matrix("m.weight", 2, 64);
  try {
    (void)checkpoint.vector("model.norm.weight", config.hidden);
  } catch (const ModelError&) {
  }
}

struct Outcomes {
  int loaded = 0, refused = 0;
};

template <typename Open>
Outcomes fuzz(const std::string& good, std::size_t header, int rounds, Open&& open) {
  std::mt19937 random(20240607);
  Outcomes outcomes;
  for (int round = 0; round < rounds; ++round) {
    const std::string bytes = damage(good, header, random);
    try {
      read_all(*open(bytes));
      ++outcomes.loaded;
    } catch (const ModelError&) {
      ++outcomes.refused;
    }
  }
  return outcomes;
}

TEST(CheckpointFuzz, Gguf) {
  const test::TempFolder folder;
  // Type and bytes of a row of 256: one type a row in blocks of 32, and every K-quant.
  struct Kind {
    std::uint32_t type;
    std::size_t row;
    int rounds;
  };
  for (const Kind kind :
       {Kind{3, 160, 4000}, {6, 176, 1000}, {7, 192, 1000}, {12, 144, 1500}, {13, 176, 1500}, {14, 210, 1500}}) {
    test::SmallGguf options;
    options.intermediate = 256;
    options.down_type = kind.type;
    options.down_data = std::string(32 * kind.row, '\x35');
    const std::string good = test::small_gguf(options).bytes();
    const std::size_t header = good.find("blk.0.ffn_down.weight") + 64;
    const Outcomes outcomes = fuzz(good, header, kind.rounds, [&](const std::string& bytes) {
      return open_checkpoint(folder.write("model.gguf", bytes));
    });
    EXPECT_GT(outcomes.loaded, 0) << kind.type;
    EXPECT_GT(outcomes.refused, kind.rounds / 4) << kind.type;
  }
}

TEST(CheckpointFuzz, GgufOfGemma4) {
  // Its metadata lists a number a layer, and one of its tensors says how RoPE turns.
  Config config = galley::testing::MemoryCheckpoint::tiny_gemma4(galley::testing::MemoryCheckpoint::Gemma4::per_layer);
  config.hidden = config.intermediate = 32;
  config.heads = config.kv_heads = config.full.kv_heads = 2;
  config.head_dim = 16;
  config.full.head_dim = 32;
  config.vocab = config.per_layer.vocab = 4;
  config.per_layer.width = 8;
  const galley::testing::MemoryCheckpoint memory(config);
  test::GgufWriter writer = galley::testing::gemma4_metadata(config);
  galley::testing::Gemma4Tensors(writer, memory).write();
  const std::string good = writer.bytes();
  const test::TempFolder folder;
  constexpr int kRounds = 1500;
  const Outcomes outcomes = fuzz(good, good.find("token_embd.weight"), kRounds, [&](const std::string& bytes) {
    return open_checkpoint(folder.write("model.gguf", bytes));
  });
  EXPECT_GT(outcomes.loaded, 0);
  EXPECT_GT(outcomes.refused, kRounds / 4);
}

TEST(CheckpointFuzz, EveryTruncationOfAGgufIsRefused) {
  const test::TempFolder folder;
  const std::string good = test::small_gguf().bytes();
  for (std::size_t size = 0; size < good.size(); size += size < 2500 ? 1 : 509) {
    EXPECT_THROW((void)open_checkpoint(folder.write("model.gguf", good.substr(0, size))), ModelError) << size;
  }
}

TEST(CheckpointFuzz, Safetensors) {
  const test::TempFolder folder;
  folder.write("config.json", R"({"model_type": "llama", "hidden_size": 2, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 4, "vocab_size": 4, "max_position_embeddings": 8,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "quantization": {"bits": 4, "group_size": 64}})");
  folder.write("tokenizer.json", "{}");
  test::SafeTensorsWriter weights;
  weights.tensor("model.norm.weight", "F32", {2}, test::bytes_of({1, 2}));
  weights.tensor("model.embed_tokens.weight", "BF16", {4, 2}, std::string(16, 'x'));
  weights.tensor("m.weight", "U32", {2, 8}, std::string(64, 'y'));
  weights.tensor("m.scales", "F16", {2, 1}, std::string(4, 'z'));
  weights.tensor("m.biases", "F16", {2, 1}, std::string(4, 'w'));
  const std::string good = weights.bytes();
  const Outcomes outcomes = fuzz(good, good.size() - 92, 4000, [&](const std::string& bytes) {
    folder.write("model.safetensors", bytes);
    return open_checkpoint(folder.path());
  });
  EXPECT_GT(outcomes.loaded, 0);
  EXPECT_GT(outcomes.refused, 1000);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_THROW(SafeTensorsFile(folder.write("model.safetensors", good.substr(0, size))), ModelError) << size;
  }
}

TEST(CheckpointFuzz, JsonFiles) {
  const test::TempFolder folder;
  test::SafeTensorsWriter weights;
  weights.tensor("model.norm.weight", "F32", {2}, test::bytes_of({1, 2}));
  folder.write("model.safetensors", weights.bytes());
  const std::string config = R"({"model_type": "llama", "hidden_size": 2, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 4, "vocab_size": 4, "max_position_embeddings": 8,
    "rms_norm_eps": 1e-6, "eos_token_id": [1], "rope_scaling": {"type": "linear", "factor": 2},
    "quantization": {"bits": 4, "group_size": 64, "m": {"bits": 8}, "n": false}})";
  const std::string tokenizer = R"({"added_tokens": [{"id": 1, "content": "</s>"}], "model": {"vocab": {"a": 0}},
    "post_processor": {"single": [{"SpecialToken": {"id": "</s>"}}]}})";
  const std::string settings = R"({"bos_token": {"content": "</s>"}, "eos_token": "</s>", "add_bos_token": true,
    "chat_template": [{"name": "default", "template": "x<|im_end|>"}]})";
  std::vector<std::pair<std::string, std::string>> files{
      {"config.json", config}, {"tokenizer.json", tokenizer}, {"tokenizer_config.json", settings}};
  for (const auto& [name, good] : files) folder.write(name, good);
  ASSERT_NO_THROW((void)open_checkpoint(folder.path()));
  for (const auto& [name, good] : files) {
    (void)fuzz(good, good.size(), 1000, [&](const std::string& bytes) {
      folder.write(name, bytes);
      return open_checkpoint(folder.path());
    });
    folder.write(name, good);
  }
}

}  // namespace
}  // namespace galley::models
