// GGUF's five-bit and K-quant types: blocks written element by element from known codes and scales, read back exactly.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>

#include "checkpoint_files.h"
#include "models/checkpoint.h"
#include "models/gguf.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using test::small_gguf;
using test::SmallGguf;
using test::TempFolder;

constexpr std::size_t rows = 32;

/// Sets bits [bit, bit + width) of a block, counted from the low end of its first byte.
void put(std::string& block, std::size_t bit, std::size_t width, unsigned value) {
  for (std::size_t i = 0; i < width; ++i) {
    if ((value >> i & 1U) != 0) block[(bit + i) / 8] |= static_cast<char>(1U << (bit + i) % 8);
  }
}

void put_half(std::string& block, std::size_t byte, std::uint16_t half) { put(block, byte * 8, 16, half); }

/// A row as its file says it, and as it must be read.
struct Row {
  std::string bytes;
  std::vector<std::uint8_t> codes;
  std::vector<float> scale, bias;  // of each group
};

struct Half {
  std::uint16_t bits;
  float value;
};
// 0.5, -0.15625, the smallest subnormal, 1.0009765625, 65504
constexpr std::array halves{Half{0x3800, 0.5F}, Half{0xB100, -0.15625F}, Half{0x0001, 0x1p-24F},
                            Half{0x3C01, 1.0009765625F}, Half{0x7BFF, 65504.0F}};

Half any_half(std::mt19937& random) { return halves[random() % halves.size()]; }

// Blocks of 32. `minimum`: Q5_1, else Q5_0.
Row five_bit_row(std::mt19937& random, bool minimum) {
  const std::size_t fifth = minimum ? 4 : 2, nibbles = fifth + 4;
  Row row;
  for (int block = 0; block < 8; ++block) {
    std::string bytes(nibbles + 16, '\0');
    const Half d = any_half(random), m = any_half(random);
    put_half(bytes, 0, d.bits);
    if (minimum) put_half(bytes, 2, m.bits);
    row.scale.push_back(d.value);
    row.bias.push_back(minimum ? m.value : -16.0F * d.value);
    for (std::size_t i = 0; i < 32; ++i) {
      const unsigned code = random() % 32;
      put(bytes, nibbles * 8 + i % 16 * 8 + i / 16 * 4, 4, code & 15U);
      put(bytes, fifth * 8 + i, 1, code >> 4);
      row.codes.push_back(static_cast<std::uint8_t>(code));
    }
    row.bytes += bytes;
  }
  return row;
}

// One super-block of 256. `five`: Q5_K, else Q4_K.
Row affine_k_row(std::mt19937& random, bool five) {
  Row row;
  const std::size_t high = 16, low = five ? 48 : 16;
  std::string bytes(low + 128, '\0');
  const Half d = any_half(random), m = any_half(random);
  put_half(bytes, 0, d.bits);
  put_half(bytes, 2, m.bits);
  for (std::size_t j = 0; j < 8; ++j) {
    const unsigned scale = random() % 64, min = random() % 64;
    row.scale.push_back(d.value * static_cast<float>(scale));
    row.bias.push_back(-m.value * static_cast<float>(min));
    const std::size_t packed = 4 * 8;
    if (j < 4) {
      put(bytes, packed + 8 * j, 6, scale);
      put(bytes, packed + 8 * (j + 4), 6, min);
    } else {
      put(bytes, packed + 8 * (j + 4), 4, scale & 15U);
      put(bytes, packed + 8 * (j + 4) + 4, 4, min & 15U);
      put(bytes, packed + 8 * (j - 4) + 6, 2, scale >> 4);
      put(bytes, packed + 8 * j + 6, 2, min >> 4);
    }
    for (std::size_t i = 0; i < 32; ++i) {
      const unsigned code = random() % (five ? 32 : 16);
      put(bytes, (low + j / 2 * 32 + i) * 8 + j % 2 * 4, 4, code & 15U);
      if (five) put(bytes, (high + i) * 8 + j, 1, code >> 4);
      row.codes.push_back(static_cast<std::uint8_t>(code));
    }
  }
  row.bytes = bytes;
  return row;
}

