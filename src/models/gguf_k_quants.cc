#include "models/gguf_k_quants.h"

#include <array>
#include <cstring>

#include "models/checkpoint_numbers.h"

namespace galley::models::k_quants {
namespace {

using Run = std::array<std::uint8_t, 32>;

// A copy that nothing can alias, so that loops over it vectorize.
Run load_run(const std::byte* from) {
  Run run;
  std::memcpy(run.data(), from, run.size());
  return run;
}

float half_at(const std::byte* from) { return half_to_float(load_unaligned<std::uint16_t>(from)); }

struct SixBits {
  std::uint8_t scale, min;
};

/// Scale and minimum of group j, 0 to 7, out of 12 bytes: four bytes of scales, four of minima, each with the low six
/// bits of groups 0 to 3 and on top two bits of groups 4 to 7, whose low four bits fill the last four bytes.
SixBits six_bits(const std::byte* packed, std::size_t j) {
  const auto at = [&](std::size_t i) { return std::to_integer<unsigned>(packed[i]); };
  if (j < 4) return {static_cast<std::uint8_t>(at(j) & 63U), static_cast<std::uint8_t>(at(j + 4) & 63U)};
  const unsigned low = at(j + 4);
  return {static_cast<std::uint8_t>((low & 15U) | (at(j - 4) >> 6) << 4),
          static_cast<std::uint8_t>(low >> 4 | (at(j) >> 6) << 4)};
}

/// d, dmin and the six-bit scales and minima are where both Q4_K and Q5_K begin.
void affine_scales(const std::byte* row, std::size_t blocks, std::size_t bytes, float* scale, float* bias) {
  for (; blocks > 0; --blocks, row += bytes) {
    const float d = half_at(row);
    const float minus_dmin = -half_at(row + 2);
    for (std::size_t j = 0; j < 8; ++j) {
      const SixBits six = six_bits(row + 4, j);
      *scale++ = d * static_cast<float>(six.scale);
      *bias++ = minus_dmin * static_cast<float>(six.min);
    }
  }
}

void affine_levels(const std::byte* row, std::size_t blocks, std::size_t bytes, const ops::ScaleLevels& out) {
  for (std::size_t b = 0; b < blocks; ++b, row += bytes) {
    out.run_scale[b] = load_unaligned<std::uint16_t>(row);
    out.run_bias[b] = static_cast<std::uint16_t>(load_unaligned<std::uint16_t>(row + 2) ^ 0x8000U);  // minus dmin
    for (std::size_t j = 0; j < 8; ++j) {
      const SixBits six = six_bits(row + 4, j);
      out.scale[8 * b + j] = static_cast<std::int8_t>(six.scale);
      out.bias[8 * b + j] = static_cast<std::int8_t>(six.min);
    }
  }
}

}  // namespace

// Each run of 32 bytes holds two groups: one in the low nibbles, the next in the high ones.
void q4_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, row += q4_bytes) {
    for (std::size_t pair = 0; pair < 4; ++pair, out += 64) {
      const Run run = load_run(row + 16 + pair * 32);
      for (std::size_t i = 0; i < 32; ++i) out[i] = run[i] & 15U;
      for (std::size_t i = 0; i < 32; ++i) out[i + 32] = static_cast<std::uint8_t>(run[i] >> 4);
    }
  }
}

// The same, with the fifth bit of group j's element i in bit j of byte i of the run in front.
void q5_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, row += q5_bytes) {
    const Run high = load_run(row + 16);
    for (std::size_t pair = 0; pair < 4; ++pair, out += 64) {
      const Run run = load_run(row + 48 + pair * 32);
      const unsigned first = static_cast<unsigned>(2 * pair);
      for (std::size_t i = 0; i < 32; ++i) {
        out[i] = static_cast<std::uint8_t>((run[i] & 15U) | (high[i] >> first & 1U) << 4);
      }
      for (std::size_t i = 0; i < 32; ++i) {
        out[i + 32] = static_cast<std::uint8_t>(run[i] >> 4 | (high[i] >> (first + 1) & 1U) << 4);
      }
    }
  }
}

// Two halves of 128 elements. In each, quarter c (32 elements) has its low four bits in run c % 2 of two, nibble c / 2,
// and its high two bits in bits 2c of a third run.
void q6_codes(const std::byte* row, std::size_t blocks, std::uint8_t* out) {
  for (; blocks > 0; --blocks, row += q6_bytes) {
    for (std::size_t half = 0; half < 2; ++half) {
      const Run high = load_run(row + 128 + half * 32);
      for (unsigned quarter = 0; quarter < 4; ++quarter, out += 32) {
        const Run run = load_run(row + half * 64 + quarter % 2 * 32);
        const unsigned shift = quarter / 2 * 4;
        for (std::size_t i = 0; i < 32; ++i) {
          out[i] = static_cast<std::uint8_t>((run[i] >> shift & 15U) | (high[i] >> 2 * quarter & 3U) << 4);
        }
      }
    }
  }
}

void q4_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias) {
  affine_scales(row, blocks, q4_bytes, scale, bias);
}

void q5_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias) {
  affine_scales(row, blocks, q5_bytes, scale, bias);
}

void q6_scales(const std::byte* row, std::size_t blocks, float* scale, float* bias) {
  for (; blocks > 0; --blocks, row += q6_bytes) {
    const float d = half_at(row + 208);
    for (std::size_t j = 0; j < 16; ++j) {
      *scale = d * static_cast<float>(std::to_integer<std::int8_t>(row[192 + j]));
      *bias++ = -32.0F * *scale++;
    }
  }
}

void q4_levels(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out) {
  affine_levels(row, blocks, q4_bytes, out);
}

void q5_levels(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out) {
  affine_levels(row, blocks, q5_bytes, out);
}

void q6_levels(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out) {
  for (std::size_t b = 0; b < blocks; ++b, row += q6_bytes) {
    out.run_scale[b] = load_unaligned<std::uint16_t>(row + 208);
    std::memcpy(out.scale.data() + 16 * b, row + 192, 16);
  }
}

}  // namespace galley::models::k_quants
