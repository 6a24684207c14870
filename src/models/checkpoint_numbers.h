// Stored numbers, widened to float32 exactly. Files are little-endian and tensors in them need not be aligned.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "ops/weights.h"

namespace galley::models {

static_assert(std::endian::native == std::endian::little, "checkpoints are read in place");

template <typename T>
T load_unaligned(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// IEEE half precision, subnormals, infinities and NaN included. Written as selects so that loops vectorize.
inline float half_to_float(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7FFFU;
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t rebias = magnitude >= 0x7C00U ? (255U - 31U) << 23 : (127U - 15U) << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias;
  const auto subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
  return std::bit_cast<float>(sign | (magnitude < 0x0400U ? subnormal : normal));
}

inline float bfloat_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::size_t element_bytes(ops::ElementType type) { return type == ops::ElementType::f32 ? 4 : 2; }

/// Widens out.size() elements of `type` that start at `from`.
inline void widen(ops::ElementType type, const std::byte* from, std::span<float> out) {
  switch (type) {
    case ops::ElementType::f32:
      std::memcpy(out.data(), from, out.size_bytes());
      return;
    case ops::ElementType::f16:
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = half_to_float(load_unaligned<std::uint16_t>(from + 2 * i));
      return;
    case ops::ElementType::bf16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = bfloat_to_float(load_unaligned<std::uint16_t>(from + 2 * i));
      }
      return;
  }
}

/// out = float(scale * code + bias), a group at a time.
inline void expand_affine(std::span<const std::uint8_t> codes, std::span<const float> scales,
                          std::span<const float> biases, std::span<float> out) {
  const std::size_t group = out.size() / scales.size();
  for (std::size_t g = 0; g < scales.size(); ++g) {
    const float scale = scales[g];
    const float bias = biases[g];
    for (std::size_t i = g * group; i < (g + 1) * group; ++i) out[i] = scale * static_cast<float>(codes[i]) + bias;
  }
}

}  // namespace galley::models
