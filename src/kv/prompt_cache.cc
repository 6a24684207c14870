#include "kv/prompt_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace galley::kv {
namespace {

std::size_t common(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace

bool PromptCache::Before::before(const KeyView& a, const KeyView& b) {
  if (a.kind != b.kind) return a.kind < b.kind;
  return std::ranges::lexicographical_compare(a.tokens, b.tokens);
}

bool PromptCache::Entry::trimmable() const {
  return std::ranges::all_of(layers, [](const auto& layer) { return layer->trimmable(); });
}

PromptCache::Entries::iterator PromptCache::longest_beginning(int kind, std::span<const std::int32_t> tokens) {
  // Whatever stands between a beginning and the text itself has that beginning too, so what the entry right before the
  // text has in common with it bounds the length of any beginning.
  std::size_t length = tokens.empty() ? 0 : tokens.size() - 1;
  while (length > 0) {
    const auto after = entries_.upper_bound(KeyView{kind, tokens.first(length)});
    if (after == entries_.begin()) break;
    const auto before = std::prev(after);
    if (before->first.kind != kind) break;
    const std::size_t same = common(before->first.tokens, tokens.first(length));
    if (same == before->first.tokens.size()) return before;
    length = same;
  }
  return entries_.end();
}

std::size_t PromptCache::most_in_common(int kind, std::span<const std::int32_t> tokens) const {
  std::size_t most = 0;
  const auto place = entries_.lower_bound(KeyView{kind, tokens});
  if (place != entries_.end() && place->first.kind == kind) most = common(place->first.tokens, tokens);
  if (place == entries_.begin()) return most;
  const auto before = std::prev(place);
  return before->first.kind == kind ? std::max(most, common(before->first.tokens, tokens)) : most;
}

PromptCache::Entries::iterator PromptCache::shortest_continuing(int kind, std::span<const std::int32_t> tokens) {
  auto best = entries_.lower_bound(KeyView{kind, tokens});
  for (auto it = best; it != entries_.end() && it->first.kind == kind; ++it) {
    if (common(tokens, it->first.tokens) < tokens.size()) break;
    if (it->first.tokens.size() < best->first.tokens.size()) best = it;
  }
  return best;
}

std::optional<PromptCache::Hit> PromptCache::take(int kind, std::span<const std::int32_t> prompt) {
  if (prompt.size() < 2) return {};
  const auto shorter = longest_beginning(kind, prompt);
  const std::size_t whole = shorter == entries_.end() ? 0 : shorter->first.tokens.size();
  if (const std::size_t shared = most_in_common(kind, prompt); shared > whole) {
    const auto longer = shortest_continuing(kind, prompt.first(shared));
    if (longer->second.trimmable()) return copy_of(longer, std::min(prompt.size() - 1, shared));
  }
  if (whole == 0) return {};
  return copy_of(shorter, whole);
}

PromptCache::Hit PromptCache::copy_of(Entries::iterator entry, std::size_t tokens) {
  by_use_.erase(entry->second.used);
  entry->second.used = ++clock_;
  by_use_.emplace(clock_, entry);
  Hit hit{{}, tokens};
  const auto surplus = static_cast<int>(entry->first.tokens.size() - tokens);
  for (const auto& layer : entry->second.layers) {
    hit.layers.push_back(layer->clone());
    if (surplus > 0) hit.layers.back()->trim(surplus);
  }
  return hit;
}

void PromptCache::put(int kind, std::vector<std::int32_t> tokens, Layers layers) {
  Key key{kind, std::move(tokens)};
  Entry entry{std::move(layers), 0, ++clock_};
  for (const auto& layer : entry.layers) entry.bytes += layer->nbytes();
  if (const auto known = entries_.find(view(key)); known != entries_.end()) erase(known);
  if (entry.trimmable()) {
    for (auto part = longest_beginning(kind, key.tokens); part != entries_.end();
         part = longest_beginning(kind, key.tokens)) {
      erase(part);
    }
  }
  bytes_ += entry.bytes;
  const auto [place, inserted] = entries_.emplace(std::move(key), std::move(entry));
  by_use_.emplace(clock_, place);
  shrink_to(max_bytes_);
}

void PromptCache::shrink_to(std::size_t bytes) {
  while (bytes_ > bytes) erase(by_use_.begin()->second);
}

void PromptCache::clear() {
  entries_.clear();
  by_use_.clear();
  bytes_ = 0;
}

void PromptCache::erase(Entries::iterator entry) {
  bytes_ -= entry->second.bytes;
  by_use_.erase(entry->second.used);
  entries_.erase(entry);
}

}  // namespace galley::kv
