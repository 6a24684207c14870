#include "kv/prefix_index.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace galley::kv {

bool PrefixIndex::Before::before(const KeyView& a, const KeyView& b) {
  if (a.parent != b.parent) return a.parent < b.parent;
  return std::ranges::lexicographical_compare(a.tokens, b.tokens);
}

PrefixIndex::PrefixIndex(BlockPool& pool) : pool_(&pool) {
  pool.on_evict([this](std::int32_t block) { forget(block); });
}

PrefixIndex::~PrefixIndex() { pool_->on_evict({}); }

std::vector<std::int32_t> PrefixIndex::find(std::int32_t parent, std::span<const std::int32_t> tokens) const {
  const auto block_tokens = static_cast<std::size_t>(pool_->block_tokens());
  std::vector<std::int32_t> found;
  for (std::size_t at = 0; at + block_tokens <= tokens.size(); at += block_tokens) {
    const auto child = children_.find(KeyView{parent, tokens.subspan(at, block_tokens)});
    if (child == children_.end()) break;
    found.push_back(parent = child->second);
  }
  return found;
}

std::optional<PrefixIndex::Part> PrefixIndex::find_part(std::int32_t parent,
                                                        std::span<const std::int32_t> tokens) const {
  std::optional<Part> best;
  const auto consider = [&](auto child) {
    if (child->first.parent != parent) return;
    const auto differs = std::ranges::mismatch(child->first.tokens, tokens).in2;
    const auto common = static_cast<std::size_t>(differs - tokens.begin());
    if (common > (best ? best->tokens : 0)) best = Part{child->second, common};
  };
  // In lexicographic order, what begins most like a text stands right before or after its place.
  const auto place = children_.lower_bound(KeyView{parent, tokens});
  if (place != children_.end()) consider(place);
  if (place != children_.begin()) consider(std::prev(place));
  return best;
}

std::int32_t PrefixIndex::insert(std::int32_t parent, std::span<const std::int32_t> tokens, std::int32_t block) {
  if (tokens.size() != static_cast<std::size_t>(pool_->block_tokens())) {
    throw std::logic_error("only whole KV blocks can be remembered");
  }
  if (const auto known = children_.find(KeyView{parent, tokens}); known != children_.end()) return known->second;
  if (parent != kRoot) ++blocks_.at(parent).children;
  const auto [entry, inserted] = children_.emplace(Key{parent, {tokens.begin(), tokens.end()}}, block);
  if (!blocks_.emplace(block, Known{&entry->first}).second) throw std::logic_error("a KV block can't hold two texts");
  pool_->remember(block);
  return block;
}

std::optional<PrefixIndex::Text> PrefixIndex::text(std::int32_t block) const {
  const auto known = blocks_.find(block);
  if (known == blocks_.end()) return {};
  return Text{known->second.key->parent, known->second.key->tokens};
}

void PrefixIndex::forget(std::int32_t block) {
  const auto known = blocks_.find(block);
  if (known == blocks_.end()) return;
  if (known->second.children > 0) throw std::logic_error("a KV block was evicted before those that continue it");
  const std::int32_t parent = known->second.key->parent;
  if (parent != kRoot) --blocks_.at(parent).children;
  children_.erase(children_.find(view(*known->second.key)));
  blocks_.erase(known);
  if (forgotten_) forgotten_(block);
}

}  // namespace galley::kv