Row q6_k_row(std::mt19937& random) {
  Row row;
  std::string bytes(210, '\0');
  const Half d = any_half(random);
  put_half(bytes, 208, d.bits);
  for (std::size_t j = 0; j < 16; ++j) {
    const int scale = static_cast<int>(random() % 256) - 128;
    put(bytes, (192 + j) * 8, 8, static_cast<unsigned>(scale) & 255U);
    row.scale.push_back(d.value * static_cast<float>(scale));
    row.bias.push_back(-32.0F * row.scale.back());
  }
  for (std::size_t i = 0; i < 256; ++i) {
    const unsigned code = random() % 64;
    const std::size_t half = i / 128, within = i % 128;
    put(bytes, (half * 64 + within % 64) * 8 + within / 64 * 4, 4, code & 15U);
    put(bytes, (128 + half * 32 + within % 32) * 8 + within / 32 * 2, 2, code >> 4);
    row.codes.push_back(static_cast<std::uint8_t>(code));
  }
  row.bytes = bytes;
  return row;
}

struct Type {
  const char* name;
  std::uint32_t id;
  int bits;
  std::size_t group;
};
constexpr std::array types{Type{"Q5_0", 6, 5, 32}, Type{"Q5_1", 7, 5, 32}, Type{"Q4_K", 12, 4, 32},
                           Type{"Q5_K", 13, 5, 32}, Type{"Q6_K", 14, 6, 16}};

Row any_row(const Type& type, std::mt19937& random) {
  switch (type.id) {
    case 6:
    case 7:
      return five_bit_row(random, type.id == 7);
    case 14:
      return q6_k_row(random);
    default:
      return affine_k_row(random, type.id == 13);
  }
}

SmallGguf with_down(std::uint32_t type, std::string data) {
  SmallGguf options;
  options.intermediate = 256;
  options.down_type = type;
  options.down_data = std::move(data);
  return options;
}

TEST(CheckpointKQuants, ReadsExactlyWhatWasWritten) {
  const TempFolder folder;
  std::mt19937 random(11);
  for (const Type& type : types) {
    std::vector<Row> written;
    std::string data;
    for (std::size_t i = 0; i < rows; ++i) data += written.emplace_back(any_row(type, random)).bytes;
    const auto checkpoint = open_checkpoint(folder.write("model.gguf", small_gguf(with_down(type.id, data)).bytes()));
    EXPECT_NE(checkpoint->format().find(type.name), std::string::npos) << checkpoint->format();
    const auto matrix = checkpoint->matrix("model.layers.0.mlp.down_proj.weight", rows, 256);
    ASSERT_TRUE(matrix->quantized()) << type.name;
    EXPECT_EQ(matrix->affine().bits, type.bits) << type.name;
    EXPECT_EQ(static_cast<std::size_t>(matrix->affine().group), type.group) << type.name;
    EXPECT_EQ(matrix->type(), ops::ElementType::f32) << type.name;
    std::vector<std::uint8_t> codes(256);
    std::vector<float> scale(256 / type.group), bias(scale.size()), values(256);
    for (std::size_t i = 0; i < rows; ++i) {
      const Row& row = written[i];
      matrix->codes(static_cast<int>(i), codes);
      matrix->scales(static_cast<int>(i), scale, bias);
      matrix->values(static_cast<int>(i), values);
      ASSERT_EQ(codes, row.codes) << type.name << " row " << i;
      ASSERT_EQ(scale, row.scale) << type.name << " row " << i;
      ASSERT_EQ(bias, row.bias) << type.name << " row " << i;
      for (std::size_t k = 0; k < values.size(); ++k) {
        // Rounded once: the product is exact.
        const std::size_t g = k / type.group;
        const double exact = static_cast<double>(row.scale[g]) * row.codes[k] + static_cast<double>(row.bias[g]);
        ASSERT_EQ(values[k], static_cast<float>(exact)) << type.name << " row " << i << " element " << k;
      }
    }
  }
}

