// Internal: cuts the KV that an attention is about to read into pieces that the products before it fetch on the side.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "ops/kernels/kernel_table.h"
#include "ops/kernels/kernels.h"

namespace galley::kernels {

/// The pieces of one product call. A slot is a short computation that can fetch one piece meanwhile; slots in order get
/// pieces in order, so that a thread fetches what its own share of the attention will mostly read.
class KvPieces {
 public:
  KvPieces() = default;
  /// `blocks`: scratch, filled here and read as long as the pieces are. A piece is at most `most` bytes.
  KvPieces(std::vector<const char*>& blocks, const KvAhead& ahead, int slots, std::size_t most);

  [[nodiscard]] bool empty() const { return count_ == 0; }
  /// What `slot` (0 to slots - 1) fetches; no bytes where there is nothing left for it.
  [[nodiscard]] Fetch operator[](int slot) const {
    const auto block = static_cast<std::size_t>(slot / per_block_);
    const std::size_t at = static_cast<std::size_t>(slot % per_block_) * bytes_;
    if (block >= count_ || at >= block_bytes_) return {};
    return {blocks_[block] + at, std::min(bytes_, block_bytes_ - at)};
  }

 private:
  const char* const* blocks_ = nullptr;
  std::size_t count_ = 0;  // of blocks
  int per_block_ = 1;      // pieces
  std::size_t bytes_ = 0;  // of a piece
  std::size_t block_bytes_ = 0;
};

}  // namespace galley::kernels
