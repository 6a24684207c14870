#include "kv/paged_row.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace galley::kv {

PagedRow::PagedRow(BlockPool& pool, const Sliding& sliding, int tokens, std::span<const std::int32_t> shared)
    : sliding_(sliding), promised_blocks_(pool.blocks_for(tokens)) {
  append(pool, shared);
  reserved_ = reservation(pool);
  if (!pool.reserve(reserved_)) throw std::logic_error("KV row admitted without free blocks");
}

std::size_t PagedRow::usable(const BlockPool& pool, const Sliding& sliding, std::size_t blocks_before,
                             std::span<const std::int32_t> found) {
  if (pool.window_units() == 0) return found.size();
  std::size_t usable = 0;
  std::size_t whole = 0;  // from here on all of the blocks seen so far have their window blocks
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::size_t end = blocks_before + i + 1;
    if (!pool.has_window(found[i])) whole = end;
    const int position = static_cast<int>(end) * pool.block_tokens();
    if (whole <= static_cast<std::size_t>(sliding.first_seen(position, pool.block_tokens()))) usable = i + 1;
  }
  return usable;
}

int PagedRow::needs(const BlockPool& pool, const Sliding& sliding, int tokens, std::span<const std::int32_t> shared) {
  const auto begun = static_cast<int>(shared.size());
  const int first_seen = sliding.first_seen(begun * pool.block_tokens(), pool.block_tokens());
  const int left = pool.blocks_for(tokens) - begun;
  int units = left * pool.text_units();
  if (pool.window_units() > 0) {
    units += std::clamp(sliding.most_blocks - (begun - first_seen), 0, left) * pool.window_units();
  }
  for (int i = 0; i < begun; ++i) {  // what is cached is taken from the unreserved like any other
    const std::int32_t block = shared[static_cast<std::size_t>(i)];
    if (pool.references(block) == 0) units += pool.text_units();
    if (pool.window_units() > 0 && i >= first_seen && pool.window_references(block) == 0) units += pool.window_units();
  }
  return units;
}

/// Units for what is still to be taken of the blocks it was promised.
int PagedRow::reservation(const BlockPool& pool) const {
  const int left = std::max(0, promised_blocks_ - static_cast<int>(table_.size()));
  if (pool.window_units() == 0) return left * pool.text_units();
  const auto windows = static_cast<int>(table_.size() - first_window_);
  return left * pool.text_units() + std::clamp(sliding_.most_blocks - windows, 0, left) * pool.window_units();
}

void PagedRow::let_go(BlockPool& pool, std::size_t seen, std::size_t held) {
  if (pool.window_units() == 0) return;
  for (std::size_t i = first_window_; i < std::min(seen, held); ++i) pool.release_window(table_[i]);
  first_window_ = std::max(first_window_, seen);
}

/// Retains full blocks, and the window blocks that are seen from behind them.
void PagedRow::append(BlockPool& pool, std::span<const std::int32_t> shared) {
  const std::size_t held = table_.size();
  length_ += static_cast<int>(shared.size()) * pool.block_tokens();
  const auto seen = static_cast<std::size_t>(sliding_.first_seen(length_, pool.block_tokens()));
  for (const std::int32_t block : shared) {
    pool.retain(block);
    if (pool.window_units() > 0 && table_.size() >= seen) pool.retain_window(block);
    table_.push_back(block);
  }
  let_go(pool, seen, held);  // last, as what becomes cached may push out what was
}

bool PagedRow::adopt(BlockPool& pool, std::span<const std::int32_t> shared) {
  // What is not held by another row comes out of the row's own reservation: others may count on the rest.
  const int length = length_ + static_cast<int>(shared.size()) * pool.block_tokens();
  const auto seen = static_cast<std::size_t>(sliding_.first_seen(length, pool.block_tokens()));
  int needed = 0;
  for (std::size_t i = 0; i < shared.size(); ++i) {
    if (pool.references(shared[i]) == 0) needed += pool.text_units();
    if (pool.window_units() > 0 && table_.size() + i >= seen && pool.window_references(shared[i]) == 0) {
      needed += pool.window_units();
    }
  }
  for (std::size_t i = first_window_; pool.window_units() > 0 && i < std::min(seen, table_.size()); ++i) {
    if (pool.window_references(table_[i]) == 1) needed -= pool.window_units();
  }
  if (needed > reserved_) return false;
  const int unreserved = pool.unreserved();
  lend(pool);
  append(pool, shared);
  reserved_ = std::min(reservation(pool), pool.unreserved() - unreserved);
  if (!pool.reserve(reserved_)) throw std::logic_error("KV blocks adopted without free blocks");
  return true;
}

void PagedRow::exchange(BlockPool& pool, std::size_t at, std::int32_t block) {
  const std::int32_t own = table_[at];
  pool.retain(block);
  if (pool.window_units() > 0 && at >= first_window_) {
    if (pool.has_window(block)) {
      pool.retain_window(block);
      pool.release_window(own);
    } else {
      pool.move_window(own, block);
    }
  }
  pool.release(own);
  table_[at] = block;
}

int PagedRow::growth(const BlockPool& pool, int n) const {
  const int blocks = pool.blocks_for(length_ + n) - static_cast<int>(table_.size());
  return std::max({0, blocks * pool.block_units() - reserved_, reservation(pool) - reserved_});
}

void PagedRow::grow(BlockPool& pool, int n) {
  length_ += n;
  while (static_cast<int>(table_.size()) * pool.block_tokens() < length_) {
    if (const int lacking = pool.block_units() - reserved_; lacking > 0) {
      if (!pool.reserve(lacking)) throw std::logic_error("KV row grown without free blocks");
      reserved_ += lacking;
    }
    table_.push_back(pool.take());
    if (pool.window_units() > 0) pool.take_window(table_.back());
    reserved_ -= pool.block_units();
  }
}

void PagedRow::slide(BlockPool& pool) {
  let_go(pool, static_cast<std::size_t>(sliding_.first_seen(length_, pool.block_tokens())), table_.size());
  const int wanted = reservation(pool);
  if (wanted < reserved_) {
    pool.unreserve(reserved_ - wanted);
    reserved_ = wanted;
  } else {
    const int more = std::min(wanted - reserved_, std::max(0, pool.unreserved()));
    if (pool.reserve(more)) reserved_ += more;
  }
}

void PagedRow::lend(BlockPool& pool) { pool.unreserve(std::exchange(reserved_, 0)); }

void PagedRow::release(BlockPool& pool) {
  for (std::size_t i = table_.size(); i-- > 0;) {
    if (pool.window_units() > 0 && i >= first_window_) pool.release_window(table_[i]);
    pool.release(table_[i]);
  }
  lend(pool);
  table_.clear();
}

}  // namespace galley::kv
