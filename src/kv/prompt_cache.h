// What finished rows leave behind for prompts that begin alike, on the stock rung: whole contiguous caches, found by
// their tokens. Puts and takes as mlx-lm's LRUPromptCache does (mlx_lm/models/cache.py, 0.32.2):
//
//   take   of the caches whose tokens have most in common with the prompt the shortest, cut back to what is common, if
//          its layers can be cut (rings that have wrapped can't); else the longest whose tokens the prompt begins with.
//          The cache itself stays for others: what is handed out is a copy, which shares its arrays until one is
//          written to. At least the prompt's last token is left to be computed.
//   put    replaces what was known for the same tokens and, where it can be cut, all that it continues
//
// One difference: what goes first to make room is what was used longest ago, taking included, and the bound is bytes.
// Engine thread only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv/cache_kinds.h"

namespace galley::kv {

class PromptCache {
 public:
  /// One row's caches, one a layer.
  using Layers = std::vector<std::unique_ptr<RowCache>>;

  explicit PromptCache(std::size_t max_bytes) : max_bytes_(max_bytes) {}

  struct Hit {
    Layers layers;
    std::size_t tokens = 0;  ///< first ones of the prompt that they hold; fewer than all
  };
  /// `kind` tells caches apart that can't stand in for each other.
  [[nodiscard]] std::optional<Hit> take(int kind, std::span<const std::int32_t> prompt);
  /// `layers` hold exactly `tokens`.
  void put(int kind, std::vector<std::int32_t> tokens, Layers layers);
  /// Forgets what was used longest ago until no more than `bytes` are left.
  void shrink_to(std::size_t bytes);
  void clear();

  [[nodiscard]] std::size_t nbytes() const { return bytes_; }
  /// Caches held.
  [[nodiscard]] std::size_t size() const { return entries_.size(); }

 private:
  struct Key {
    int kind;
    std::vector<std::int32_t> tokens;
  };
  struct KeyView {
    int kind;
    std::span<const std::int32_t> tokens;
  };
  static KeyView view(const Key& key) { return {key.kind, key.tokens}; }
  static KeyView view(const KeyView& key) { return key; }
  /// Those that begin alike stand side by side.
  struct Before {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const { return before(view(a), view(b)); }
    static bool before(const KeyView& a, const KeyView& b);
  };
  struct Entry {
    Layers layers;
    std::size_t bytes = 0;
    std::uint64_t used = 0;

    [[nodiscard]] bool trimmable() const;
  };
  using Entries = std::map<Key, Entry, Before>;

  /// The longest entry whose tokens are the first ones of `tokens`, not all of them. end(): there is none.
  Entries::iterator longest_beginning(int kind, std::span<const std::int32_t> tokens);
  /// How many of the first ones of `tokens` some entry has too.
  [[nodiscard]] std::size_t most_in_common(int kind, std::span<const std::int32_t> tokens) const;
  /// The shortest entry whose tokens begin with `tokens`, which some do.
  Entries::iterator shortest_continuing(int kind, std::span<const std::int32_t> tokens);
  Hit copy_of(Entries::iterator entry, std::size_t tokens);
  void erase(Entries::iterator entry);

  std::size_t max_bytes_;
  std::size_t bytes_ = 0;
  Entries entries_;
  std::map<std::uint64_t, Entries::iterator> by_use_;  ///< longest ago first
  std::uint64_t clock_ = 0;
};

}  // namespace galley::kv
