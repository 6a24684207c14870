// How the keys and values of a layer are stored.
#pragma once

namespace galley::ops {

/// Affine quantization along the head dimension: each group of `group` numbers of a token becomes codes of `bits` bits,
/// with a scale and a bias of its own; a number is scale * code + bias. Without bits, numbers are kept as they come.
struct KvFormat {
  int bits = 0;  ///< 0, 4 or 8
  int group = 64;

  [[nodiscard]] constexpr bool quantized() const { return bits != 0; }
  friend bool operator==(const KvFormat&, const KvFormat&) = default;
};

}  // namespace galley::ops
