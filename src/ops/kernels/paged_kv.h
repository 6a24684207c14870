// The KV pool of one layer as the kernels see it: an array of fixed-size blocks, found through block tables.
#pragma once
#include <cstddef>
#include <cstdint>

namespace galley::kernels {

/// How a number is stored. Codes stand for scale * code + bias, with a scale and a bias a token and group of
/// dimensions.
enum class KvElement { f16, bf16, f32, code8, code4 };

[[nodiscard]] constexpr bool kv_quantized(KvElement e) { return e == KvElement::code8 || e == KvElement::code4; }
[[nodiscard]] constexpr int kv_element_bits(KvElement e) {
  return e == KvElement::f32 ? 32 : e == KvElement::code8 ? 8 : e == KvElement::code4 ? 4 : 16;
}

constexpr int kKeyGroup = 16;  ///< keys transposed together

/// Non-owning. Block b starts at data + b * block_stride and holds `block_tokens` tokens of every KV head: first K,
/// then V, each [kv_heads][block_tokens/16] runs. A run holds 16 tokens of one head:
///   K    numbers [head_dim][16]: 16 keys side by side, one vector a dimension.
///        code4: bytes [head_dim/2][16], dimension 2i in the low nibble, 2i + 1 in the high one
///   V    numbers [16][head_dim].
///        code4: bytes [16][head_dim/2], of every 32 dimensions 16 bytes: byte i has dimension i (low) and 16 + i
///        (high)
///   and for codes, of both, [head_dim/group] times fp16 scales [16] and biases [16]
/// No byte belongs to two tokens, so tokens can be written from several threads. Blocks may hold garbage, NaN bits
/// included, wherever no token was written yet.
struct PagedKv {
  std::byte* data = nullptr;     ///< 64-byte aligned
  std::size_t block_stride = 0;  ///< bytes from block to block; at least block_bytes(), a multiple of 64
  KvElement element = KvElement::f16;
  int group = 0;  ///< of codes: a multiple of 32 that divides head_dim
  int kv_heads = 0;
  int head_dim = 0;       ///< a multiple of 16, at most 512
  int block_tokens = 32;  ///< a multiple of 16

  [[nodiscard]] bool quantized() const { return kv_quantized(element); }
  [[nodiscard]] int groups() const { return quantized() ? head_dim / group : 0; }
  /// Bytes of the numbers in a run, which scales and biases follow.
  [[nodiscard]] std::size_t number_bytes() const {
    return static_cast<std::size_t>(head_dim) * kKeyGroup / 8 * static_cast<std::size_t>(kv_element_bits(element));
  }
  [[nodiscard]] std::size_t run_bytes() const {
    return number_bytes() + static_cast<std::size_t>(groups()) * 2 * kKeyGroup * sizeof(std::uint16_t);
  }
  [[nodiscard]] int runs() const { return block_tokens / kKeyGroup; }
  /// Bytes one block of one layer takes.
  [[nodiscard]] std::size_t block_bytes() const {
    return run_bytes() * 2 * static_cast<std::size_t>(runs() * kv_heads);
  }
  /// The run of the block's token `slot`; the token is number slot % 16 in it.
  [[nodiscard]] std::byte* keys(std::int32_t block, int kv_head, int slot) const {
    return data + static_cast<std::size_t>(block) * block_stride +
           run_bytes() * static_cast<std::size_t>(kv_head * runs() + slot / kKeyGroup);
  }
  [[nodiscard]] std::byte* values(std::int32_t block, int kv_head, int slot) const {
    return keys(block, kv_heads + kv_head, slot);
  }
  /// Scales [16] of a run's group, which biases [16] follow.
  [[nodiscard]] std::uint16_t* scales(std::byte* run, int g) const {
    return reinterpret_cast<std::uint16_t*>(run + number_bytes()) + static_cast<std::ptrdiff_t>(g) * 2 * kKeyGroup;
  }
  [[nodiscard]] const std::uint16_t* scales(const std::byte* run, int g) const {
    return reinterpret_cast<const std::uint16_t*>(run + number_bytes()) +
           static_cast<std::ptrdiff_t>(g) * 2 * kKeyGroup;
  }
};

/// Where the rows of a step stand. Non-owning; must stay unchanged while kernels run.
struct RowPlaces {
  int rows = 0;
  const std::int32_t* position = nullptr;  ///< [rows] absolute position of each row's token
  /// [rows] each row's block table: table[r][p / block_tokens] is the block of position p. Rows of one sequence carry
  /// the same pointer, and neighbouring rows that do, at consecutive positions, are attended together. Entries of
  /// blocks that lie wholly before a sliding window are never read.
  const std::int32_t* const* table = nullptr;
};

}  // namespace galley::kernels
