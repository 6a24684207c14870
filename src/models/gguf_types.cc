#include "models/gguf_types.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "models/checkpoint_numbers.h"
#include "models/gguf_k_quants.h"

namespace galley::models {
namespace {

constexpr std::size_t half_group = 16;
constexpr std::size_t group = 2 * half_group;

// Blocks of 32 elements, little-endian:
//   Q4_0: half d, 16 bytes of nibbles           value = d * (code - 8)
//   Q4_1: half d, half m, 16 bytes of nibbles   value = d * code + m
//   Q5_0: half d, 4 bytes of fifth bits, 16 bytes of nibbles           value = d * (code - 16)
//   Q5_1: half d, half m, 4 bytes of fifth bits, 16 bytes of nibbles   value = d * code + m
//   Q8_0: half d, 32 signed bytes               value = d * byte, with code = byte + 128
// Byte i holds element i in its low nibble and element i + 16 in the high one; bit i of the fifth bits is element i's.
struct Q4_0 {
  static constexpr std::size_t bytes = 18, codes_at = 2;
  static float bias(const std::byte* /*block*/, float d) { return -8.0F * d; }
};
struct Q4_1 {
  static constexpr std::size_t bytes = 20, codes_at = 4;
  static float bias(const std::byte* block, float /*d*/) {
    return half_to_float(load_unaligned<std::uint16_t>(block + 2));
  }
};
struct Q5_0 {
  static constexpr std::size_t bytes = 22, fifth_at = 2, codes_at = 6;
  static float bias(const std::byte* /*block*/, float d) { return -16.0F * d; }
};
struct Q5_1 {
  static constexpr std::size_t bytes = 24, fifth_at = 4, codes_at = 8;
  static float bias(const std::byte* block, float d) { return Q4_1::bias(block, d); }
};
struct Q8_0 {
  static constexpr std::size_t bytes = 34, codes_at = 2;
  static float bias(const std::byte* /*block*/, float d) { return -128.0F * d; }
};

template <typename Block>
void nibble_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out) {
  for (std::size_t b = 0; b < blocks; ++b, row += Block::bytes, out += group) {
    // A copy that nothing can alias, so that the loop vectorizes.
    std::array<std::uint8_t, half_group> packed;
    std::memcpy(packed.data(), row + Block::codes_at, half_group);
    for (std::size_t i = 0; i < half_group; ++i) out[i] = packed[i] & 0x0FU;
    for (std::size_t i = 0; i < half_group; ++i) out[i + half_group] = static_cast<std::uint8_t>(packed[i] >> 4);
  }
}

template <typename Block>
void five_bit_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out) {
  nibble_codes<Block>(row, blocks, out);
  for (std::size_t b = 0; b < blocks; ++b, row += Block::bytes, out += group) {
    const auto fifth = load_unaligned<std::uint32_t>(row + Block::fifth_at);
    std::array<std::uint8_t, group> codes;
    std::memcpy(codes.data(), out, group);
    for (std::size_t i = 0; i < group; ++i) codes[i] |= static_cast<std::uint8_t>((fifth >> i & 1U) << 4);
    std::memcpy(out, codes.data(), group);
  }
}

void byte_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out) {
  for (std::size_t b = 0; b < blocks; ++b, row += Q8_0::bytes, out += group) {
    std::array<std::uint8_t, group> signed_bytes;
    std::memcpy(signed_bytes.data(), row + Q8_0::codes_at, group);
    // Adding 128 to a two's complement byte flips its top bit.
    for (std::size_t i = 0; i < group; ++i) out[i] = signed_bytes[i] ^ 0x80U;
  }
}

template <typename Block>
void block_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias) {
  for (std::size_t b = 0; b < blocks; ++b, row += Block::bytes) {
    scale[b] = half_to_float(load_unaligned<std::uint16_t>(row));
    bias[b] = Block::bias(row, scale[b]);
  }
}

using ops::ElementType;
namespace k = k_quants;

constexpr std::array supported{
    GgufType{0, "F32", 1, 4, ElementType::f32, {0, 0}, nullptr, nullptr},
    GgufType{1, "F16", 1, 2, ElementType::f16, {0, 0}, nullptr, nullptr},
    GgufType{30, "BF16", 1, 2, ElementType::bf16, {0, 0}, nullptr, nullptr},
    GgufType{2, "Q4_0", 32, Q4_0::bytes, ElementType::f32, {4, 32}, nibble_codes<Q4_0>, block_scales<Q4_0>},
    GgufType{3, "Q4_1", 32, Q4_1::bytes, ElementType::f32, {4, 32}, nibble_codes<Q4_1>, block_scales<Q4_1>},
    GgufType{6, "Q5_0", 32, Q5_0::bytes, ElementType::f32, {5, 32}, five_bit_codes<Q5_0>, block_scales<Q5_0>},
    GgufType{7, "Q5_1", 32, Q5_1::bytes, ElementType::f32, {5, 32}, five_bit_codes<Q5_1>, block_scales<Q5_1>},
    GgufType{8, "Q8_0", 32, Q8_0::bytes, ElementType::f32, {8, 32}, byte_codes, block_scales<Q8_0>},
    GgufType{12,
             "Q4_K",
             k::super_block,
             k::q4_bytes,
             ElementType::f32,
             {4, 32},
             k::q4_codes,
             k::q4_scales,
             k::q4_levels,
             true},
    GgufType{13,
             "Q5_K",
             k::super_block,
             k::q5_bytes,
             ElementType::f32,
             {5, 32},
             k::q5_codes,
             k::q5_scales,
             k::q5_levels,
             true},
    GgufType{14,
             "Q6_K",
             k::super_block,
             k::q6_bytes,
             ElementType::f32,
             {6, 16},
             k::q6_codes,
             k::q6_scales,
             k::q6_levels,
             false},
};

// Every type that ggml numbers, so that one that is not supported can be named.
struct TypeName {
  std::uint32_t id;
  std::string_view name;
};
constexpr std::array names{
    TypeName{9, "Q8_1"},     TypeName{10, "Q2_K"},   TypeName{11, "Q3_K"},    TypeName{15, "Q8_K"},
    TypeName{16, "IQ2_XXS"}, TypeName{17, "IQ2_XS"}, TypeName{18, "IQ3_XXS"}, TypeName{19, "IQ1_S"},
    TypeName{20, "IQ4_NL"},  TypeName{21, "IQ3_S"},  TypeName{22, "IQ2_S"},   TypeName{23, "IQ4_XS"},
    TypeName{24, "I8"},      TypeName{25, "I16"},    TypeName{26, "I32"},     TypeName{27, "I64"},
    TypeName{28, "F64"},     TypeName{29, "IQ1_M"},  TypeName{34, "TQ1_0"},   TypeName{35, "TQ2_0"},
    TypeName{39, "MXFP4"},   TypeName{40, "NVFP4"},
};

}  // namespace

const GgufType* find_gguf_type(std::uint32_t id) {
  const auto found = std::ranges::find(supported, id, &GgufType::id);
  return found == supported.end() ? nullptr : &*found;
}

std::string gguf_type_name(std::uint32_t id) {
  if (const GgufType* type = find_gguf_type(id)) return type->name;
  const auto found = std::ranges::find(names, id, &TypeName::id);
  return found == names.end() ? "number " + std::to_string(id) : std::string(found->name);
}

std::string supported_gguf_types() {
  std::string text;
  for (const GgufType& type : supported) text += (text.empty() ? "" : ", ") + std::string(type.name);
  return text;
}

}  // namespace galley::models
