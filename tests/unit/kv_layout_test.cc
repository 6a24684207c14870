// Where the layers of models lie in units and blocks, and what rows of them cost.
#include "kv/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kv/paged.h"

namespace galley::kv {
namespace {

struct Layers {
  int count;
  int kv_heads, head_dim, window;
};

/// `layers`, one after the other as a model has them: `repeat` times those in order.
std::vector<ops::AttentionSpec> specs_of(const std::vector<Layers>& layers, int repeat) {
  std::vector<ops::AttentionSpec> specs;
  for (int i = 0; i < repeat; ++i) {
    for (const Layers& l : layers) {
      ops::AttentionSpec spec;
      spec.heads = spec.kv_heads = l.kv_heads;
      spec.head_dim = l.head_dim;
      spec.window = l.window;
      specs.insert(specs.end(), static_cast<std::size_t>(l.count), spec);
    }
  }
  return specs;
}

/// No two layers of a unit overlap, and none is where the other kind's units are.
void expect_sound(const Layout& layout) {
  std::vector<std::vector<std::pair<std::size_t, std::size_t>>> units(static_cast<std::size_t>(layout.block_units()));
  for (const Layout::Layer& layer : layout.layers) {
    EXPECT_EQ(layer.slides, layer.unit >= layout.text_units);
    EXPECT_EQ(layer.offset % 64, 0U);
    units.at(static_cast<std::size_t>(layer.unit)).emplace_back(layer.offset, layer.offset + layer.view.block_bytes());
  }
  for (auto& unit : units) {
    EXPECT_FALSE(unit.empty());
    std::ranges::sort(unit);
    for (std::size_t i = 0; i < unit.size(); ++i) {
      EXPECT_LE(unit[i].second, i + 1 < unit.size() ? unit[i + 1].first : layout.unit_bytes);
    }
  }
}

double waste(const Layout& layout) {
  return static_cast<double>(layout.block_bytes()) / static_cast<double>(layout.text_bytes + layout.window_bytes) - 1;
}

TEST(Layout, LayersOfOneKindAreOneUnit) {
  for (const int window : {0, 512}) {
    const Layout layout(specs_of({{4, 2, 64, window}}, 1), kernels::KvElement::f16, 32, {});
    EXPECT_EQ(layout.block_units(), 1);
    EXPECT_EQ(layout.window, 0) << "a model whose layers all slide keeps the whole text";
    EXPECT_EQ(layout.unit_bytes, 4U * 2 * 2 * 64 * 32 * 2);
    EXPECT_EQ(layout.row_units(100, layout.sliding(256)), 100);
    EXPECT_EQ(layout.row_blocks(100, layout.sliding(256)), 100);
    expect_sound(layout);
  }
  const Layout contiguous(specs_of({{5, 1, 256, 512}, {1, 1, 256, 0}}, 3), kernels::KvElement::f16, 4096, {}, false);
  EXPECT_EQ(contiguous.block_units(), 1);
}

// The 270M model: 18 layers, of which every sixth sees everything; one KV head of 256.
TEST(Layout, ALongRowOfGemma3CostsWhatItSees) {
  const Layout layout(specs_of({{5, 1, 256, 512}, {1, 1, 256, 0}}, 3), kernels::KvElement::f16, 32, {});
  expect_sound(layout);
  constexpr std::size_t kLayer = std::size_t{2} * 256 * 32 * 2;
  EXPECT_EQ(layout.unit_bytes, 3 * kLayer);
  EXPECT_EQ(layout.text_units, 1);
  EXPECT_EQ(layout.window_units, 5);
  const Sliding sliding = layout.sliding(256);
  EXPECT_EQ(sliding.most_blocks, 25);
  // 4,000 tokens are 125 blocks: 73.7 MB if all layers kept all; at most 24.6 MB while the prompt is computed,
  EXPECT_EQ(layout.row_units(125, sliding) * static_cast<std::int64_t>(layout.unit_bytes), 250 * 98'304);
  EXPECT_EQ(125 * layout.block_bytes(), 73'728'000U);
  // and 20.2 MB while it decodes: of the sliding layers, the 16 blocks of the last 512 tokens.
  PagedKv kv(layout, 100'000'000);
  PagedRow row(kv.pool(), sliding, 4001);
  for (int at = 0; at < 4000; at += 250) {
    row.grow(kv.pool(), 250);
    EXPECT_LE(kv.pool().held(), 250);
    row.slide(kv.pool());
  }
  EXPECT_EQ(kv.pool().held() * static_cast<std::int64_t>(layout.unit_bytes), (125 + 16 * 5) * 98'304);
  row.release(kv.pool());
  EXPECT_EQ(kv.pool().held(), 0);
}

TEST(Layout, RowsOfAllLengthsFitWhatTheyAreSaidToNeed) {
  const Layout layout(specs_of({{5, 1, 256, 512}, {1, 1, 256, 0}}, 3), kernels::KvElement::f16, 32, {});
  const Sliding sliding = layout.sliding(256);
  for (std::int64_t blocks = 1; blocks < 400; ++blocks) {
    const std::int64_t units = layout.row_units(blocks, sliding);
    EXPECT_EQ(layout.row_blocks(units, sliding), blocks);
    EXPECT_LT(layout.row_blocks(units - 1, sliding), blocks);
  }
}

TEST(Layout, LayersOfUnlikeSizesShareUnitsWithLittleWaste) {
  struct Case {
    std::vector<Layers> layers;
    int repeat;
    double most_waste;
  };
  const std::vector<Case> cases = {
      {{{4, 1, 256, 512}, {1, 1, 512, 0}}, 3, 1e-9},                      // full layers of twice the size
      {{{5, 16, 256, 1024}, {1, 4, 512, 0}}, 10, 1e-9},                   // and of half
      {{{5, 4, 256, 1024}, {1, 4, 256, 0}, {4, 4, 256, 1024}}, 5, 0.05},  // counts that don't divide
      {{{1, 2, 64, 128}, {10, 2, 64, 0}}, 1, 0.05},                       // few that slide
      {{{2, 2, 48, 24}, {1, 1, 64, 0}}, 1, 0.3},                          // three layers, no two of a size
  };
  for (const Case& c : cases) {
    const Layout layout(specs_of(c.layers, c.repeat), kernels::KvElement::f16, 32, {});
    expect_sound(layout);
    EXPECT_GT(layout.window_units, 0);
    EXPECT_LE(waste(layout), c.most_waste) << layout.text_units << " and " << layout.window_units << " units";
  }
  // Formats that differ from layer to layer.
  const auto specs = specs_of({{5, 4, 256, 1024}, {1, 4, 256, 0}}, 4);
  std::vector<ops::KvFormat> formats;
  for (std::size_t i = 0; i < specs.size(); ++i) formats.push_back({i % 3 == 0 ? 8 : i % 3 == 1 ? 4 : 0, 64});
  const Layout mixed(specs, kernels::KvElement::f16, 32, formats);
  expect_sound(mixed);
  EXPECT_LE(waste(mixed), 0.12);
}

TEST(PagedKv, ABlockGoesOutAndInAndIsCopiedWithItsWindowPart) {
  PagedKv kv(Layout(specs_of({{4, 1, 32, 64}, {1, 1, 64, 0}}, 2), kernels::KvElement::f16, 32, {}), 4'000'000);
  BlockPool& pool = kv.pool();
  const auto take = [&](bool window) {
    EXPECT_TRUE(pool.reserve(window ? pool.block_units() : pool.text_units()));
    const std::int32_t block = pool.take();
    if (window) pool.take_window(block);
    return block;
  };
  const std::int32_t a = take(true), b = take(true), c = take(false), d = take(true);
  std::vector<std::byte> bytes(kv.all_bytes()), read(kv.all_bytes());
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((i * 31 + i / 251) % 256);
  const std::size_t text = kv.layout().text_bytes;
  kv.copy_in(a, bytes);
  EXPECT_EQ(kv.copy_out(a, read).size(), bytes.size());
  EXPECT_EQ(read, bytes);
  kv.copy(a, b);
  std::ranges::fill(read, std::byte{0});
  EXPECT_EQ(kv.copy_out(b, read).size(), bytes.size());
  EXPECT_EQ(read, bytes);
  kv.copy_in(c, std::span(bytes).first(text));
  std::ranges::fill(read, std::byte{0});
  EXPECT_EQ(kv.copy_out(c, read).size(), text) << "it has no window block";
  EXPECT_TRUE(std::equal(read.begin(), read.begin() + static_cast<std::ptrdiff_t>(text), bytes.begin()));
  kv.copy_in(d, std::span(bytes).first(text));
  kv.copy_in_window(d, bytes);
  EXPECT_EQ(kv.copy_out(d, read).size(), bytes.size());
  EXPECT_EQ(read, bytes);
  EXPECT_EQ(kv.copy_out(a, read).size(), bytes.size());
  EXPECT_EQ(read, bytes) << "nobody wrote over another's";
}

}  // namespace
}  // namespace galley::kv
