#include "kv/prefix_archive.h"

#include <stdexcept>
#include <utility>

namespace galley::kv {

PrefixArchive::PrefixArchive(PagedKv& kv, PrefixIndex& index, PrefixStore store)
    : kv_(&kv), index_(&index), store_(std::move(store)), bytes_(kv.all_bytes()) {
  index_->on_forget([this](std::int32_t block) { ids_.erase(block); });
}

PrefixArchive::~PrefixArchive() { index_->on_forget({}); }

PrefixStore::Id PrefixArchive::id(std::int32_t block) const {
  if (block == PrefixIndex::kRoot) return PrefixStore::kRoot;
  const auto known = ids_.find(block);
  return known == ids_.end() ? -1 : known->second;
}

bool PrefixArchive::save_next() {
  while (!unsaved_.empty()) {
    const std::int32_t block = unsaved_.front();
    unsaved_.pop_front();
    const auto text = index_->text(block);
    if (!text || ids_.contains(block)) continue;  // evicted meanwhile, or noted twice
    const PrefixStore::Id parent = id(text->parent);
    if (parent < 0) continue;  // its beginning could not be kept, so it can't be found either
    const auto bytes = kv_->copy_out(block, bytes_);
    if (const auto stored = store_.save(parent, text->tokens, bytes)) ids_[block] = *stored;
    return true;
  }
  return false;
}

/// Puts what was read to bytes_ into a block of the pool and holds it, and its window block if it has one. False: there
/// is no room.
bool PrefixArchive::settle(std::int32_t parent, std::span<const std::int32_t> text, PrefixStore::Stored stored) {
  BlockPool& pool = kv_->pool();
  const std::span<const std::byte> bytes = std::span(bytes_).first(stored.bytes);
  const bool windowed = bytes.size() > kv_->layout().text_bytes;
  // The text may be known, but what is seen through its windows not be there any more.
  const std::vector<std::int32_t> known = index_->find(parent, text);
  if (known.empty()) {
    if (!pool.reserve(windowed ? pool.block_units() : pool.text_units())) return false;
    const std::int32_t block = pool.take();
    if (windowed) pool.take_window(block);
    kv_->copy_in(block, bytes);
    index_->insert(parent, text, block);
    loaded_.push_back(block);
  } else {
    const std::int32_t block = known.front();
    const bool missing = windowed && !pool.has_window(block);
    const bool cached_window = pool.has_window(block) && pool.window_references(block) == 0;
    const int needed =
        (pool.references(block) == 0 ? pool.text_units() : 0) + (missing || cached_window ? pool.window_units() : 0);
    if (pool.unreserved() < needed) return false;
    pool.retain(block);
    if (missing) {
      if (!pool.reserve(pool.window_units())) throw std::logic_error("KV units were there and are not");
      pool.take_window(block);
      kv_->copy_in_window(block, bytes);
    } else if (pool.has_window(block)) {
      pool.retain_window(block);
    }
    loaded_.push_back(block);
  }
  ids_[loaded_.back()] = stored.id;
  return true;
}

std::size_t PrefixArchive::load(PagedRow& row, std::int32_t parent, std::span<const std::int32_t> tokens) {
  BlockPool& pool = kv_->pool();
  const auto block_tokens = static_cast<std::size_t>(pool.block_tokens());
  // Window blocks that lie before what is seen from behind the last block read are only kept if there is room.
  const auto held_windows = static_cast<std::size_t>(pool.blocks_for(kv_->layout().window) + 1);
  row.lend(pool);
  first_window_ = 0;
  const auto let_window_go = [&](std::size_t i) {
    if (pool.has_window(loaded_[i])) pool.release_window(loaded_[i]);
  };
  std::int32_t at = parent;
  for (; tokens.size() >= block_tokens; tokens = tokens.subspan(block_tokens)) {
    const auto text = tokens.first(block_tokens);
    const PrefixStore::Id before = id(at);
    if (before < 0) break;
    const auto stored = store_.load(before, text, bytes_);
    if (!stored || !settle(at, text, *stored)) break;
    at = loaded_.back();
    for (; loaded_.size() - first_window_ > held_windows; ++first_window_) let_window_go(first_window_);
  }
  std::size_t usable = row.usable(pool, loaded_);
  if (!row.adopt(pool, std::span(loaded_).first(usable))) usable = 0;
  for (std::size_t i = loaded_.size(); i-- > 0;) {
    if (i >= first_window_) let_window_go(i);
    pool.release(loaded_[i]);
  }
  loaded_.clear();
  row.slide(pool);
  return usable;
}

}  // namespace galley::kv
