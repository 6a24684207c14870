// Every family on tiny random checkpoints: on the fused rung a row's bits don't depend on who shares its steps, the
// chunks or the threads; and the fused numbers are those of the stock rung, with all ops fused and with each one off.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint_files.h"
#include "kv/cache_kinds.h"
#include "memory_checkpoint.h"
#include "models/fused_forward.h"
#include "models/model.h"
#include "models/runtime.h"
#include "models_rows.h"
#include "ops/fused/fused_ops.h"
#include "ops/stock/stock_ops.h"

namespace galley::models {
namespace {

using galley::testing::greedy_with_logprobs;
using galley::testing::MemoryCheckpoint;
using galley::testing::run;
using galley::testing::Said;
using galley::testing::Script;
using galley::testing::seeded;

struct Family {
  std::string name;
  std::optional<ops::AffineFormat> weights;  ///< nullopt: plain float32
  bool mixed = false;                        ///< some tensors in other formats, within a layer too
  bool quantized_kv = false;                 ///< layers at 4, 8 and 4 bits
};

void PrintTo(const Family& family, std::ostream* out) {
  *out << family.name;
  if (family.weights) *out << " " << family.weights->bits << "-bit, groups of " << family.weights->group;
  if (family.quantized_kv) *out << ", quantized KV";
}

Config config_of(const Family& family) {
  using Gemma4 = MemoryCheckpoint::Gemma4;
  const auto gemma4 = [&](Gemma4 shape) {
    Config config = MemoryCheckpoint::tiny_gemma4(shape);
    if (family.quantized_kv) config.head_dim = 96;  // beside full layers' 64
    return config;
  };
  if (family.name == "gemma4") return gemma4(Gemma4::dense);
  if (family.name == "e4b") return gemma4(Gemma4::per_layer);
  if (family.name == "moe") return gemma4(Gemma4::experts);
  Config config;
  config.family = family.name;
  config.hidden = 128;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = family.name == "qwen2" ? 32 : 48;
  if (family.quantized_kv) config.head_dim = family.name == "qwen3" ? 96 : 64;  // groups of 32 and of 64
  if (family.quantized_kv && family.name == "qwen2") {                          // whose heads add up to the hidden size
    config.heads = 2;
    config.kv_heads = 1;
  }
  config.intermediate = 192;
  config.vocab = 160;
  config.context = 512;
  config.norm_eps = 1e-6F;
  config.rope_base = 1e5F;
  config.tied_head = family.name != "qwen3";
  if (family.name == "qwen3_moe") {
    config.experts.count = 12;
    config.experts.per_token = 3;
    config.experts.intermediate = 64;
    config.experts.normalized = true;
    config.experts.dense_layers = {1};
  }
  if (family.name == "gemma3") {
    config.sliding = {.window = 24, .pattern = 3, .rope_base = 1e4F};
    config.query_scalar = 40.0F;
  }
  return config;
}

MemoryCheckpoint checkpoint_of(const Family& family) {
  MemoryCheckpoint checkpoint(config_of(family));
  checkpoint.quantized = family.weights;
  if (family.mixed) {
    checkpoint.format_of = [standard = family.weights](const std::string& tensor) -> std::optional<ops::AffineFormat> {
      const auto in = [&](const char* part) { return tensor.find(part) != std::string::npos; };
      if (in("embed_tokens") || in("layers.1.mlp")) return std::nullopt;
      if (in("v_proj")) return ops::AffineFormat{8, 32};
      if (in("mlp.gate.") || in("down_proj") || in("layers.2.self_attn.q_proj")) return ops::AffineFormat{6, 64};
      return standard;
    };
  }
  return checkpoint;
}

std::vector<std::int32_t> prompt_of(int length, int salt) {
  std::vector<std::int32_t> ids;
  for (int i = 0; i < length; ++i) ids.push_back((i * 31 + i * i * 7 + salt * 53) % 160);
  return ids;
}

class Families : public ::testing::TestWithParam<Family> {
 protected:
  static std::unique_ptr<FusedForward> forward(const Family& family, const std::string& isa, int threads) {
    const MemoryCheckpoint checkpoint = checkpoint_of(family);
    auto ops = std::make_shared<ops::FusedOps>(kernels::select_isa(isa), threads);
    std::shared_ptr<const Model> model = load_model(checkpoint, *ops);
    FusedForwardOptions options{40'000'000, kernels::KvElement::f16};
    if (family.quantized_kv) {
      for (const ops::AttentionSpec& layer : model->attention_layers()) {
        const auto i = options.kv_formats.size();
        options.kv_formats.push_back({i % 2 == 0 ? 4 : 8, layer.head_dim % 64 == 0 && i % 3 == 0 ? 64 : 32});
      }
    }
    return std::make_unique<FusedForward>(std::move(ops), std::move(model), std::move(options));
  }
};

TEST_P(Families, AloneInABatchChunkedAndThreaded) {
  for (const std::string& isa : kernels::supported_isas()) {
    const bool slow = isa == "scalar";  // a hundred times: shorter texts, the same cases
    std::vector<Script> all;
    const std::vector<int> lengths = slow ? std::vector<int>{37, 1, 18, 5} : std::vector<int>{37, 1, 18, 90, 5, 64, 23};
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto salt = static_cast<int>(i);
      all.push_back({prompt_of(lengths[i], salt), i % 2 == 0 ? greedy_with_logprobs() : seeded(70 + i),
                     slow ? 3 : 8 + salt * 2, salt / 3 * 4});
    }
    const auto one = forward(GetParam(), isa, 1);
    std::vector<Said> alone;
    for (Script script : all) {
      script.arrival = 0;
      alone.push_back(run(*one, {script}, 512).front());
      ASSERT_EQ(static_cast<int>(alone.back().tokens.size()), script.tokens);
    }
    ASSERT_NE(alone[0], alone[2]) << "different rows say different things, else this test shows nothing";
    const auto two = forward(GetParam(), isa, 2);
    for (FusedForward* f : {one.get(), two.get()}) {
      for (const int chunk : slow ? std::vector<int>{7} : std::vector<int>{512, 16, 7, 1}) {
        const std::vector<Said> together = run(*f, all, chunk);
        for (std::size_t i = 0; i < all.size(); ++i) {
          EXPECT_EQ(together[i], alone[i]) << "row " << i << ", " << isa << ", chunks of " << chunk << ", "
                                           << (f == one.get() ? "one thread" : "two threads");
        }
      }
    }
  }
}

/// Mean KL divergence of `other` from `right`, both logits [n, vocab].
double divergence(const std::vector<float>& right, const std::vector<float>& other, std::size_t vocab) {
  EXPECT_EQ(right.size(), other.size());
  double total = 0;
  for (std::size_t at = 0; at < right.size(); at += vocab) {
    const auto normalizer = [&](const std::vector<float>& x) {
      double sum = 0;
      for (std::size_t i = at; i < at + vocab; ++i) sum += std::exp(static_cast<double>(x[i]));
      return std::log(sum);
    };
    const double a = normalizer(right), b = normalizer(other);
    for (std::size_t i = at; i < at + vocab; ++i) {
      const double p = static_cast<double>(right[i]) - a, q = static_cast<double>(other[i]) - b;
      total += std::exp(p) * (p - q);
    }
  }
  return total / static_cast<double>(right.size() / vocab);
}

TEST_P(Families, FusedIsCloseToStockWithEachOpOnAndOff) {
  const MemoryCheckpoint checkpoint = checkpoint_of(GetParam());
  const auto prompt = prompt_of(80, 3);
  const auto vocab = static_cast<std::size_t>(checkpoint.config().vocab);
  RuntimeOptions options;
  options.kv_dtype = "f32";
  options.fused = false;
  const std::vector<float> stock = prompt_logits(checkpoint, options, prompt);
  options.fused = true;
  // Plain weights multiply fp32 activations: rounding alone. Quantized ones multiply int8 activations.
  const double bound = GetParam().weights || GetParam().quantized_kv ? 0.02 : 1e-6;
  if (GetParam().quantized_kv) options.kv_quant = "8";
  std::vector<std::vector<std::string>> cases{{}, kFusedOpNames};
  for (const std::string& op : kFusedOpNames) cases.push_back({op});
  for (const std::string& isa : kernels::supported_isas()) {
    options.isa = isa;
    for (const auto& off : cases) {
      options.switched_off = off;
      const double kl = divergence(stock, prompt_logits(checkpoint, options, prompt), vocab);
      EXPECT_LT(kl, bound) << isa << " without " << (off.empty() ? "nothing" : off.front()) << " (" << off.size()
                           << ")";
      EXPECT_GE(kl, -1e-9);
    }
  }
}

/// The weights of a checkpoint of a Qwen family as a GGUF file of plain f32.
std::string gguf_of(const MemoryCheckpoint& checkpoint) {
  const Config& c = checkpoint.config();
  test::GgufWriter out;
  const std::string architecture = c.family == "qwen3_moe" ? "qwen3moe" : c.family;
  const auto integer = [&](const char* key, int value) {
    out.integer(architecture + "." + key, static_cast<std::uint32_t>(value));
  };
  out.string("general.architecture", architecture);
  if (c.experts.count > 0) {
    integer("expert_count", c.experts.count);
    integer("expert_used_count", c.experts.per_token);
    integer("expert_feed_forward_length", c.experts.intermediate);
  }
  integer("block_count", c.layers);
  integer("context_length", c.context);
  integer("embedding_length", c.hidden);
  integer("feed_forward_length", c.intermediate);
  integer("attention.head_count", c.heads);
  integer("attention.head_count_kv", c.kv_heads);
  integer("attention.key_length", c.head_dim);
  out.number(architecture + ".attention.layer_norm_rms_epsilon", c.norm_eps);
  out.number(architecture + ".rope.freq_base", c.rope_base);
  std::vector<std::string> tokens;
  for (int i = 0; i < c.vocab; ++i) tokens.push_back("<" + std::to_string(i) + ">");
  out.string("tokenizer.ggml.model", "gpt2");
  out.string("tokenizer.ggml.pre", "qwen2");
  out.strings("tokenizer.ggml.tokens", tokens);
  out.integers("tokenizer.ggml.token_type", std::vector<std::int32_t>(tokens.size(), 1));
  out.strings("tokenizer.ggml.merges", {});
  out.integer("tokenizer.ggml.eos_token_id", 0);

  const auto tensor = [&](const std::string& name, const ops::MatrixSource& source, std::vector<std::uint64_t> shape) {
    std::string bytes;
    std::vector<float> row(static_cast<std::size_t>(source.cols()));
    for (int r = 0; r < source.rows(); ++r) {
      source.values(r, row);
      bytes += test::bytes_of(row);
    }
    out.tensor(name + ".weight", shape, 0, bytes);
  };
  const auto u64 = [](int n) { return static_cast<std::uint64_t>(n); };
  const auto matrix = [&](const std::string& name, const std::string& canonical, int rows, int cols) {
    tensor(name, *checkpoint.matrix(canonical + ".weight", rows, cols), {u64(rows), u64(cols)});
  };
  const auto stack = [&](const std::string& name, const std::string& canonical, int rows, int cols) {
    const int count = c.experts.count;
    tensor(name, *checkpoint.stacked(canonical + ".weight", count, rows, cols), {u64(count), u64(rows), u64(cols)});
  };
  const auto vector = [&](const std::string& name, const std::string& canonical, int size) {
    out.tensor(name, {static_cast<std::uint64_t>(size)}, 0, test::bytes_of(checkpoint.vector(canonical, size).values));
  };
  matrix("token_embd", "model.embed_tokens", c.vocab, c.hidden);
  if (!c.tied_head) matrix("output", "lm_head", c.vocab, c.hidden);
  vector("output_norm.weight", "model.norm.weight", c.hidden);
  const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  for (int layer = 0; layer < c.layers; ++layer) {
    const std::string to = "blk." + std::to_string(layer) + ".";
    const std::string from = "model.layers." + std::to_string(layer) + ".";
    vector(to + "attn_norm.weight", from + "input_layernorm.weight", c.hidden);
    vector(to + "ffn_norm.weight", from + "post_attention_layernorm.weight", c.hidden);
    matrix(to + "attn_q", from + "self_attn.q_proj", q, c.hidden);
    matrix(to + "attn_k", from + "self_attn.k_proj", kv, c.hidden);
    matrix(to + "attn_v", from + "self_attn.v_proj", kv, c.hidden);
    matrix(to + "attn_output", from + "self_attn.o_proj", c.hidden, q);
    if (c.experts.count > 0) {
      const int inner = c.experts.intermediate;
      matrix(to + "ffn_gate_inp", from + "mlp.gate", c.experts.count, c.hidden);
      stack(to + "ffn_gate_exps", from + "mlp.switch_mlp.gate_proj", inner, c.hidden);
      stack(to + "ffn_up_exps", from + "mlp.switch_mlp.up_proj", inner, c.hidden);
      stack(to + "ffn_down_exps", from + "mlp.switch_mlp.down_proj", c.hidden, inner);
    } else {
      matrix(to + "ffn_gate", from + "mlp.gate_proj", c.intermediate, c.hidden);
      matrix(to + "ffn_up", from + "mlp.up_proj", c.intermediate, c.hidden);
      matrix(to + "ffn_down", from + "mlp.down_proj", c.hidden, c.intermediate);
    }
    if (c.family == "qwen2") {
      vector(to + "attn_q.bias", from + "self_attn.q_proj.bias", q);
      vector(to + "attn_k.bias", from + "self_attn.k_proj.bias", kv);
      vector(to + "attn_v.bias", from + "self_attn.v_proj.bias", kv);
    } else {
      vector(to + "attn_q_norm.weight", from + "self_attn.q_norm.weight", c.head_dim);
      vector(to + "attn_k_norm.weight", from + "self_attn.k_norm.weight", c.head_dim);
    }
  }
  return out.bytes();
}

TEST(FamiliesFromGguf, SayTheSameAsTheSameNumbersElsewhere) {
  for (const char* name : {"qwen2", "qwen3", "qwen3_moe"}) {
    Config config = checkpoint_of({name, std::nullopt}).config();
    config.experts.dense_layers.clear();  // what a GGUF file can't say
    const MemoryCheckpoint memory(config);
    const test::TempFolder folder;
    const auto file = open_checkpoint(folder.write("model.gguf", gguf_of(memory)));
    const auto prompt = prompt_of(30, 1);
    RuntimeOptions options;
    for (const bool fused : {false, true}) {
      options.fused = fused;
      EXPECT_EQ(prompt_logits(*file, options, prompt), prompt_logits(memory, options, prompt)) << name;
    }
  }
}

TEST(FamiliesOnStock, HalfPrecisionExpertsRun) {
  // MLX's gathered product of plain numbers is float32 only on a CPU: there is no oracle, but an answer near float32's.
  std::vector<std::vector<float>> said;
  for (const ops::ElementType type : {ops::ElementType::f32, ops::ElementType::bf16}) {
    MemoryCheckpoint checkpoint = checkpoint_of({"qwen3_moe", std::nullopt});
    checkpoint.type = type;
    ops::StockOps ops;  // in the stored type
    const auto model = load_model(checkpoint, ops);
    const auto prompt = prompt_of(30, 1);
    std::vector<std::unique_ptr<kv::RowCache>> caches;
    std::vector<ops::LayerKv*> layers;
    for (const ops::AttentionSpec& layer : model->attention_layers()) {
      caches.push_back(kv::make_row_cache(layer));
      layers.push_back(caches.back().get());
    }
    ops.begin(mlx::core::array(prompt.begin(), mlx::core::Shape{1, static_cast<int>(prompt.size())}, mlx::core::int32));
    const mlx::core::array logits = ops::StockOps::array_of(model->forward(ops, layers));
    EXPECT_EQ(logits.dtype(), type == ops::ElementType::f32 ? mlx::core::float32 : mlx::core::bfloat16);
    mlx::core::array numbers = mlx::core::contiguous(mlx::core::astype(logits, mlx::core::float32));
    numbers.eval();
    said.emplace_back(numbers.data<float>(), numbers.data<float>() + numbers.size());
  }
  EXPECT_LT(divergence(said[0], said[1], 160), 0.05);
}

INSTANTIATE_TEST_SUITE_P(
    Tiny, Families,
    ::testing::Values(Family{"gemma3", std::nullopt}, Family{"gemma3", {{4, 32}}}, Family{"gemma3", {{8, 64}}},
                      Family{"gemma4", std::nullopt}, Family{"gemma4", {{4, 32}}}, Family{"gemma4", {{4, 64}}, true},
                      Family{"e4b", std::nullopt}, Family{"e4b", {{4, 32}}}, Family{"e4b", {{8, 64}}, true},
                      Family{"moe", std::nullopt}, Family{"moe", {{4, 32}}}, Family{"moe", {{4, 64}}, true},
                      Family{"llama", std::nullopt}, Family{"llama", {{4, 32}}}, Family{"qwen2", std::nullopt},
                      Family{"qwen2", {{4, 32}}}, Family{"qwen2", {{4, 64}}, true}, Family{"qwen3", std::nullopt},
                      Family{"qwen3", {{4, 64}}}, Family{"qwen3", {{8, 32}}}, Family{"qwen3", {{4, 32}}, true},
                      Family{"qwen3_moe", std::nullopt}, Family{"qwen3_moe", {{4, 32}}},
                      Family{"qwen3_moe", {{4, 64}}, true}, Family{"llama", {{4, 32}}, false, true},
                      Family{"gemma3", std::nullopt, false, true}, Family{"qwen3", {{8, 32}}, false, true},
                      Family{"qwen2", {{4, 64}}, false, true}, Family{"qwen3_moe", {{4, 32}}, false, true},
                      Family{"gemma4", {{4, 32}}, false, true}, Family{"e4b", {{4, 32}}, false, true},
                      Family{"moe", {{4, 64}}, false, true}),
    [](const auto& p) {
      const auto& w = p.param.weights;
      return p.param.name +
             (w ? "_" + std::to_string(w->bits) + "bit_g" + std::to_string(w->group) : std::string("_f32")) +
             (p.param.mixed ? "_mixed" : "") + (p.param.quantized_kv ? "_kv" : "");
    });

}  // namespace
}  // namespace galley::models
