#include "kv/paged.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace galley::kv {

PagedKv::PagedKv(Layout layout, std::size_t budget_bytes)
    : layout_(std::move(layout)),
      pool_(static_cast<int>(std::min<std::size_t>(budget_bytes / layout_.unit_bytes, 1U << 26U)), layout_.block_tokens,
            layout_.text_units, layout_.window_units),
      memory_(layout_.unit_bytes * static_cast<std::size_t>(pool_.total())),
      layers_(layout_.layers.size()) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layout::Layer& layer = layout_.layers[i];
    layers_[i].view = layer.view;
    layers_[i].view.data = memory_.data() + layer.offset;
    layers_[i].table = layer.unit;
    pointers_.push_back(&layers_[i]);
  }
}

/// Where the layer's part of a text block, or of its window block, begins.
std::byte* PagedKv::place(std::size_t layer, std::int32_t block) const {
  const Layout::Layer& where = layout_.layers[layer];
  std::int32_t unit = where.slides ? pool_.window(block) : block;
  for (int i = where.slides ? layout_.text_units : 0; i < where.unit; ++i) unit = pool_.next_unit(unit);
  const kernels::PagedKv& view = layers_[layer].view;
  return view.data + static_cast<std::size_t>(unit) * view.block_stride;
}

void PagedKv::copy(std::int32_t from, std::int32_t to) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    std::memcpy(place(i, to), place(i, from), layers_[i].view.block_bytes());
  }
}

std::span<const std::byte> PagedKv::copy_out(std::int32_t block, std::span<std::byte> bytes) const {
  std::size_t filled = 0;
  for (const bool window : {false, true}) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (layout_.layers[i].slides != window || (window && !pool_.has_window(block))) continue;
      const std::size_t n = layers_[i].view.block_bytes();
      std::memcpy(bytes.data() + filled, place(i, block), n);
      filled += n;
    }
  }
  return bytes.first(filled);
}

void PagedKv::fill(std::int32_t block, bool window, std::span<const std::byte> bytes) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (layout_.layers[i].slides != window) continue;
    const std::size_t n = layers_[i].view.block_bytes();
    std::memcpy(place(i, block), bytes.data(), n);
    bytes = bytes.subspan(n);
  }
}

void PagedKv::copy_in(std::int32_t block, std::span<const std::byte> bytes) {
  fill(block, false, bytes.first(layout_.text_bytes));
  if (bytes.size() > layout_.text_bytes) copy_in_window(block, bytes);
}

void PagedKv::copy_in_window(std::int32_t block, std::span<const std::byte> bytes) {
  fill(block, true, bytes.subspan(layout_.text_bytes));
}

}  // namespace galley::kv
