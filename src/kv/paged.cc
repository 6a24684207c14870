#include "kv/paged.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <stdexcept>

namespace galley::kv {

namespace {

kernels::PagedKv layer_view(const ops::AttentionSpec& layer, kernels::KvElement element, ops::KvFormat format,
                            int block_tokens) {
  kernels::PagedKv view;
  view.element = element;
  if (format.quantized()) {
    view.element = format.bits == 8 ? kernels::KvElement::code8 : kernels::KvElement::code4;
    view.group = format.group;
  }
  view.kv_heads = layer.kv_heads;
  view.head_dim = layer.head_dim;
  view.block_tokens = block_tokens;
  view.block_stride = (view.block_bytes() + 63) / 64 * 64;
  return view;
}

std::vector<kernels::PagedKv> views_of(std::span<const ops::AttentionSpec> layers, kernels::KvElement element,
                                       int block_tokens, std::span<const ops::KvFormat> formats) {
  std::vector<kernels::PagedKv> views;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    views.push_back(layer_view(layers[i], element, formats.empty() ? ops::KvFormat{} : formats[i], block_tokens));
  }
  return views;
}

}  // namespace

std::size_t PagedKv::block_bytes(std::span<const ops::AttentionSpec> layers, kernels::KvElement element,
                                 int block_tokens, std::span<const ops::KvFormat> formats) {
  std::size_t bytes = 0;
  for (const kernels::PagedKv& view : views_of(layers, element, block_tokens, formats)) bytes += view.block_stride;
  return bytes;
}

PagedKv::PagedKv(std::span<const ops::AttentionSpec> layers, kernels::KvElement element, std::size_t budget_bytes,
                 int block_tokens, std::span<const ops::KvFormat> formats)
    : block_bytes_(block_bytes(layers, element, block_tokens, formats)),
      pool_(static_cast<int>(std::min<std::size_t>(budget_bytes / block_bytes_, 1U << 26U)), block_tokens) {
  regions_.reserve(layers.size());
  layers_.resize(layers.size());
  const std::vector<kernels::PagedKv> views = views_of(layers, element, block_tokens, formats);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    kernels::PagedKv& view = layers_[i].view;
    view = views[i];
    regions_.emplace_back(view.block_stride * static_cast<std::size_t>(pool_.total()));
    view.data = regions_.back().data();
    pointers_.push_back(&layers_[i]);
  }
}

void PagedKv::copy(std::int32_t from, std::int32_t to) {
  for (const ops::PagedLayerKv& layer : layers_) {
    const std::size_t n = layer.view.block_stride;
    std::memcpy(layer.view.data + static_cast<std::size_t>(to) * n,
                layer.view.data + static_cast<std::size_t>(from) * n, n);
  }
}

void PagedKv::copy_out(std::int32_t block, std::span<std::byte> bytes) const {
  for (const ops::PagedLayerKv& layer : layers_) {
    const std::size_t n = layer.view.block_stride;
    std::memcpy(bytes.data(), layer.view.data + static_cast<std::size_t>(block) * n, n);
    bytes = bytes.subspan(n);
  }
}

void PagedKv::copy_in(std::int32_t block, std::span<const std::byte> bytes) {
  for (const ops::PagedLayerKv& layer : layers_) {
    const std::size_t n = layer.view.block_stride;
    std::memcpy(layer.view.data + static_cast<std::size_t>(block) * n, bytes.data(), n);
    bytes = bytes.subspan(n);
  }
}

PagedRow::PagedRow(BlockPool& pool, int tokens, std::span<const std::int32_t> shared)
    : table_(shared.begin(), shared.end()),
      length_(static_cast<int>(shared.size()) * pool.block_tokens()),
      reserved_(pool.blocks_for(tokens) - static_cast<int>(shared.size())) {
  for (const std::int32_t block : shared) pool.retain(block);
  if (!pool.reserve(reserved_)) throw std::logic_error("KV row admitted without free blocks");
}

void PagedRow::adopt(BlockPool& pool, std::span<const std::int32_t> shared) {
  // First the promise back, then the blocks: what was cached among them counts as unreserved until it is retained.
  const auto n = static_cast<int>(shared.size());
  pool.unreserve(n);
  reserved_ -= n;
  for (const std::int32_t block : shared) {
    pool.retain(block);
    table_.push_back(block);
  }
  length_ += n * pool.block_tokens();
}

void PagedRow::exchange(BlockPool& pool, std::size_t at, std::int32_t block) {
  pool.retain(block);
  pool.release(table_[at]);
  table_[at] = block;
}

int PagedRow::growth(const BlockPool& pool, int n) const {
  return std::max(0, pool.blocks_for(length_ + n) - static_cast<int>(table_.size()) - reserved_);
}

void PagedRow::grow(BlockPool& pool, int n) {
  length_ += n;
  while (static_cast<int>(table_.size()) * pool.block_tokens() < length_) {
    if (reserved_ == 0) {
      if (!pool.reserve(1)) throw std::logic_error("KV row grown without free blocks");
      ++reserved_;
    }
    table_.push_back(pool.take());
    --reserved_;
  }
}

void PagedRow::release(BlockPool& pool) {
  for (const std::int32_t block : std::views::reverse(table_)) pool.release(block);
  pool.unreserve(reserved_);
  table_.clear();
  reserved_ = 0;
}

}  // namespace galley::kv
