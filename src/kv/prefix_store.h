// KV blocks on disk, so that prompts that begin alike are not computed again after a restart.
//
// One SQLite file for each identity (model, KV type, instruction set: whatever decides a block's bits) in a folder of
// the user's. A row of its table is one block: the block it continues, its tokens, its bytes. So the file is the same
// radix tree as PrefixIndex, and a stored block is found by walking down from the root.
//
// It is a cache, and treated as one: what is damaged or of another kind is not used, with a warning, and no error of
// the disk reaches a request. Engine thread only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace galley::kv {

class PrefixStore {
 public:
  using Id = std::int64_t;
  static constexpr Id kRoot = 0;

  struct Options {
    std::filesystem::path folder;  ///< made if it isn't there
    std::string identity;          ///< blocks of another identity are never read
    std::size_t block_bytes = 0;   ///< of a block
    std::size_t least_bytes = 0;   ///< of a block that lacks its last part; 0: no block may
    std::size_t max_bytes =
        0;  ///< of blocks, each counted whole; beyond it those used longest ago go, ends of texts first
    std::function<void(const std::string&)> warn = {};
  };

  /// Throws galley::Error (400) when the folder can't be made or written to. A file in it that can't be used is left as
  /// it is: a warning, and nothing is loaded or saved.
  explicit PrefixStore(Options options);
  ~PrefixStore();
  PrefixStore(PrefixStore&&) noexcept;
  PrefixStore& operator=(PrefixStore&&) noexcept;

  /// A block that was found: block_bytes or least_bytes.
  struct Stored {
    Id id;
    std::size_t bytes;
  };
  /// Copies the block that continues the text ending in `parent` with `tokens` to `bytes` [block_bytes]. Nothing when
  /// there is none, or it is damaged (it is removed then).
  [[nodiscard]] std::optional<Stored> load(Id parent, std::span<const std::int32_t> tokens, std::span<std::byte> bytes);

  /// Keeps a block; one with its last part replaces one without, but not the other way round. Nothing when it could not
  /// be kept, for one because `parent` is not there any more.
  std::optional<Id> save(Id parent, std::span<const std::int32_t> tokens, std::span<const std::byte> bytes);

  /// Blocks stored, and whether the file is in use at all.
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool usable() const { return database_ != nullptr; }
  [[nodiscard]] const std::filesystem::path& file() const { return file_; }

 private:
  struct Close;
  struct Database;
  class Statement;

  [[nodiscard]] bool fits(std::size_t bytes) const {
    return bytes == options_.block_bytes || (bytes > 0 && bytes == options_.least_bytes);
  }
  void open();
  void shrink();
  void fail(const std::string& why);
  void give_up(const std::string& why);

  Options options_;
  std::filesystem::path file_;
  std::size_t size_ = 0;
  std::int64_t clock_ = 0;              ///< order of use, going on from what the file holds
  Id newest_ = kRoot;                   ///< largest id seen
  std::unique_ptr<Database> database_;  ///< null: not in use
};

}  // namespace galley::kv
