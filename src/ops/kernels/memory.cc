#include "ops/kernels/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace galley::kernels {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
}

AlignedMemory::AlignedMemory(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes < kHugePage) {
    mapping_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (mapping_ == nullptr) throw std::bad_alloc();
    std::memset(mapping_, 0, bytes);
    data_ = static_cast<std::byte*>(mapping_);
    return;
  }
  // One huge page more than needed, so that the data can start on a huge page's border.
  const std::size_t length = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* map = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  mapping_ = map;
  mapped_ = length;
  const auto begin = reinterpret_cast<std::uintptr_t>(map);
  const std::uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  data_ = static_cast<std::byte*>(map) + (aligned - begin);
#ifdef MADV_HUGEPAGE
  madvise(data_, length - (aligned - begin), MADV_HUGEPAGE);  // advice only: failing changes nothing but speed
#endif
}

void AlignedMemory::release() noexcept {
  if (mapped_ != 0) {
    munmap(mapping_, mapped_);
  } else {
    std::free(mapping_);
  }
}

}  // namespace galley::kernels
