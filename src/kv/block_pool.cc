#include "kv/block_pool.h"

#include <stdexcept>

namespace galley::kv {

BlockPool::BlockPool(int blocks, int block_tokens)
    : total_(blocks), block_tokens_(block_tokens), references_(static_cast<std::size_t>(blocks), 0) {
  free_.reserve(static_cast<std::size_t>(blocks));
  for (int b = blocks - 1; b >= 0; --b) free_.push_back(b);  // low ids first: the pool's pages are touched in order
}

bool BlockPool::reserve(int n) {
  if (n > unreserved()) return false;
  promised_ += n;
  return true;
}

std::int32_t BlockPool::take() {
  if (promised_ == 0 || free_.empty()) throw std::logic_error("KV block taken without a reservation");
  --promised_;
  const std::int32_t block = free_.back();
  free_.pop_back();
  references_[static_cast<std::size_t>(block)] = 1;
  return block;
}

void BlockPool::unreserve(int n) {
  if (n > promised_) throw std::logic_error("more KV blocks unreserved than were promised");
  promised_ -= n;
}

void BlockPool::retain(std::int32_t block) {
  int& count = references_[static_cast<std::size_t>(block)];
  if (count == 0) throw std::logic_error("a free KV block can't be shared");
  ++count;
}

void BlockPool::release(std::int32_t block) {
  int& count = references_[static_cast<std::size_t>(block)];
  if (count == 0) throw std::logic_error("KV block released twice");
  if (--count == 0) free_.push_back(block);
}

}  // namespace galley::kv
