// Single numbers and tokens of a run of keys or values (paged_kv.h), for code that is not vectorized: the layout in
// words.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ops/kernels/half.h"
#include "ops/kernels/paged_kv.h"

namespace galley::kernels {

enum class KvPart { keys, values };

/// Where dimension `d` of token `slot` (0 to 15) stands among a run's numbers; two dimensions of code4 share a byte.
[[nodiscard]] inline std::size_t kv_index(const PagedKv& kv, KvPart part, int slot, int d) {
  const bool keys = part == KvPart::keys;
  const int index = kv.element != KvElement::code4 ? (keys ? d * kKeyGroup + slot : slot * kv.head_dim + d)
                    : keys                         ? d / 2 * kKeyGroup + slot
                                                   : (slot * kv.head_dim + d / 32 * 32) / 2 + d % 16;
  return static_cast<std::size_t>(index);
}

/// The number as attention reads it.
[[nodiscard]] inline float kv_number(const PagedKv& kv, const std::byte* run, KvPart part, int slot, int d) {
  const std::size_t at = kv_index(kv, part, slot, d);
  if (kv.element == KvElement::f32) return reinterpret_cast<const float*>(run)[at];
  if (!kv.quantized()) {
    const std::uint16_t h = reinterpret_cast<const std::uint16_t*>(run)[at];
    return kv.element == KvElement::f16 ? half_to_float(h) : bfloat_to_float(h);
  }
  unsigned code = std::to_integer<unsigned>(run[at]);
  if (kv.element == KvElement::code4) code = (part == KvPart::keys ? d % 2 : d / 16 % 2) != 0 ? code >> 4 : code & 15;
  const std::uint16_t* scales = kv.scales(run, d / kv.group);
  return std::fma(half_to_float(scales[slot]), static_cast<float>(code), half_to_float(scales[kKeyGroup + slot]));
}

/// Scale and bias of a group of numbers between `low` and `high`, as fp16: codes 0 to `top` reach all of them. Only the
/// rounded ones count from here on.
struct KvScale {
  std::uint16_t scale, bias;

  static KvScale of(float low, float high, int top) {
    const std::uint16_t bias = float_to_half(low);
    const float range = high - half_to_float(bias);
    std::uint16_t scale = float_to_half(range / static_cast<float>(top));
    if (half_to_float(scale) * static_cast<float>(top) < range) ++scale;
    return {scale, bias};
  }
  /// What a number that is not finite makes of its group: a faulty row stays visibly faulty.
  static KvScale faulty() { return {0x7e00, 0x7e00}; }
  /// Multiplies a number less the bias.
  [[nodiscard]] float inverse() const { return scale == 0 ? 0.0F : 1.0F / half_to_float(scale); }
};

/// Puts a token's codes [head_dim] in their places.
inline void store_kv_codes(const PagedKv& kv, std::byte* run, KvPart part, int slot, const std::int32_t* codes) {
  const auto byte = [](std::int32_t code) { return static_cast<std::byte>(code); };
  const int dim = kv.head_dim;
  if (kv.element == KvElement::code8) {
    for (int d = 0; d < dim; ++d) run[kv_index(kv, part, slot, d)] = byte(codes[d]);
  } else if (part == KvPart::keys) {
    std::byte* to = run + slot;
    for (int d = 0; d < dim; d += 2, to += kKeyGroup) *to = byte(codes[d] | codes[d + 1] << 4);
  } else {
    std::byte* to = run + static_cast<std::ptrdiff_t>(slot) * (dim / 2);
    for (int d = 0; d < dim; d += 32, to += 16) {
      for (int i = 0; i < 16; ++i) to[i] = byte(codes[d + i] | codes[d + 16 + i] << 4);
    }
  }
}

/// Rounds a token's numbers [head_dim] and puts them in their places. Beyond fp16's range they become its largest ones.
inline void store_kv_row(const PagedKv& kv, std::byte* run, KvPart part, int slot, const float* x) {
  const auto finite = [](float v) { return std::isnan(v) ? v : std::clamp(v, -65504.0F, 65504.0F); };
  if (!kv.quantized()) {
    for (int d = 0; d < kv.head_dim; ++d) {
      const std::size_t at = kv_index(kv, part, slot, d);
      if (kv.element == KvElement::f32) {
        reinterpret_cast<float*>(run)[at] = x[d];
      } else {
        reinterpret_cast<std::uint16_t*>(run)[at] =
            kv.element == KvElement::f16 ? float_to_half(finite(x[d])) : float_to_bfloat(x[d]);
      }
    }
    return;
  }
  const int top = (1 << kv_element_bits(kv.element)) - 1;
  std::int32_t codes[512] = {};
  for (int g = 0; g < kv.groups(); ++g) {
    const float* in = x + static_cast<std::ptrdiff_t>(g) * kv.group;
    float low = finite(in[0]), high = low, faults = 0;
    for (int i = 0; i < kv.group; ++i) {
      low = std::min(low, finite(in[i]));
      high = std::max(high, finite(in[i]));
      faults += finite(in[i]) - finite(in[i]);
    }
    const bool faulty = std::isnan(faults);
    const KvScale scale = faulty ? KvScale::faulty() : KvScale::of(low, high, top);
    const float bias = half_to_float(scale.bias), inverse = scale.inverse();
    for (int i = 0; !faulty && i < kv.group; ++i) {
      codes[g * kv.group + i] = std::clamp(static_cast<int>(std::nearbyint((finite(in[i]) - bias) * inverse)), 0, top);
    }
    std::uint16_t* scales = kv.scales(run, g);
    scales[slot] = scale.scale;
    scales[kKeyGroup + slot] = scale.bias;
  }
  store_kv_codes(kv, run, part, slot, codes);
}

}  // namespace galley::kernels
