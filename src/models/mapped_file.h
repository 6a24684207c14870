// A file mapped read-only into memory.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>

namespace galley::models {

/// Owns the mapping. Opening an absent, empty or irregular file throws ModelError naming it.
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }

  /// Tells the system that no page is needed in memory any more. A later read fetches it from the file again.
  void release_pages() const noexcept;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The same for the pages that lie wholly within `bytes`, a piece of some mapping.
void release_pages(std::span<const std::byte> bytes) noexcept;

}  // namespace galley::models
