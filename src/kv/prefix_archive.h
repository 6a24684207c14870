// Carries blocks between the pool and a PrefixStore: what rows have computed is saved when there is nothing else to do,
// what a prompt needs is loaded when the index does not know it.
//
// Engine thread only; never while a step is in flight, as only steps and this touch the pool's memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv/paged.h"
#include "kv/prefix_index.h"
#include "kv/prefix_store.h"

namespace galley::kv {

class PrefixArchive {
 public:
  /// Pool and index outlive the archive.
  PrefixArchive(PagedKv& kv, PrefixIndex& index, PrefixStore store);
  ~PrefixArchive();
  PrefixArchive(const PrefixArchive&) = delete;
  PrefixArchive& operator=(const PrefixArchive&) = delete;

  /// A block that the index has just come to know, to be saved when there is time.
  void note(std::int32_t block) { unsaved_.push_back(block); }
  /// Saves one block; false: nothing is left to save.
  bool save_next();

  /// Loads the stored blocks that continue the text of `row`, which ends in block `parent`, with `tokens`, whole blocks
  /// only, and makes them known. The row goes on with those that are usable; returns how many.
  std::size_t load(PagedRow& row, std::int32_t parent, std::span<const std::int32_t> tokens);

 private:
  bool settle(std::int32_t parent, std::span<const std::int32_t> text, PrefixStore::Stored stored);
  /// The store's id of a known block, or kRoot; -1: it isn't stored.
  [[nodiscard]] PrefixStore::Id id(std::int32_t block) const;

  PagedKv* kv_;
  PrefixIndex* index_;
  PrefixStore store_;
  std::unordered_map<std::int32_t, PrefixStore::Id> ids_;  ///< of the known blocks that are stored
  std::deque<std::int32_t> unsaved_;                       ///< in the order they were noted: a text's beginning first
  std::vector<std::byte> bytes_;                           ///< of one block
  std::vector<std::int32_t> loaded_;                       ///< held while load() goes on
  std::size_t first_window_ = 0;                           ///< of these, the first whose window block is held
};

}  // namespace galley::kv
