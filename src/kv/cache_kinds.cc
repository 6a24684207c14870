#include "kv/cache_kinds.h"

#include <algorithm>

#include "kv/batch_cache.h"
#include "kv/batch_rotating.h"
#include "kv/contiguous.h"
#include "kv/rotating.h"

namespace galley::kv {
namespace {

template <typename One, typename Batch>
std::unique_ptr<BatchCache> merged(std::span<const RowCache* const> rows) {
  std::vector<const One*> own;
  for (const RowCache* row : rows) own.push_back(&dynamic_cast<const One&>(*row));
  return std::make_unique<Batch>(Batch::merge(own));
}

}  // namespace

std::unique_ptr<RowCache> make_row_cache(const ops::AttentionSpec& layer, ops::KvFormat format) {
  if (layer.window > 0) return std::make_unique<RotatingKvCache>(layer.window, 0, format);
  return std::make_unique<KvCache>(format);
}

std::unique_ptr<BatchCache> make_batch_cache(const ops::AttentionSpec& layer, int rows, ops::KvFormat format) {
  std::vector<int> no_padding(static_cast<std::size_t>(rows), 0);
  if (layer.window > 0) return std::make_unique<BatchRotatingKvCache>(layer.window, std::move(no_padding));
  return std::make_unique<BatchKvCache>(std::move(no_padding), format);
}

std::unique_ptr<BatchCache> merge_row_caches(const ops::AttentionSpec& layer, std::span<const RowCache* const> rows,
                                             ops::KvFormat format) {
  if (std::ranges::all_of(rows, [](const RowCache* row) { return row->size() == 0; })) {
    return make_batch_cache(layer, static_cast<int>(rows.size()), format);
  }
  if (layer.window > 0) return merged<RotatingKvCache, BatchRotatingKvCache>(rows);
  return merged<KvCache, BatchKvCache>(rows);
}

std::size_t most_columns(const ops::AttentionSpec& layer, std::size_t tokens, std::size_t piece) {
  if (layer.window == 0) return tokens + growth_tokens;
  // The first piece is kept whole, later ones are added to the window less one; a single token never grows a ring
  // beyond the window.
  const auto window = static_cast<std::size_t>(layer.window);
  return std::min(tokens + growth_tokens, window + std::min(piece, tokens));
}

}  // namespace galley::kv
