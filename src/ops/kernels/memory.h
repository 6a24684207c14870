// Memory of the kernels: 64-byte aligned (vector loads), on huge pages where the system has them.
#pragma once
#include <cstddef>
#include <span>
#include <utility>

namespace galley::kernels {

/// An owned, zeroed, 64-byte-aligned allocation. Large ones are mapped and advised to use transparent huge pages, which
/// is worth about 5 % of decode speed; pages are faulted in on first touch. Movable, not copyable.
class AlignedMemory {
 public:
  AlignedMemory() = default;
  /// Throws std::bad_alloc.
  explicit AlignedMemory(std::size_t bytes);
  ~AlignedMemory() { release(); }
  AlignedMemory(AlignedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        mapping_(std::exchange(other.mapping_, nullptr)),
        mapped_(std::exchange(other.mapped_, 0)) {}
  AlignedMemory& operator=(AlignedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;

  [[nodiscard]] std::byte* data() { return data_; }
  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  void release() noexcept;

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;  // what to unmap (mapped_ > 0) or free
  std::size_t mapped_ = 0;
};

}  // namespace galley::kernels
