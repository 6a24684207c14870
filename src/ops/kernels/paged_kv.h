// The KV pool of one layer as the kernels see it: an array of fixed-size blocks, found through block tables.
#pragma once
#include <cstddef>
#include <cstdint>

namespace galley::kernels {

enum class KvElement { f16, bf16, f32 };

[[nodiscard]] constexpr std::size_t kv_element_bytes(KvElement e) { return e == KvElement::f32 ? 4 : 2; }

constexpr int kKeyGroup = 16;  ///< keys transposed together

/// Non-owning. Block b starts at data + b * block_stride and holds `block_tokens` tokens of every KV head:
///   K [kv_heads][block_tokens/16][head_dim][16]   (16 keys side by side, one vector a dimension)
///   V [kv_heads][block_tokens][head_dim]          (directly after K)
/// Blocks may hold garbage, NaN bits included, wherever no token was written yet.
struct PagedKv {
  std::byte* data = nullptr;     ///< 64-byte aligned
  std::size_t block_stride = 0;  ///< bytes from block to block; at least block_bytes(), a multiple of 64
  KvElement element = KvElement::f16;
  int kv_heads = 0;
  int head_dim = 0;       ///< a multiple of 16, at most 512
  int block_tokens = 32;  ///< a multiple of 16

  [[nodiscard]] std::size_t head_elements() const { return static_cast<std::size_t>(block_tokens) * head_dim; }
  /// Bytes one block of one layer takes.
  [[nodiscard]] std::size_t block_bytes() const { return head_elements() * kv_heads * 2 * kv_element_bytes(element); }
  [[nodiscard]] std::byte* keys(std::int32_t block, int kv_head) const {
    return data + static_cast<std::size_t>(block) * block_stride +
           head_elements() * kv_head * kv_element_bytes(element);
  }
  [[nodiscard]] std::byte* values(std::int32_t block, int kv_head) const {
    return keys(block, kv_heads) + head_elements() * kv_head * kv_element_bytes(element);
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
