// Which blocks hold the KV of which beginnings of text: a radix tree whose edges are whole blocks of tokens.
//
// Live rows, finished rows and the prompt cache share what they have in common through it (RadixAttention, Zheng et al.
// 2023; with blocks as edges, as in vLLM's prefix caching). A row's KV depends on its own tokens alone, down to the
// bits, so it does not matter who computed a block. A step down is one search in an ordered map, which also finds the
// block that has most in common with a text that ends, or goes another way, within it. Engine thread only, free of MLX.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv/block_pool.h"

namespace galley::kv {

class PrefixIndex {
 public:
  static constexpr std::int32_t kRoot = -1;

  /// Listens to the pool's evictions; the pool outlives the index. Blocks of one text must be released last first (see
  /// BlockPool::release), so that no block is evicted before those that continue it.
  explicit PrefixIndex(BlockPool& pool);
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  /// The known blocks that continue the text ending in block `parent` with `tokens`, in order, whole blocks only.
  /// They are not retained: before anything else is taken from the pool the caller retains those it wants.
  [[nodiscard]] std::vector<std::int32_t> find(std::int32_t parent, std::span<const std::int32_t> tokens) const;

  /// The known block that continues the text ending in block `parent` with more of the first of `tokens` than any
  /// other, and how many these are: fewer than a block's worth if find() was asked before. Nothing: none begins alike.
  /// Not retained either; whoever wants the part makes a copy.
  struct Part {
    std::int32_t block;
    std::size_t tokens;
  };
  [[nodiscard]] std::optional<Part> find_part(std::int32_t parent, std::span<const std::int32_t> tokens) const;

  /// Block `block` (held) has the KV of `tokens` (one block's worth) after the text that ends in `parent` (held and
  /// known, or kRoot). Returns the block known for this text from now on: `block`, or one that was known before and
  /// holds the same bits; the caller may exchange its own for that.
  std::int32_t insert(std::int32_t parent, std::span<const std::int32_t> tokens, std::int32_t block);

  /// A known block's text: the block it continues (or kRoot) and its tokens, valid until the index changes. Nothing for
  /// one that is not known.
  struct Text {
    std::int32_t parent;
    std::span<const std::int32_t> tokens;
  };
  [[nodiscard]] std::optional<Text> text(std::int32_t block) const;
  /// Called with every block that is forgotten.
  void on_forget(std::function<void(std::int32_t block)> callback) { forgotten_ = std::move(callback); }

  /// Number of blocks known.
  [[nodiscard]] std::size_t size() const { return blocks_.size(); }

 private:
  struct Key {
    std::int32_t parent;
    std::vector<std::int32_t> tokens;
  };
  struct KeyView {
    std::int32_t parent;
    std::span<const std::int32_t> tokens;
  };
  static KeyView view(const Key& key) { return {key.parent, key.tokens}; }
  static KeyView view(const KeyView& key) { return key; }
  /// Blocks of one parent stand side by side, in the order of their tokens.
  struct Before {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const { return before(view(a), view(b)); }
    static bool before(const KeyView& a, const KeyView& b);
  };
  struct Known {
    const Key* key = nullptr;  ///< in `children_`
    int children = 0;
  };

  void forget(std::int32_t block);

  BlockPool* pool_;
  std::map<Key, std::int32_t, Before> children_;    ///< (parent, tokens) to block
  std::unordered_map<std::int32_t, Known> blocks_;  ///< by block id
  std::function<void(std::int32_t)> forgotten_;
};

}  // namespace galley::kv
