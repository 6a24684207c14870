// What finding a prompt's known beginning costs, by the number of blocks that the index knows.
//   bench_prefix_index          argument: blocks known; the time is that of one prompt whose 20 blocks are all known
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kv/block_pool.h"
#include "kv/prefix_index.h"

namespace galley::kv {
namespace {

constexpr int kBlockTokens = 32, kBlocks = 20;  // of one text
constexpr std::size_t kTokens = kBlockTokens * kBlocks;
using Text = std::vector<std::int32_t>;

class FilledIndex {
 public:
  explicit FilledIndex(int blocks) : pool_(blocks + 1, kBlockTokens), index_(pool_) {
    for (int t = 0; t < blocks / kBlocks; ++t) add(texts_.emplace_back(random_text()));
  }
  [[nodiscard]] const PrefixIndex& index() const { return index_; }
  [[nodiscard]] const std::vector<Text>& texts() const { return texts_; }

 private:
  Text random_text() {
    Text text(kTokens);
    for (std::int32_t& token : text) token = static_cast<std::int32_t>(random_() % 50'000);
    return text;
  }
  /// As a row does that was computed and has ended: its blocks stay cached.
  void add(const Text& text) {
    std::vector<std::int32_t> held;
    if (!pool_.reserve(kBlocks)) return;
    for (std::size_t at = 0; at < kTokens; at += kBlockTokens) {
      const std::int32_t parent = held.empty() ? PrefixIndex::kRoot : held.back();
      held.push_back(pool_.take());
      index_.insert(parent, std::span(text).subspan(at, kBlockTokens), held.back());
    }
    for (; !held.empty(); held.pop_back()) pool_.release(held.back());
  }

  std::minstd_rand random_{7};
  BlockPool pool_;
  PrefixIndex index_;
  std::vector<Text> texts_;
};

void hit(benchmark::State& state) {
  const FilledIndex filled(static_cast<int>(state.range(0)));
  std::size_t text = 0;
  for (auto _ : state) {
    const auto found = filled.index().find(PrefixIndex::kRoot, filled.texts()[text]);
    if (found.size() != kBlocks) state.SkipWithError("a known text was not found");
    text = (text + 7) % filled.texts().size();
  }
}
BENCHMARK(hit)->Arg(100)->Arg(1'000)->Arg(10'000)->Arg(100'000)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace galley::kv

BENCHMARK_MAIN();
