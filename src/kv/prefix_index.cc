#include "kv/prefix_index.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string_view>

namespace galley::kv {

std::size_t PrefixIndex::Hash::hash(const KeyView& key) {
  const std::string_view bytes(reinterpret_cast<const char*>(key.tokens.data()), key.tokens.size_bytes());
  const std::size_t tokens = std::hash<std::string_view>{}(bytes);
  return tokens ^ (static_cast<std::size_t>(static_cast<std::uint32_t>(key.parent)) * 0x9E3779B97F4A7C15ULL);
}

bool PrefixIndex::Equal::equal(const KeyView& a, const KeyView& b) {
  return a.parent == b.parent && std::ranges::equal(a.tokens, b.tokens);
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
