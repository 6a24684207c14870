#include "kv/prefix_archive.h"

#include <utility>

namespace galley::kv {

PrefixArchive::PrefixArchive(PagedKv& kv, PrefixIndex& index, PrefixStore store)
    : kv_(&kv), index_(&index), store_(std::move(store)), bytes_(kv.block_bytes()) {
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
    kv_->copy_out(block, bytes_);
    if (const auto stored = store_.save(parent, text->tokens, bytes_)) ids_[block] = *stored;
    return true;
  }
  return false;
}

std::size_t PrefixArchive::load(PagedRow& row, std::int32_t parent, std::span<const std::int32_t> tokens) {
  const auto block_tokens = static_cast<std::size_t>(kv_->pool().block_tokens());
  std::size_t loaded = 0;
  for (PrefixStore::Id at = id(parent); at >= 0 && tokens.size() >= block_tokens; ++loaded) {
    const auto text = tokens.first(block_tokens);
    const auto found = store_.load(at, text, bytes_);
    if (!found) break;
    row.grow(kv_->pool(), static_cast<int>(block_tokens));
    const std::int32_t block = row.table().back();
    kv_->copy_in(block, bytes_);
    index_->insert(parent, text, block);
    ids_[block] = at = *found;
    parent = block;
    tokens = tokens.subspan(block_tokens);
  }
  return loaded;
}

}  // namespace galley::kv