TEST(CheckpointKQuants, ShortRowsAndMissingBytesAreRefused) {
  const TempFolder folder;
  for (const Type& type : types) {
    if (type.id > 7) {  // rows of 32 are no whole super-block
      SmallGguf narrow;
      narrow.q_type = type.id;
      narrow.q_data = std::string(4096, '\1');
      EXPECT_THROW((void)open_checkpoint(folder.write("model.gguf", small_gguf(narrow).bytes())), ModelError);
    }
    std::mt19937 random(3);
    std::string bytes = small_gguf(with_down(type.id, any_row(type, random).bytes)).bytes();  // one row of 32
    EXPECT_THROW((void)open_checkpoint(folder.write("model.gguf", bytes)), ModelError) << type.name;
  }
}

/// Random bytes are valid blocks of every type: whatever they say, reading stays inside and gives the said codes.
TEST(CheckpointKQuants, AnyBytesAreRead) {
  const TempFolder folder;
  std::mt19937 random(5);
  for (const Type& type : types) {
    const std::size_t row_bytes = any_row(type, random).bytes.size();
    for (int round = 0; round < 20; ++round) {
      std::string data(rows * row_bytes, '\0');
      for (char& byte : data) byte = static_cast<char>(random());
      auto writer = small_gguf(with_down(type.id, data));
      const auto checkpoint = open_checkpoint(folder.write("model.gguf", writer.bytes()));
      const auto matrix = checkpoint->matrix("model.layers.0.mlp.down_proj.weight", rows, 256);
      std::vector<std::uint8_t> codes(256);
      std::vector<float> values(256);
      for (int i = 0; i < static_cast<int>(rows); ++i) {
        matrix->codes(i, codes);
        matrix->values(i, values);
        for (const std::uint8_t code : codes) ASSERT_LT(code, 1U << type.bits) << type.name;
      }
    }
  }
}

// ---- split files

/// The small llama in three pieces: metadata alone, then the embedding and norm, then the rest.
struct Pieces {
  std::array<test::GgufWriter, 3> writers;
  Pieces() {
    writers[0] = small_gguf_header();
    for (std::uint32_t i = 0; i < 3; ++i) {
      writers[i].integer("split.no", i);
      writers[i].integer("split.count", 3);
      writers[i].integer("split.tensors.count", 11);
    }
    small_gguf_tensors(writers[1], 0, 2);
    small_gguf_tensors(writers[2], 2, 11);
  }
  static test::GgufWriter small_gguf_header() {
    SmallGguf options;
    options.tensors = false;
    return small_gguf(options);
  }
  static void small_gguf_tensors(test::GgufWriter& writer, std::size_t first, std::size_t last) {
    static constexpr std::array<std::pair<const char*, std::uint64_t>, 11> all{{{"token_embd.weight", 4},
                                                                                {"output_norm.weight", 0},
                                                                                {"blk.0.attn_norm.weight", 0},
                                                                                {"blk.0.attn_q.weight", 32},
                                                                                {"blk.0.attn_k.weight", 16},
                                                                                {"blk.0.attn_v.weight", 16},
                                                                                {"blk.0.attn_output.weight", 32},
                                                                                {"blk.0.ffn_norm.weight", 0},
                                                                                {"blk.0.ffn_gate.weight", 32},
                                                                                {"blk.0.ffn_up.weight", 32},
                                                                                {"blk.0.ffn_down.weight", 32}}};
    for (std::size_t i = first; i < last; ++i) {
      const std::uint64_t count = std::max<std::uint64_t>(all[i].second, 1) * 32;
      const std::vector<float> values(count, static_cast<float>(i));
      if (all[i].second == 0) {
        writer.tensor(all[i].first, {32}, 0, test::bytes_of(values));
      } else {
        writer.tensor(all[i].first, {all[i].second, 32}, 0, test::bytes_of(values));
      }
    }
  }
  std::filesystem::path write(const TempFolder& folder) const {
    for (std::size_t i = 0; i < 3; ++i) folder.write(name(i), writers[i].bytes());
    return folder.path() / name(0);
  }
  static std::string name(std::size_t i) { return "small-0000" + std::to_string(i + 1) + "-of-00003.gguf"; }
};

