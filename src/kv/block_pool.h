// Which KV blocks are free, cached, promised and held. Blocks are the unit of every decision about KV memory:
// fixed-size runs of tokens that all layers of one kind share under one id, as in PagedAttention (Kwon et al. 2023).
//
// Blocks come in two kinds. A text block holds a run of tokens for the layers that see the whole text; it is what rows
// hold, share and are known by. Where a model has sliding layers too, a text block may have a window block, which holds
// the same tokens for those. It can go before its text block goes, and goes with it at the latest.
//
// All memory is cut into units of one size, of which a block of either kind takes a fixed number. So any block can be
// had in the place of any others, and one count of units is the whole budget.
//
// Engine thread only. Knows nothing of what a block holds.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace galley::kv {

/// A block is held (by one or more rows), or cached (by none, but its content is remembered), or free. Rows reserve
/// before they take. Cached blocks can be had like free ones: the one released longest ago is evicted first, of
/// whichever kind it is. A block's id is that of its first unit.
class BlockPool {
 public:
  static constexpr std::int32_t kNone = -1;

  /// `text_units`, `window_units`: of a block of each kind; no window units: there are no window blocks.
  BlockPool(int units, int block_tokens, int text_units = 1, int window_units = 0);

  // All these count units.
  [[nodiscard]] int total() const { return total_; }
  [[nodiscard]] int free() const { return static_cast<int>(free_.size()); }
  [[nodiscard]] int cached() const { return cached_; }
  [[nodiscard]] int held() const { return total_ - free() - cached_; }
  /// Units that no row holds or was promised.
  [[nodiscard]] int unreserved() const { return free() + cached_ - promised_; }
  /// Those of window blocks.
  [[nodiscard]] int windows_cached() const { return windows_cached_; }
  [[nodiscard]] int windows_held() const { return windows_ - windows_cached_; }

  [[nodiscard]] int text_units() const { return text_units_; }
  [[nodiscard]] int window_units() const { return window_units_; }
  /// Of a text block with its window block.
  [[nodiscard]] int block_units() const { return text_units_ + window_units_; }
  [[nodiscard]] int block_tokens() const { return block_tokens_; }
  [[nodiscard]] int blocks_for(int tokens) const { return (tokens + block_tokens_ - 1) / block_tokens_; }
  /// The unit after this one in its block; kNone: it is the last.
  [[nodiscard]] std::int32_t next_unit(std::int32_t unit) const { return at(unit).next_unit; }

  /// Promises `n` units to a row; false (and nothing changed) when fewer are unreserved.
  [[nodiscard]] bool reserve(int n);
  /// Takes a text block out of what was promised; its reference count becomes 1. Free units are handed out last-freed
  /// first; when they don't suffice, cached blocks are evicted.
  [[nodiscard]] std::int32_t take();
  /// Gives promised units back untaken.
  void unreserve(int n);
  /// One more holder of a held or cached block. A cached one counts among the unreserved until then.
  void retain(std::int32_t block);
  /// One holder less; when none is left the block is cached if it is remembered, else free. Who holds several blocks
  /// of one text releases the last first: then what is evicted first is always a text's end.
  void release(std::int32_t block);
  [[nodiscard]] int references(std::int32_t block) const { return at(block).references; }

  // Window blocks, named by the text block they belong to. Only who holds a text block may hold its window block, and
  // releases that first.

  [[nodiscard]] bool has_window(std::int32_t text) const { return at(text).partner != kNone; }
  /// kNone: it has none, or lost it.
  [[nodiscard]] std::int32_t window(std::int32_t text) const { return at(text).partner; }
  [[nodiscard]] int window_references(std::int32_t text) const { return at(at(text).partner).references; }
  /// Takes a window block for a text block without one; its reference count becomes 1.
  void take_window(std::int32_t text);
  void retain_window(std::int32_t text);
  /// When no holder is left it is cached if the text block is remembered, else free.
  void release_window(std::int32_t text);
  /// Gives the window block of one text block, with whoever holds it, to another that has none.
  void move_window(std::int32_t from, std::int32_t to);

  /// A held block's content is worth keeping after its last holder is gone.
  void remember(std::int32_t block) { at(block).remembered = true; }
  /// Called with every text block that is evicted: what it holds is about to be lost.
  void on_evict(std::function<void(std::int32_t block)> callback) { evicted_ = std::move(callback); }
  /// Most units that are kept cached; the oldest blocks beyond are evicted. 0: none.
  void limit_cache(int units);

 private:
  struct Block {  // by unit; but for `next_unit` only a block's first one counts
    int references = 0;
    bool remembered = false;
    bool is_window = false;
    std::int32_t partner = kNone;               ///< of a text block its window block, and the other way round
    std::int32_t next_unit = kNone;             ///< of the same block
    std::int32_t older = kNone, newer = kNone;  ///< neighbours in the list of cached blocks
  };
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  [[nodiscard]] const Block& at(std::int32_t block) const { return blocks_[static_cast<std::size_t>(block)]; }
  [[nodiscard]] int units_of(const Block& b) const { return b.is_window ? window_units_ : text_units_; }
  std::int32_t allocate(int units);
  void give_back(std::int32_t block);
  void cache(std::int32_t block);
  void unlink(std::int32_t block);
  void free_window(std::int32_t text);
  void evict_oldest();
  void shrink_cache();

  int total_;
  int block_tokens_;
  int text_units_, window_units_;
  int promised_ = 0;
  int cached_ = 0;
  int windows_ = 0, windows_cached_ = 0;
  int cache_limit_;
  std::int32_t oldest_ = kNone, newest_ = kNone;
  std::vector<std::int32_t> free_;  // a stack
  std::vector<Block> blocks_;
  std::function<void(std::int32_t)> evicted_;
};

}  // namespace galley::kv
