#include "kv/contiguous.h"

#include <algorithm>

namespace galley::kv {

namespace mx = mlx::core;

KeysValues KeysValues::slice(int begin, int end) const {
  const auto part = [&](const mx::array& a) {
    return mx::slice(a, {0, 0, begin, 0}, {a.shape(0), a.shape(1), end, a.shape(3)});
  };
  return {part(keys), part(values)};
}

void append(std::optional<KeysValues>& buffer, int used, const KeysValues& fresh) {
  const int added = fresh.keys.shape(2);
  if (!buffer || used + added > buffer->capacity()) {
    const int grown = (growth_tokens + added - 1) / growth_tokens * growth_tokens;
    const auto room = [&](const mx::array& like) {
      return mx::zeros({like.shape(0), like.shape(1), grown, like.shape(3)}, like.dtype());
    };
    KeysValues more{room(fresh.keys), room(fresh.values)};
    if (buffer) {
      if (used % growth_tokens != 0) buffer = buffer->slice(0, used);
      more.keys = mx::concatenate({buffer->keys, more.keys}, 2);
      more.values = mx::concatenate({buffer->values, more.values}, 2);
    }
    buffer = std::move(more);
  }
  const auto write = [&](mx::array& into, const mx::array& part) {
    mx::Shape start{0, 0, used, 0};
    mx::Shape stop{into.shape(0), into.shape(1), used + added, into.shape(3)};
    into = mx::slice_update(into, mx::astype(part, into.dtype()), std::move(start), std::move(stop));
  };
  write(buffer->keys, fresh.keys);
  write(buffer->values, fresh.values);
}

mx::array causal_mask(int tokens, int offset, int window, const std::optional<mx::array>& left_padding) {
  const mx::array all = mx::arange(offset + tokens);
  const mx::array fresh = offset != 0 ? mx::arange(offset, offset + tokens) : all;
  const mx::array rows = mx::expand_dims(fresh, 1);
  const mx::array columns = mx::expand_dims(all, 0);
  mx::array mask = mx::greater_equal(rows, columns);
  if (window > 0) mask = mx::logical_and(mask, mx::less(rows, mx::add(columns, mx::array(window))));
  if (left_padding) {
    const mx::array padding = mx::expand_dims(*left_padding, std::vector<int>{1, 2, 3});
    mask = mx::logical_and(mask, mx::less_equal(padding, columns));
  }
  return mask;
}

ops::AttentionMask KvCache::mask(int tokens, int window) const {
  if (window > 0) return {"array", causal_mask(tokens, size_, window, std::nullopt)};
  if (tokens == 1) return {"", std::nullopt};
  return {"causal", std::nullopt};
}

mx::array KvCache::write_and_attend(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
                                    const ops::AttentionMask& mask) {
  const KeysValues all = update_and_fetch(k, v);
  return mx::fast::scaled_dot_product_attention(q, all.keys, all.values, scale, mask.mode, mask.array);
}

KeysValues KvCache::update_and_fetch(const mx::array& k, const mx::array& v) {
  append(buffer_, size_, {k, v});
  size_ += k.shape(2);
  return size_ < buffer_->capacity() ? buffer_->slice(0, size_) : *buffer_;
}

int KvCache::trim(int tokens) {
  const int trimmed = std::min(size_, tokens);
  size_ -= trimmed;
  return trimmed;
}

KvCache KvCache::holding(KeysValues contents) {
  KvCache cache;
  cache.size_ = contents.capacity();
  cache.buffer_ = std::move(contents);
  return cache;
}

}  // namespace galley::kv
