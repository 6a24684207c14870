#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint_files.h"
#include "models/checkpoint.h"
#include "models/gguf.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using test::GgufWriter;
using test::small_gguf;
using test::SmallGguf;
using test::TempFolder;

std::string error_of(const std::string& bytes) {
  const TempFolder folder;
  const auto file = folder.write("model.gguf", bytes);
  try {
    (void)open_checkpoint(file);
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find(file.string()), std::string::npos) << error.what();
    return error.what();
  }
  return "no error";
}

#define EXPECT_MENTIONS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

std::vector<float> row_of(const ops::MatrixSource& matrix, int row) {
  std::vector<float> out(static_cast<std::size_t>(matrix.cols()));
  matrix.values(row, out);
  return out;
}

TEST(CheckpointGguf, ReadsConfigAndAssets) {
  const TempFolder folder;
  const auto checkpoint = open_checkpoint(folder.write("model.gguf", small_gguf().bytes()));
  const Config& config = checkpoint->config();
  EXPECT_EQ(config.family, "llama");
  EXPECT_EQ(config.name, "small");
  EXPECT_EQ(config.layers, 1);
  EXPECT_EQ(config.hidden, 32);
  EXPECT_EQ(config.heads, 2);
  EXPECT_EQ(config.kv_heads, 1);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.intermediate, 32);
  EXPECT_EQ(config.vocab, 4);
  EXPECT_EQ(config.context, 64);
  EXPECT_EQ(config.norm_eps, 1e-5F);
  EXPECT_EQ(config.rope_base, 10000.0F);
  EXPECT_TRUE(config.tied_head);
  EXPECT_FALSE(config.attention_bias);
  const text::Assets& assets = checkpoint->assets();
  EXPECT_EQ(assets.vocabulary.tokens.at(2), "<|im_end|>");
  EXPECT_EQ(assets.vocabulary.types.at(3), 1);
  EXPECT_FALSE(assets.vocabulary.add_space_prefix);
  EXPECT_EQ(assets.bos_token, "<|im_start|>");
  EXPECT_FALSE(assets.add_bos);
  // eos of the metadata, and the turn's end in the template.
  EXPECT_EQ(assets.end_ids, (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(checkpoint->format(), "GGUF v3, F32");
  EXPECT_TRUE(checkpoint->has("model.layers.0.mlp.up_proj.weight"));
  EXPECT_FALSE(checkpoint->has("lm_head.weight"));
}

TEST(CheckpointGguf, UnpermutesQueryAndKeyRowsOnly) {
  const TempFolder folder;
  const auto checkpoint = open_checkpoint(folder.write("model.gguf", small_gguf().bytes()));
  // Heads of 16: rows 0..7 are the first halves of the pairs (stored at 0, 2, …), rows 8..15 the second (1, 3, …).
  const auto q = checkpoint->matrix("model.layers.0.self_attn.q_proj.weight", 32, 32);
  for (const auto& [row, stored] : {std::pair{0, 0}, {1, 2}, {7, 14}, {8, 1}, {15, 15}, {16, 16}, {17, 18}, {24, 17}}) {
    EXPECT_EQ(row_of(*q, row)[5], static_cast<float>(100 * stored + 5)) << row;
  }
  const auto k = checkpoint->matrix("model.layers.0.self_attn.k_proj.weight", 16, 32);
  EXPECT_EQ(row_of(*k, 9)[0], 300.0F);
  const auto v = checkpoint->matrix("model.layers.0.self_attn.v_proj.weight", 16, 32);
  EXPECT_EQ(row_of(*v, 9)[0], 900.0F);
  // Pages that were given back are read again.
  checkpoint->release_pages();
  EXPECT_EQ(row_of(*v, 9)[31], 931.0F);
  const auto norm = checkpoint->vector("model.norm.weight", 32);
  EXPECT_EQ(norm.values.at(31), 31.0F);
}

// Three blocks' worth of q rows whose every row is `block`.
std::unique_ptr<Checkpoint> with_q_rows(const TempFolder& folder, std::uint32_t type, const std::string& block) {
  SmallGguf options;
  options.q_type = type;
  for (int row = 0; row < 32; ++row) options.q_data += block;
  return open_checkpoint(folder.write("model.gguf", small_gguf(options).bytes()));
}

std::string nibbles() {
  std::string out;
  for (unsigned i = 0; i < 16; ++i) out += static_cast<char>(i | ((15 - i) << 4));
  return out;
}

// Element i of `nibbles()`.
float nibble(std::size_t i) { return static_cast<float>(i < 16 ? i : 31 - i); }

struct Decoded {
  std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(32);
  float scale = 0, bias = 0;
  std::vector<float> values;
};

Decoded decode(const Checkpoint& checkpoint, int bits) {
  const auto q = checkpoint.matrix("model.layers.0.self_attn.q_proj.weight", 32, 32);
  EXPECT_TRUE(q->quantized());
  EXPECT_EQ(q->affine().bits, bits);
  EXPECT_EQ(q->affine().group, 32);
  EXPECT_EQ(q->type(), ops::ElementType::f32);
  Decoded out;
  q->codes(3, out.codes);
  q->scales(3, {&out.scale, 1}, {&out.bias, 1});
  out.values = row_of(*q, 3);
  return out;
}

TEST(CheckpointGguf, DecodesQ4_0) {
  const TempFolder folder;
  const Decoded got = decode(*with_q_rows(folder, 2, test::halves_of({0x3800}) + nibbles()), 4);  // d = 0.5
  EXPECT_EQ(got.scale, 0.5F);
  EXPECT_EQ(got.bias, -4.0F);
  for (std::size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(got.codes[i], nibble(i));
    EXPECT_EQ(got.values[i], 0.5F * (nibble(i) - 8)) << i;
  }
}

TEST(CheckpointGguf, DecodesQ4_1) {
  const TempFolder folder;
  // d = -1.5, m = 2^-24, half's smallest subnormal
  const Decoded got = decode(*with_q_rows(folder, 3, test::halves_of({0xBE00, 0x0001}) + nibbles()), 4);
  EXPECT_EQ(got.scale, -1.5F);
  EXPECT_EQ(got.bias, 0x1p-24F);
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(got.values[i], -1.5F * nibble(i) + 0x1p-24F) << i;
}

TEST(CheckpointGguf, DecodesQ8_0) {
  const TempFolder folder;
  std::string bytes;
  for (int i = 0; i < 32; ++i) bytes += static_cast<char>(i == 0 ? -128 : i == 31 ? 127 : i - 16);
  const Decoded got = decode(*with_q_rows(folder, 8, test::halves_of({0x3400}) + bytes), 8);  // d = 0.25
  EXPECT_EQ(got.scale, 0.25F);
  EXPECT_EQ(got.bias, -32.0F);
  EXPECT_EQ(got.codes[0], 0);
  EXPECT_EQ(got.codes[16], 128);
  EXPECT_EQ(got.codes[31], 255);
  EXPECT_EQ(got.values[0], -32.0F);
  EXPECT_EQ(got.values[15], -0.25F);
  EXPECT_EQ(got.values[31], 31.75F);
}

TEST(CheckpointGguf, WidensHalfExactly) {
  const TempFolder folder;
  std::vector<std::uint16_t> row(32, 0);
  // 1, -2, largest, smallest normal, largest subnormal, -smallest subnormal, infinity, NaN, -0
  const std::vector<std::uint16_t> cases{0x3C00, 0xC000, 0x7BFF, 0x0400, 0x03FF, 0x8001, 0x7C00, 0x7E00, 0x8000};
  std::ranges::copy(cases, row.begin());
  const auto checkpoint = with_q_rows(folder, 1, test::halves_of(row));
  const auto q = checkpoint->matrix("model.layers.0.self_attn.q_proj.weight", 32, 32);
  EXPECT_FALSE(q->quantized());
  EXPECT_EQ(q->type(), ops::ElementType::f16);
  const auto got = row_of(*q, 0);
  EXPECT_EQ(got[0], 1.0F);
  EXPECT_EQ(got[1], -2.0F);
  EXPECT_EQ(got[2], 65504.0F);
  EXPECT_EQ(got[3], 0x1p-14F);
  EXPECT_EQ(got[4], 1023 * 0x1p-24F);
  EXPECT_EQ(got[5], -0x1p-24F);
  EXPECT_TRUE(std::isinf(got[6]));
  EXPECT_TRUE(std::isnan(got[7]));
  EXPECT_TRUE(got[8] == 0.0F && std::signbit(got[8]));
}

TEST(CheckpointGguf, WidensBfloatExactly) {
  const TempFolder folder;
  std::vector<std::uint16_t> row(32, 0x3F80);  // 1
  row[1] = 0xC040;                             // -3
  row[2] = 0x0001;                             // 2^-133
  const auto checkpoint = with_q_rows(folder, 30, test::halves_of(row));
  const auto q = checkpoint->matrix("model.layers.0.self_attn.q_proj.weight", 32, 32);
  EXPECT_EQ(q->type(), ops::ElementType::bf16);
  const auto got = row_of(*q, 31);
  EXPECT_EQ(got[0], 1.0F);
  EXPECT_EQ(got[1], -3.0F);
  EXPECT_EQ(got[2], 0x1p-133F);
}

TEST(CheckpointGguf, RefusesByNameWhatIsNotSupported) {
  SmallGguf options;
  options.architecture = "mamba";
  EXPECT_MENTIONS(error_of(small_gguf(options).bytes()), "architecture \"mamba\" is not supported; supported are ");

  options = {};
  options.q_type = 11;
  options.q_data = std::string(1024, 'x');
  const std::string type = error_of(small_gguf(options).bytes());
  EXPECT_MENTIONS(type, "\"blk.0.attn_q.weight\" has type Q3_K");
  EXPECT_MENTIONS(type, "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K");

  auto file = small_gguf();
  file.string("llama.rope.scaling.type", "yarn");
  EXPECT_MENTIONS(error_of(file.bytes()), "\"yarn\", supported are none and linear");

  file = small_gguf();
  file.integer("llama.expert_count", 8);
  EXPECT_MENTIONS(error_of(file.bytes()), "llama.expert_count");

  file = small_gguf();
  file.integer("llama.rope.dimension_count", 8);
  EXPECT_MENTIONS(error_of(file.bytes()), "\"llama.rope.dimension_count\" is 8, expected 16");

  file = small_gguf();
  file.tensor("blk.0.attn_q_norm.weight", {16}, 0, std::string(64, '\0'));
  EXPECT_MENTIONS(error_of(file.bytes()), "\"blk.0.attn_q_norm.weight\" of shape [16] is not part of a llama model");

  file = small_gguf();
  file.version = 1;
  EXPECT_MENTIONS(error_of(file.bytes()), "GGUF version 1");
}

TEST(CheckpointGguf, NamesWhatIsMissing) {
  for (const char* key : {"llama.block_count", "llama.embedding_length", "llama.attention.head_count",
                          "llama.feed_forward_length", "llama.context_length", "tokenizer.ggml.tokens",
                          "llama.attention.layer_norm_rms_epsilon", "token_embd.weight"}) {
    SmallGguf options;
    options.skip = key;
    const std::string error = error_of(small_gguf(options).bytes());
    EXPECT_MENTIONS(error, key);
    EXPECT_MENTIONS(error, "missing");
  }
  SmallGguf options;
  options.skip = "tokenizer.ggml.eos_token_id";
  options.chat_template = "";
  EXPECT_MENTIONS(error_of(small_gguf(options).bytes()), "eos_token_id");
}

TEST(CheckpointGguf, NamesExpectedAndFoundShape) {
  const TempFolder folder;
  SmallGguf options;
  options.skip = "blk.0.attn_v.weight";
  const auto checkpoint = open_checkpoint(folder.write("model.gguf", small_gguf(options).bytes()));
  try {
    (void)checkpoint->matrix("model.layers.0.mlp.up_proj.weight", 64, 32);
    FAIL();
  } catch (const ModelError& error) {
    EXPECT_MENTIONS(std::string(error.what()), "\"blk.0.ffn_up.weight\": expected shape [64, 32], found [32, 32]");
  }
  try {
    (void)checkpoint->matrix("model.layers.0.self_attn.v_proj.weight", 16, 32);
    FAIL();
  } catch (const ModelError& error) {
    EXPECT_MENTIONS(std::string(error.what()), "expected shape [16, 32], found no such tensor");
  }
  EXPECT_THROW((void)checkpoint->vector("model.norm.weight", 33), ModelError);
  EXPECT_THROW((void)checkpoint->vector("model.embed_tokens.weight", 32), ModelError);
}

TEST(CheckpointGguf, RefusesDamagedHeaders) {
  EXPECT_MENTIONS(error_of("GGU"), "truncated");
  EXPECT_MENTIONS(error_of(std::string(64, 'x')), "not a GGUF file");
  auto file = small_gguf();
  file.integer("llama.block_count", 1);
  EXPECT_MENTIONS(error_of(file.bytes()), "\"llama.block_count\" occurs twice");
  file = small_gguf();
  file.tensor("output_norm.weight", {32}, 0, std::string(128, '\0'));
  EXPECT_MENTIONS(error_of(file.bytes()), "\"output_norm.weight\" occurs twice");
  file = small_gguf();
  file.tensor_at("output.weight", {4, 32}, 0, 1U << 30);
  EXPECT_MENTIONS(error_of(file.bytes()), "\"output.weight\" of shape [4, 32]");
  file = small_gguf();
  file.tensor_at("output.weight", {4, 32}, 0, 7);
  EXPECT_MENTIONS(error_of(file.bytes()), "alignment");
  file = small_gguf();
  file.tensor_at("output.weight", {1ULL << 62, 1ULL << 62}, 0, 0);
  EXPECT_MENTIONS(error_of(file.bytes()), "no tensor can have this shape");
  file = small_gguf();
  file.tensor_at("output.weight", {4, 33}, 8, 0);
  EXPECT_MENTIONS(error_of(file.bytes()), "multiple of 32");
  file = small_gguf();
  file.integer("general.alignment", 48);
  EXPECT_MENTIONS(error_of(file.bytes()), "general.alignment is 48");
  // Absurd counts, before anything is allocated for them.
  std::string bytes = small_gguf().bytes();
  for (const std::size_t at : {8U, 16U}) {
    std::string absurd = bytes;
    absurd.replace(at, 8, 8, '\x7f');
    EXPECT_MENTIONS(error_of(absurd), "more than the file can hold");
  }
}

TEST(CheckpointGguf, ReadsRopeScaling) {
  const TempFolder folder;
  auto file = small_gguf();
  file.string("llama.rope.scaling.type", "linear");
  file.number("llama.rope.scaling.factor", 4.0F);
  auto checkpoint = open_checkpoint(folder.write("linear.gguf", file.bytes()));
  EXPECT_EQ(checkpoint->config().rope_scaling.type, "linear");
  EXPECT_EQ(checkpoint->config().rope_scaling.factor, 4.0F);

  // Llama 3 at base 500000 and head size 16: 2 pi 500000^(2i/16) < 2048 for i <= 3, > 8192 for i >= 5, one between.
  const double wavelength = 2 * 3.14159265358979 * std::pow(500000.0, 8.0 / 16);
  const double smooth = (8192 / wavelength - 1) / 3;
  const auto between = static_cast<float>(1 / ((1 - smooth) / 8 + smooth));
  file = small_gguf();
  file.number("llama.rope.freq_base", 500000.0F);
  file.tensor("rope_freqs.weight", {8}, 0, test::bytes_of({1, 1, 1, 1, between, 8, 8, 8}));
  checkpoint = open_checkpoint(folder.write("llama3.gguf", file.bytes()));
  EXPECT_EQ(checkpoint->config().rope_scaling.type, "llama3");
  EXPECT_EQ(checkpoint->config().rope_scaling.factor, 8.0F);
  EXPECT_EQ(checkpoint->config().rope_scaling.low_freq_factor, 1.0F);
  EXPECT_EQ(checkpoint->config().rope_scaling.high_freq_factor, 4.0F);
  EXPECT_EQ(checkpoint->config().rope_scaling.original_context, 8192);

  file = small_gguf();
  file.tensor("rope_freqs.weight", {8}, 0, test::bytes_of({1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_MENTIONS(error_of(file.bytes()), "rope_freqs.weight");
}

TEST(CheckpointGguf, UntiedHeadAndBiases) {
  const TempFolder folder;
  auto file = small_gguf();
  std::vector<float> bias;
  for (int i = 0; i < 32; ++i) bias.push_back(static_cast<float>(i));
  file.tensor("output.weight", {4, 32}, 0, std::string(512, '\0'));
  file.tensor("blk.0.attn_q.bias", {32}, 0, test::bytes_of(bias));
  const auto checkpoint = open_checkpoint(folder.write("model.gguf", file.bytes()));
  EXPECT_FALSE(checkpoint->config().tied_head);
  EXPECT_TRUE(checkpoint->config().attention_bias);
  const auto values = checkpoint->vector("model.layers.0.self_attn.q_proj.bias", 32).values;
  EXPECT_EQ(values[1], 2.0F);  // permuted like the rows it belongs to
  EXPECT_EQ(values[8], 1.0F);
}

}  // namespace
}  // namespace galley::models
