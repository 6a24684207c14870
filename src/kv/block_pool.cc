#include "kv/block_pool.h"

#include <stdexcept>

namespace galley::kv {

BlockPool::BlockPool(int units, int block_tokens, int text_units, int window_units)
    : total_(units),
      block_tokens_(block_tokens),
      text_units_(text_units),
      window_units_(window_units),
      cache_limit_(units),
      blocks_(static_cast<std::size_t>(units)) {
  free_.reserve(static_cast<std::size_t>(units));
  for (int u = units - 1; u >= 0; --u) free_.push_back(u);  // low ids first: the pool's pages are touched in order
}

bool BlockPool::reserve(int n) {
  if (n > unreserved()) return false;
  promised_ += n;
  return true;
}

void BlockPool::unreserve(int n) {
  if (n > promised_) throw std::logic_error("more KV units unreserved than were promised");
  promised_ -= n;
}

std::int32_t BlockPool::allocate(int units) {
  if (promised_ < units) throw std::logic_error("KV block taken without a reservation");
  while (free() < units) evict_oldest();
  promised_ -= units;
  const std::int32_t first = free_.back();
  std::int32_t last = BlockPool::kNone;
  for (; units > 0; --units) {
    const std::int32_t unit = free_.back();
    free_.pop_back();
    if (last != kNone) at(last).next_unit = unit;
    at(last = unit).next_unit = kNone;
  }
  at(first).references = 1;
  return first;
}

void BlockPool::give_back(std::int32_t block) {
  at(block).remembered = at(block).is_window = false;
  for (std::int32_t unit = block; unit != kNone; unit = at(unit).next_unit) free_.push_back(unit);
}

std::int32_t BlockPool::take() { return allocate(text_units_); }

void BlockPool::retain(std::int32_t block) {
  Block& b = at(block);
  if (b.references == 0) {
    if (!b.remembered) throw std::logic_error("a free KV block can't be shared");
    unlink(block);
  }
  ++b.references;
}

void BlockPool::release(std::int32_t block) {
  Block& b = at(block);
  if (b.references == 0) throw std::logic_error("KV block released twice");
  if (b.references == 1 && b.partner != kNone && (at(b.partner).references > 0 || !b.remembered)) {
    throw std::logic_error("KV text block released before its window block");
  }
  if (--b.references > 0) return;
  if (b.remembered) {
    cache(block);
  } else {
    give_back(block);
  }
}

void BlockPool::take_window(std::int32_t text) {
  if (at(text).references == 0 || has_window(text)) throw std::logic_error("no place for a KV window block");
  const std::int32_t window = allocate(window_units_);
  at(window).is_window = true;
  at(window).partner = text;
  at(text).partner = window;
  windows_ += window_units_;
}

void BlockPool::retain_window(std::int32_t text) {
  const std::int32_t window = at(text).partner;
  if (at(text).references == 0 || window == kNone) throw std::logic_error("there is no KV window block to hold");
  if (at(window).references == 0) unlink(window);
  ++at(window).references;
}

void BlockPool::release_window(std::int32_t text) {
  const std::int32_t window = at(text).partner;
  if (window == kNone || at(window).references == 0) throw std::logic_error("KV window block released twice");
  if (--at(window).references > 0) return;
  if (at(text).remembered) {
    cache(window);
  } else {
    free_window(text);
  }
}

void BlockPool::move_window(std::int32_t from, std::int32_t to) {
  if (has_window(to)) throw std::logic_error("a KV block can't have two window blocks");
  const std::int32_t window = at(from).partner;
  at(from).partner = kNone;
  at(to).partner = window;
  at(window).partner = to;
}

void BlockPool::limit_cache(int units) {
  cache_limit_ = units;
  shrink_cache();
}

void BlockPool::shrink_cache() {
  while (cached_ > cache_limit_) evict_oldest();
}

void BlockPool::cache(std::int32_t block) {
  Block& b = at(block);
  b.older = newest_;
  b.newer = kNone;
  (newest_ == kNone ? oldest_ : at(newest_).newer) = block;
  newest_ = block;
  cached_ += units_of(b);
  if (b.is_window) windows_cached_ += window_units_;
  shrink_cache();
}

void BlockPool::unlink(std::int32_t block) {
  Block& b = at(block);
  (b.older == kNone ? oldest_ : at(b.older).newer) = b.newer;
  (b.newer == kNone ? newest_ : at(b.newer).older) = b.older;
  b.older = b.newer = kNone;
  cached_ -= units_of(b);
  if (b.is_window) windows_cached_ -= window_units_;
}

void BlockPool::free_window(std::int32_t text) {
  const std::int32_t window = at(text).partner;
  at(text).partner = at(window).partner = kNone;
  windows_ -= window_units_;
  give_back(window);
}

void BlockPool::evict_oldest() {
  const std::int32_t block = oldest_;
  if (block == kNone) throw std::logic_error("no KV block is left to evict");
  const bool is_text = !at(block).is_window;
  if (is_text && evicted_) evicted_(block);
  unlink(block);
  if (!is_text) {
    free_window(at(block).partner);
    return;
  }
  if (const std::int32_t window = at(block).partner; window != kNone) {
    unlink(window);
    free_window(block);
  }
  give_back(block);
}

}  // namespace galley::kv
