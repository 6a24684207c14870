#include "kv/block_pool.h"

#include <stdexcept>

namespace galley::kv {

BlockPool::BlockPool(int blocks, int block_tokens)
    : total_(blocks), block_tokens_(block_tokens), cache_limit_(blocks), blocks_(static_cast<std::size_t>(blocks)) {
  free_.reserve(static_cast<std::size_t>(blocks));
  for (int b = blocks - 1; b >= 0; --b) free_.push_back(b);  // low ids first: the pool's pages are touched in order
}

bool BlockPool::reserve(int n) {
  if (n > unreserved()) return false;
  promised_ += n;
  return true;
}

std::int32_t BlockPool::take() {
  if (promised_ == 0) throw std::logic_error("KV block taken without a reservation");
  if (free_.empty()) evict_oldest();
  --promised_;
  const std::int32_t block = free_.back();
  free_.pop_back();
  at(block).references = 1;
  return block;
}

void BlockPool::unreserve(int n) {
  if (n > promised_) throw std::logic_error("more KV blocks unreserved than were promised");
  promised_ -= n;
}

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
  if (--b.references > 0) return;
  if (b.remembered) {
    link_newest(block);
    if (cached_ > cache_limit_) evict_oldest();
  } else {
    free_.push_back(block);
  }
}

void BlockPool::limit_cache(int blocks) {
  cache_limit_ = blocks;
  while (cached_ > cache_limit_) evict_oldest();
}

void BlockPool::link_newest(std::int32_t block) {
  Block& b = at(block);
  b.older = newest_;
  b.newer = kNone;
  (newest_ == kNone ? oldest_ : at(newest_).newer) = block;
  newest_ = block;
  ++cached_;
}

void BlockPool::unlink(std::int32_t block) {
  Block& b = at(block);
  (b.older == kNone ? oldest_ : at(b.older).newer) = b.newer;
  (b.newer == kNone ? newest_ : at(b.newer).older) = b.older;
  b.older = b.newer = kNone;
  --cached_;
}

void BlockPool::evict_oldest() {
  const std::int32_t block = oldest_;
  if (block == kNone) throw std::logic_error("no KV block is left to evict");
  if (evicted_) evicted_(block);
  unlink(block);
  at(block).remembered = false;
  free_.push_back(block);
}

}  // namespace galley::kv