std::string error_of(const std::filesystem::path& file) {
  try {
    (void)open_checkpoint(file);
  } catch (const ModelError& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_MENTIONS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(CheckpointSplit, PiecesAreOneModel) {
  const TempFolder folder;
  const Pieces pieces;
  (void)pieces.write(folder);
  std::size_t bytes = 0;
  for (const auto& writer : pieces.writers) bytes += writer.bytes().size();
  for (std::size_t named = 0; named < 3; ++named) {  // whichever is named
    const auto checkpoint = open_checkpoint(folder.path() / Pieces::name(named));
    EXPECT_EQ(checkpoint->path(), folder.path() / Pieces::name(0));
    EXPECT_EQ(checkpoint->file_bytes(), bytes);
    EXPECT_EQ(checkpoint->config().vocab, 4);
    std::vector<float> row(32);
    for (int pass = 0; pass < 2; ++pass) {
      checkpoint->matrix("model.embed_tokens.weight", 4, 32)->values(3, row);
      EXPECT_EQ(row[31], 0.0F);
      checkpoint->matrix("model.layers.0.mlp.down_proj.weight", 32, 32)->values(31, row);
      EXPECT_EQ(row[31], 10.0F);
      EXPECT_EQ(checkpoint->vector("model.norm.weight", 32).values.at(5), 1.0F);
      checkpoint->release_pages();
    }
  }
}

TEST(CheckpointSplit, PiecesThatDoNotBelongTogetherAreRefused) {
  const TempFolder folder;
  const auto first = Pieces().write(folder);
  std::filesystem::remove(folder.path() / Pieces::name(1));
  EXPECT_MENTIONS(error_of(first), Pieces::name(1) + ": cannot open");

  Pieces().write(folder);
  folder.write(Pieces::name(2), Pieces().writers[1].bytes());  // the second piece twice
  EXPECT_MENTIONS(error_of(first), "\"split.no\" and \"split.count\" are 1 and 3, expected 2 and 3");

  Pieces repeated;
  Pieces::small_gguf_tensors(repeated.writers[2], 0, 1);
  repeated.write(folder);
  EXPECT_MENTIONS(error_of(first), "\"token_embd.weight\" occurs in an earlier piece too");

  Pieces short_of_one;
  short_of_one.writers[2] = {};
  short_of_one.writers[2].integer("split.no", 2);
  short_of_one.writers[2].integer("split.count", 3);
  Pieces::small_gguf_tensors(short_of_one.writers[2], 2, 10);
  short_of_one.write(folder);
  EXPECT_MENTIONS(error_of(first), "\"split.tensors.count\" is 11, but the pieces hold 10 tensors");

  const auto renamed = folder.write("renamed.gguf", Pieces().writers[0].bytes());
  EXPECT_MENTIONS(error_of(renamed), "one of 3 pieces; expected a name that ends in -00001-of-00003.gguf");
}

TEST(CheckpointSplit, DamagedPiecesNeverReadOutside) {
  const TempFolder folder;
  const Pieces pieces;
  const auto first = pieces.write(folder);
  std::mt19937 random(17);
  int refused = 0;
  for (int round = 0; round < 1500; ++round) {
    const std::size_t which = random() % 3;
    std::string bytes = pieces.writers[which].bytes();
    for (int times = 0; times < 3; ++times)
      bytes[random() % std::min<std::size_t>(bytes.size(), 700)] ^= static_cast<char>(1U << random() % 8);
    if (round % 5 == 0) bytes.resize(random() % bytes.size() + 1);
    folder.write(Pieces::name(which), bytes);
    try {
      const auto checkpoint = open_checkpoint(first);
      std::vector<float> row(32);
      checkpoint->matrix("model.layers.0.mlp.down_proj.weight", 32, 32)->values(31, row);
    } catch (const ModelError&) {
      ++refused;
    }
    folder.write(Pieces::name(which), pieces.writers[which].bytes());
  }
  EXPECT_GT(refused, 700);
}

}  // namespace
}  // namespace galley::models
