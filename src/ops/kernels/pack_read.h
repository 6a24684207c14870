// Internal: single elements of a packed affine matrix, for code that is not vectorized. Layout: see pack.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/kernels/half.h"
#include "ops/kernels/pack.h"

namespace galley::kernels {

template <typename T>
T load_packed(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// The code of input k in column `lane` of a block.
inline int code_at(const PackedMatrix& w, const std::uint8_t* block, std::size_t lane, int k) {
  const auto lanes = static_cast<std::size_t>(w.lanes());
  const int bits = w.bits(), row = k % 32 / 4;
  const std::uint8_t* part =
      block + w.header_bytes() + static_cast<std::size_t>(k / 32) * lanes * 4 * static_cast<std::size_t>(bits);
  const auto byte = [&](int r) { return part[(static_cast<std::size_t>(r) * lanes + lane) * 4 + k % 4]; };
  if (bits == 8) return byte(row);
  int code = byte(row % 4) >> (row < 4 ? 0 : 4) & 15;
  if (bits == 5) code |= (byte(4) >> row & 1) << 4;
  if (bits == 6) code |= (byte(4 + row / 4) >> row % 4 * 2 & 3) << 4;
  return code;
}

struct PackedScale {
  float scale, bias;  ///< bias of a symmetric matrix: 0 (its codes count from the zero point)
};

/// Scale and bias of group g in column `lane` of a block.
inline PackedScale scale_at(const PackedMatrix& w, const std::uint8_t* block, std::size_t lane, int g) {
  const auto lanes = static_cast<std::size_t>(w.lanes());
  const auto at = static_cast<std::size_t>(g) * (w.symmetric() ? lanes : 2 * lanes) + lane;
  const std::size_t other = w.symmetric() ? 0 : lanes;  // from a scale to its bias
  const auto half = [&](std::size_t byte) { return half_to_float(load_packed<std::uint16_t>(block + byte)); };
  PackedScale s{};
  switch (w.scale_kind()) {
    case ScaleKind::half:
      s = {half(at * 2), half((at + other) * 2)};
      break;
    case ScaleKind::single:
      s = {load_packed<float>(block + at * 4), load_packed<float>(block + (at + other) * 4)};
      break;
    case ScaleKind::two_level: {
      const auto run = static_cast<std::size_t>(g / w.groups_per_run());
      const std::size_t vectors = w.symmetric() ? 1 : 2;
      // Bytes before this group's integers: the runs before, this run's upper level, its earlier groups.
      const std::size_t upper = run * lanes * vectors * (2 + static_cast<std::size_t>(w.groups_per_run()));
      const std::size_t small =
          upper + 2 * lanes * vectors + static_cast<std::size_t>(g % w.groups_per_run()) * lanes * vectors;
      const auto integer = [&](std::size_t byte) {
        return static_cast<float>(load_packed<std::int8_t>(block + byte + lane));
      };
      s = {half(upper + 2 * lane) * integer(small), half(upper + 2 * (lane + other)) * integer(small + other)};
      break;
    }
  }
  if (w.symmetric()) s.bias = 0;
  return s;
}

/// What a symmetric matrix's codes count from; 0 otherwise.
inline int zero_point(const PackedMatrix& w) { return w.symmetric() ? 1 << (w.bits() - 1) : 0; }

}  // namespace galley::kernels
