#include "ops/kernels/kv_ahead.h"

#include <algorithm>

namespace galley::kernels {
namespace {

constexpr std::size_t kMostBytes = std::size_t{8} << 20;  // of one layer: more would push itself out of the caches
constexpr std::size_t kLine = 64;

// Calls f(table, block index) for each block that a sequence of the step will read.
template <class F>
void each_block(const KvAhead& ahead, const F& f) {
  const RowPlaces& places = ahead.places;
  for (int r = 0; r < places.rows;) {
    int last = r;  // of the rows of this sequence
    while (last + 1 < places.rows && places.table[last + 1] == places.table[r]) ++last;
    const int first_key = ahead.window > 0 ? std::max(0, places.position[r] - ahead.window + 1) : 0;
    for (int b = first_key / ahead.kv.block_tokens; b <= places.position[last] / ahead.kv.block_tokens; ++b) {
      f(places.table[r][b]);
    }
    r = last + 1;
  }
}

}  // namespace

KvPieces::KvPieces(std::vector<const char*>& blocks, const KvAhead& ahead, int slots, std::size_t most) {
  std::size_t all = 0;
  each_block(ahead, [&](std::int32_t) { ++all; });
  const std::size_t block_bytes = ahead.kv.block_bytes();
  const std::size_t room = std::min(static_cast<std::size_t>(slots), kMostBytes / block_bytes);
  if (all == 0 || room == 0) return;
  const std::size_t every = (all + room - 1) / room;  // too many: a part of them, evenly, since all threads read some
  blocks.clear();
  std::size_t index = 0;
  each_block(ahead, [&](std::int32_t block) {
    if (index++ % every != 0) return;
    blocks.push_back(reinterpret_cast<const char*>(ahead.kv.data) +
                     static_cast<std::size_t>(block) * ahead.kv.block_stride);
  });
  blocks_ = blocks.data();
  count_ = blocks.size();
  block_bytes_ = block_bytes;
  per_block_ = static_cast<int>(std::min(static_cast<std::size_t>(slots) / count_, (block_bytes + kLine - 1) / kLine));
  const std::size_t even =
      (block_bytes + static_cast<std::size_t>(per_block_) - 1) / static_cast<std::size_t>(per_block_);
  bytes_ = std::min((even + kLine - 1) / kLine * kLine, most);
}

}  // namespace galley::kernels
