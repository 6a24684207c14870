// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011): a random function of (key, counter), with no state of its own.
#pragma once
#include <array>
#include <cstdint>

namespace galley::sample {

using PhiloxBlock = std::array<std::uint32_t, 4>;

/// The four random words that belong to `counter` under `key`.
[[nodiscard]] constexpr PhiloxBlock philox4x32_10(PhiloxBlock counter, std::array<std::uint32_t, 2> key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0];
    const std::uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32U) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32U) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

/// Draw number `draw` of the stream named `seed`: uniform in [0, 1) with 53 random bits.
[[nodiscard]] constexpr double uniform_draw(std::uint64_t seed, std::uint64_t draw) {
  const PhiloxBlock words =
      philox4x32_10({static_cast<std::uint32_t>(draw), static_cast<std::uint32_t>(draw >> 32U), 0, 0},
                    {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)});
  const std::uint64_t bits = (static_cast<std::uint64_t>(words[0]) << 32U) | words[1];
  return static_cast<double>(bits >> 11U) * 0x1.0p-53;
}

}  // namespace galley::sample
