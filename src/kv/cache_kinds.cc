#include "kv/cache_kinds.h"

#include <algorithm>

#include "kv/batch_cache.h"
#include "kv/batch_rotating.h"
#include "kv/contiguous.h"
#include "kv/rotating.h"

namespace galley::kv {

std::unique_ptr<RowCache> make_row_cache(const ops::AttentionSpec& layer, ops::KvFormat format) {
  if (layer.window > 0) return std::make_unique<RotatingKvCache>(layer.window, 0, format);
  return std::make_unique<KvCache>(format);
}

std::unique_ptr<BatchCache> make_batch_cache(const ops::AttentionSpec& layer, int rows, ops::KvFormat format) {
  std::vector<int> no_padding(static_cast<std::size_t>(rows), 0);
  if (layer.window > 0) return std::make_unique<BatchRotatingKvCache>(layer.window, std::move(no_padding));
  return std::make_unique<BatchKvCache>(std::move(no_padding), format);
}

std::size_t most_columns(const ops::AttentionSpec& layer, std::size_t tokens, std::size_t piece) {
  if (layer.window == 0) return tokens + growth_tokens;
  // The first piece is kept whole, later ones are added to the window less one; a single token never grows a ring
  // beyond the window.
  const auto window = static_cast<std::size_t>(layer.window);
  return std::min(tokens + growth_tokens, window + std::min(piece, tokens));
}

}  // namespace galley::kv
