#include "kv/contiguous.h"

#include <algorithm>
#include <utility>

namespace galley::kv {

namespace mx = mlx::core;

void append(std::optional<KeysValues>& buffer, int used, const KeysValues& fresh) {
  const int added = fresh.capacity();
  if (!buffer || used + added > buffer->capacity()) {
    const KeysValues room = zeros_like(fresh, (growth_tokens + added - 1) / growth_tokens * growth_tokens);
    if (!buffer) {
      buffer = room;
    } else {
      buffer = joined({used % growth_tokens != 0 ? buffer->slice(0, used) : *buffer, room});
    }
  }
  buffer->write(fresh, used);
}

ops::AttentionMask KvCache::mask(int tokens, int window) const {
  if (window > 0) return {"array", causal_mask(tokens, size_, window, std::nullopt)};
  if (tokens == 1) return {"", std::nullopt};
  return {"causal", std::nullopt};
}

KeysValues KvCache::fetched() const { return size_ < buffer_->capacity() ? buffer_->slice(0, size_) : *buffer_; }

KeysValues KvCache::update_and_fetch(const mx::array& k, const mx::array& v) {
  append(buffer_, size_, in_form(k, v));
  size_ += k.shape(2);
  return fetched();
}

std::unique_ptr<RowCache> KvCache::clone() const { return std::make_unique<KvCache>(*this); }

int KvCache::trim(int tokens) {
  const int trimmed = std::min(size_, tokens);
  size_ -= trimmed;
  return trimmed;
}

KvCache KvCache::holding(KeysValues contents) {
  KvCache cache(contents.groups ? contents.groups->format : ops::KvFormat{});
  cache.size_ = contents.capacity();
  cache.buffer_ = std::move(contents);
  return cache;
}

}  // namespace galley::kv
