// Decoders of llama.cpp's K-quants: super-blocks of 256 elements with two levels of scales. Every product below has at
// most 24 significant bits, so scales, biases and codes say exactly what the file says.
//   https://github.com/ggml-org/llama.cpp/pull/1684
//
// A super-block's scales are d (and dmin), stored as halves, times a small integer for each group:
//   Q4_K, Q5_K  8 groups of 32    value = (d * s) * code - dmin * m          s, m: 6 bits
//   Q6_K        16 groups of 16   value = (d * s) * (code - 32)              s: 8 bits, signed
#pragma once
#include <cstddef>
#include <cstdint>

#include "ops/weights.h"

namespace galley::models::k_quants {

constexpr std::size_t super_block = 256;

// Bytes of a super-block.
constexpr std::size_t q4_bytes = 2 + 2 + 12 + 128;
constexpr std::size_t q5_bytes = 2 + 2 + 12 + 32 + 128;
constexpr std::size_t q6_bytes = 128 + 64 + 16 + 2;

// Decoders of `blocks` consecutive super-blocks, as GgufType wants them.
void q4_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out);
void q5_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out);
void q6_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out);
void q4_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias);
void q5_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias);
void q6_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias);
void q4_levels(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out);
void q5_levels(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out);
void q6_levels(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out);

}  // namespace galley::models::k_quants
