#include "kv/rotating.h"

#include <algorithm>
#include <utility>

namespace galley::kv {

namespace mx = mlx::core;

ops::AttentionMask RotatingKvCache::mask(int tokens, int window) const {
  if (tokens > 1) {
    const int reach = window > 0 ? window : max_size_;
    const int before = std::min(max_size_ - 1, offset_);
    if (before + tokens <= reach) return {"causal", std::nullopt};
    return {"array", causal_mask(tokens, before, reach, std::nullopt)};
  }
  // One token sees the whole ring, unless the window is narrower.
  if (window == 0 || offset_ < window || max_size_ <= window) return {"", std::nullopt};
  const int next = next_ >= max_size_ ? 0 : next_;
  const int columns = offset_ < max_size_ ? offset_ + 1 : max_size_;
  const mx::array newest = mx::greater_equal(mx::arange(columns), mx::array(columns - window));
  return {"array", mx::roll(newest, next + 1)};
}

// A write of several tokens leaves no room behind them; one of a single token may.
KeysValues RotatingKvCache::fetched() const {
  return offset_ < buffer_->capacity() ? buffer_->slice(0, offset_) : *buffer_;
}

KeysValues RotatingKvCache::update_and_fetch(const mx::array& k, const mx::array& v) {
  return k.shape(2) == 1 ? write_in_place(in_form(k, v)) : append_in_order(in_form(k, v));
}

KeysValues RotatingKvCache::in_order() const {
  if (next_ == buffer_->capacity()) return *buffer_;
  if (next_ >= offset_) return buffer_->slice(0, next_);
  return joined({buffer_->slice(0, keep_), buffer_->slice(next_, buffer_->capacity()), buffer_->slice(keep_, next_)});
}

KeysValues RotatingKvCache::without(const KeysValues& all, int count) const {
  return joined({all.slice(0, keep_), all.slice(count + keep_, all.capacity())});
}

KeysValues RotatingKvCache::append_in_order(const KeysValues& fresh) {
  if (!buffer_) {
    buffer_ = fresh;
  } else {
    const KeysValues ordered = in_order();
    const int surplus = ordered.capacity() - max_size_ + 1;
    buffer_ = joined({surplus > 0 ? without(ordered, surplus) : ordered, fresh});
  }
  offset_ += fresh.capacity();
  next_ = buffer_->capacity();
  return fetched();
}

KeysValues RotatingKvCache::write_in_place(const KeysValues& fresh) {
  if (!buffer_ || (offset_ >= buffer_->capacity() && buffer_->capacity() < max_size_)) {
    const KeysValues room = zeros_like(fresh, std::min(growth_tokens, max_size_ - offset_));
    buffer_ = buffer_ ? joined({*buffer_, room}) : room;
    next_ = offset_;
  }
  const int surplus = buffer_->capacity() - max_size_;
  if (surplus > 0) {
    buffer_ = without(*buffer_, surplus);
    next_ = max_size_;
  }
  if (next_ == max_size_) next_ = keep_;
  buffer_->write(fresh, next_);
  ++offset_;
  ++next_;
  return fetched();
}

std::unique_ptr<RowCache> RotatingKvCache::clone() const { return std::make_unique<RotatingKvCache>(*this); }

int RotatingKvCache::trim(int tokens) {
  const int trimmed = std::min(offset_, tokens);
  offset_ -= trimmed;
  next_ -= trimmed;
  return trimmed;
}

RotatingKvCache RotatingKvCache::holding(int max_size, KeysValues contents, int position) {
  RotatingKvCache cache(max_size, 0, contents.groups ? contents.groups->format : ops::KvFormat{});
  cache.offset_ = position;
  cache.next_ = contents.capacity();
  cache.buffer_ = std::move(contents);
  return cache;
}

}  // namespace galley::kv
