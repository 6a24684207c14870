// The immutable snapshot of one ragged step: which tokens, of which rows, at which positions, in which KV blocks.
// Primitives hold it by shared pointer, so a step in flight never sees what the scheduler changes afterwards.
#pragma once
#include <cstdint>
#include <vector>

namespace galley::ops {

struct RaggedStep {
  std::vector<std::int32_t> tokens;     ///< [T] ids, the tokens of one row next to each other and in order
  std::vector<std::int32_t> rows;       ///< [T] index of the token's row in each of `tables`
  std::vector<std::int32_t> positions;  ///< [T] absolute position in the row
  /// [tables, row_count, table_stride] places of blocks by position / block_tokens; layers say which table is theirs.
  /// Those of blocks before a layer's window may be anything.
  std::vector<std::int32_t> tables;
  int row_count = 0;
  int table_stride = 0;
  std::vector<std::int32_t> emit;  ///< indices into `tokens` of those whose logits are wanted, ascending
  bool want_logits = false;        ///< true: every emitting token's logits are stored; false: only its arg-max

  [[nodiscard]] int size() const { return static_cast<int>(tokens.size()); }
};

}  // namespace galley::ops
