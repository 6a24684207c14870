// Conversions between fp32 and the 16-bit types, for code that is not vectorized.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace galley::kernels {

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000U) << 16, exponent = h >> 10 & 31U, mantissa = h & 1023U;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float f = static_cast<float>(mantissa) * 5.9604644775390625e-8F;
    return sign != 0 ? -f : f;
  }
  const std::uint32_t bits = exponent == 31 ? 0x7f800000U | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
  return std::bit_cast<float>(sign | bits);
}

/// Rounds to nearest even; values beyond fp16 become infinite, NaN stays NaN.
inline std::uint16_t float_to_half(float f) {
  const auto all = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = all >> 16 & 0x8000U, x = all & 0x7fffffffU;
  if (x > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (x >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (x < 0x38800000U) {  // subnormal: let an addition do the rounding
    const auto b = std::bit_cast<std::uint32_t>(std::bit_cast<float>(x) + 0.5F);
    return static_cast<std::uint16_t>(sign | (b - 0x3f000000U));
  }
  return static_cast<std::uint16_t>(sign | ((x + 0xfffU + (x >> 13 & 1U) - 0x38000000U) >> 13));
}

inline float bfloat_to_float(std::uint16_t b) { return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16); }

/// Rounds to nearest even; NaN stays NaN.
inline std::uint16_t float_to_bfloat(float f) {
  const auto x = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t rounded = (x + 0x7fffU + (x >> 16 & 1U)) >> 16;
  const std::uint32_t nan = x >> 16 | 0x40U;
  return static_cast<std::uint16_t>((x & 0x7fffffffU) > 0x7f800000U ? nan : rounded);
}

}  // namespace galley::kernels
