#include "kv/layout.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace galley::kv {
namespace {

kernels::PagedKv view_of(const ops::AttentionSpec& spec, kernels::KvElement element, ops::KvFormat format,
                         int block_tokens) {
  kernels::PagedKv view;
  view.element = element;
  if (format.quantized()) {
    view.element = format.bits == 8 ? kernels::KvElement::code8 : kernels::KvElement::code4;
    view.group = format.group;
  }
  view.kv_heads = spec.kv_heads;
  view.head_dim = spec.head_dim;
  view.block_tokens = block_tokens;
  view.block_stride = (view.block_bytes() + 63) / 64 * 64;
  return view;
}

using Sizes = std::vector<std::size_t>;

std::vector<std::size_t> largest_first(const Sizes& sizes) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  return order;
}

/// Bytes in the fullest of `units`, which share the layers evenly.
std::size_t even_load(const Sizes& sizes, std::size_t units) {
  Sizes loads(units, 0);
  for (const std::size_t layer : largest_first(sizes)) *std::ranges::min_element(loads) += sizes[layer];
  return std::ranges::max(loads);
}

/// What unit each layer goes to, first fit; none is larger than `unit_bytes`.
std::vector<int> pack(const Sizes& sizes, std::size_t unit_bytes) {
  Sizes loads;
  std::vector<int> units(sizes.size());
  for (const std::size_t layer : largest_first(sizes)) {
    auto unit = std::ranges::find_if(loads, [&](std::size_t load) { return load + sizes[layer] <= unit_bytes; });
    if (unit == loads.end()) unit = loads.insert(unit, 0);
    *unit += sizes[layer];
    units[layer] = static_cast<int>(unit - loads.begin());
  }
  return units;
}

int count(const std::vector<int>& units) { return std::ranges::max(units) + 1; }

/// The size of unit that wastes least, weighing both kinds alike; of about equals a large one, as every unit of a block
/// needs a table.
std::size_t best_unit(const Sizes& text, const Sizes& window) {
  constexpr double kTable = 0.004;
  const std::size_t largest = std::max(std::ranges::max(text), std::ranges::max(window));
  std::size_t best = 0;
  double least = 0;
  for (const Sizes* kind : {&text, &window}) {
    for (std::size_t units = 1; units <= kind->size(); ++units) {
      const std::size_t bytes = std::max(even_load(*kind, units), largest);
      double cost = 0;
      for (const Sizes* sizes : {&text, &window}) {
        const int needed = count(pack(*sizes, bytes));
        const std::size_t filled = std::accumulate(sizes->begin(), sizes->end(), std::size_t{0});
        cost += needed * static_cast<double>(bytes) / static_cast<double>(filled) + needed * kTable;
      }
      if (best == 0 || cost < least) {
        best = bytes;
        least = cost;
      }
    }
  }
  return best;
}

}  // namespace

Layout::Layout(std::span<const ops::AttentionSpec> specs, kernels::KvElement element, int tokens,
               std::span<const ops::KvFormat> formats, bool kinds)
    : block_tokens(tokens), layers(specs.size()) {
  Sizes sizes[2];  // of layers that see everything, and of sliding ones
  for (std::size_t i = 0; i < specs.size(); ++i) {
    layers[i].view = view_of(specs[i], element, formats.empty() ? ops::KvFormat{} : formats[i], tokens);
    layers[i].slides = specs[i].window > 0;
    sizes[layers[i].slides ? 1 : 0].push_back(layers[i].view.block_stride);
    window = std::max(window, specs[i].window);
  }
  const bool one = !kinds || sizes[0].empty() || sizes[1].empty();
  for (Layer& layer : layers) {
    layer.slides = layer.slides && !one;
    (layer.slides ? window_bytes : text_bytes) += layer.view.block_bytes();
  }
  if (one) {
    window = 0;
    for (Layer& layer : layers) {
      layer.offset = unit_bytes;
      unit_bytes += layer.view.block_stride;
    }
    for (Layer& layer : layers) layer.view.block_stride = unit_bytes;
    return;
  }
  unit_bytes = best_unit(sizes[0], sizes[1]);
  const std::vector<int> units[2] = {pack(sizes[0], unit_bytes), pack(sizes[1], unit_bytes)};
  text_units = count(units[0]);
  window_units = count(units[1]);
  std::vector<std::size_t> filled(static_cast<std::size_t>(block_units()), 0);
  std::size_t next[2] = {0, 0};
  for (Layer& layer : layers) {
    const int kind = layer.slides ? 1 : 0;
    layer.unit = units[kind][next[kind]++] + (layer.slides ? text_units : 0);
    std::size_t& end = filled[static_cast<std::size_t>(layer.unit)];
    layer.offset = end;
    end += layer.view.block_stride;
    layer.view.block_stride = unit_bytes;
  }
}

Sliding Layout::sliding(int step_tokens) const {
  if (window_units == 0) return {};
  // The last tokens of a step and the first one's window lie in so many blocks, wherever these begin.
  return {window, (window + step_tokens + block_tokens - 1) / block_tokens + 1};
}

std::int64_t Layout::row_units(std::int64_t blocks, const Sliding& sliding) const {
  return blocks * text_units + std::min<std::int64_t>(blocks, sliding.most_blocks) * window_units;
}

std::int64_t Layout::row_blocks(std::int64_t units, const Sliding& sliding) const {
  const std::int64_t windows = sliding.most_blocks * window_units;
  const std::int64_t short_ones = units / block_units();
  return short_ones < sliding.most_blocks ? short_ones : (units - windows) / text_units;
}

}  // namespace galley::kv
