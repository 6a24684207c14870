// A whole forward of a llama of SmolLM2-135M's shape on the kernels alone: random weights, no model file, no MLX.
//   bench_kernels --benchmark_filter=decode      rows decode at a context of 128 to 192 tokens
//   bench_kernels --benchmark_filter=prefill     one prompt of 128 tokens at a time
// Arguments: batch, instruction set (index into supported_isas()), threads. items_per_second is tokens a second.
#include <benchmark/benchmark.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "ops/kernels/kernels.h"

namespace galley::kernels {
namespace {

class RandomMatrix : public ops::MatrixSource {
 public:
  RandomMatrix(int rows, int cols, int bits, bool symmetric)
      : rows_(rows), cols_(cols), bits_(bits), symmetric_(symmetric) {}
  const std::string& name() const override { return name_; }
  int rows() const override { return rows_; }
  int cols() const override { return cols_; }
  bool quantized() const override { return true; }
  ops::AffineFormat affine() const override { return {bits_, 32}; }
  ops::ElementType type() const override { return ops::ElementType::f16; }
  void codes(int row, std::span<std::uint8_t> out) const override {
    std::minstd_rand rng(static_cast<unsigned>(row + 1));
    for (auto& c : out) c = static_cast<std::uint8_t>(rng() >> 8 & ((1U << bits_) - 1));
  }
  void scales(int, std::span<float> scale, std::span<float> bias) const override {
    std::fill(scale.begin(), scale.end(), bits_ == 4 ? 0x1p-7F : 0x1p-11F);
    std::fill(bias.begin(), bias.end(), symmetric_ ? -0x1p-4F : -0x1.1p-4F);
  }
  void values(int, std::span<float>) const override {}

 private:
  int rows_, cols_, bits_;
  bool symmetric_;
  std::string name_ = "random";
};

struct Model {
  static constexpr int kLayers = 30, kHidden = 576, kHeads = 9, kKvHeads = 3, kDim = 64, kInter = 1536, kVocab = 49152,
                       kContext = 256, kBlock = 32, kRows = 32;
  struct Layer {
    PackedMatrix qkv, o, gate_up, down;
    AlignedMemory cache;
    PagedKv kv;
  };
  Context context;
  std::vector<Layer> layers;
  PackedMatrix head;
  std::vector<float> norm, rope, x, q;
  std::vector<std::vector<std::int32_t>> tables;
  Activations in, attended, gated;

  Model(const Isa& isa, int threads) : context(isa, threads), norm(kHidden, 1.0F), rope(kContext * kDim) {
    const auto pack = [&](int rows, int cols, int bits, bool symmetric) {
      const RandomMatrix m(rows, cols, bits, symmetric);
      const ops::MatrixSource* const one[] = {&m};
      return PackedMatrix::concatenate(context.isa(), one, {}, &context.pool());
    };
    for (int i = 0; i < kLayers; ++i) {
      Layer l;
      l.qkv = pack((kHeads + 2 * kKvHeads) * kDim, kHidden, 4, false);
      l.o = pack(kHidden, kHeads * kDim, 4, false);
      const RandomMatrix half(kInter, kHidden, 4, false);
      l.gate_up = PackedMatrix::interleave(context.isa(), half, half, nullptr, nullptr, &context.pool());
      l.down = pack(kHidden, kInter, 4, false);
      l.kv.kv_heads = kKvHeads;
      l.kv.head_dim = kDim;
      l.kv.block_tokens = kBlock;
      l.kv.block_stride = l.kv.block_bytes();
      l.cache = AlignedMemory(l.kv.block_stride * kRows * (kContext / kBlock));
      l.kv.data = l.cache.data();
      layers.push_back(std::move(l));
    }
    head = pack(kVocab, kHidden, 8, true);
    for (int p = 0; p < kContext; ++p) {
      for (int i = 0; i < kDim / 2; ++i) {
        const double a = p * std::pow(1e5, -2.0 * i / kDim);
        rope[static_cast<std::size_t>(p * kDim + i)] = static_cast<float>(std::cos(a));
        rope[static_cast<std::size_t>(p * kDim + kDim / 2 + i)] = static_cast<float>(std::sin(a));
      }
    }
    for (int r = 0, block = 0; r < kRows; ++r) {
      auto& t = tables.emplace_back();
      for (int b = 0; b < kContext / kBlock; ++b) t.push_back(block++);
    }
  }

  // One forward; the tokens that follow `emitting` rows (the last ones) go to `next`.
  void forward(std::span<const std::int32_t> tokens, const std::vector<std::int32_t>& position,
               const std::vector<const std::int32_t*>& table, int emitting, std::int32_t* next) {
    const int rows = static_cast<int>(tokens.size());
    x.resize(static_cast<std::size_t>(rows) * kHidden);
    q.resize(static_cast<std::size_t>(rows) * kHeads * kDim);
    const RowPlaces places{rows, position.data(), table.data()};
    context.reshape(in, rows, layers[0].qkv, true);
    context.reshape(attended, rows, layers[0].o, false);
    context.reshape(gated, rows, layers[0].down, false);
    embed(context, head, tokens, 1.0F, x.data(), kHidden, norm.data(), &in);
    for (Layer& l : layers) {
      QkvOutput to;
      to.places = places;
      to.kv = l.kv;
      to.heads = kHeads;
      to.q = q.data();
      to.q_scale = query_scale(0.125F);
      to.rope = {rope.data(), kDim, false};
      linear_qkv(context, {&l.qkv, &in}, to);
      attention(context, {places, l.kv, kHeads, q.data()}, attended);
      const Residual residual{x.data(), x.data(), kHidden, 1.0F, norm.data(), &in};
      linear_residual(context, {&l.o, &attended}, residual);
      linear_gated(context, {&l.gate_up, &in}, Gate::silu, gated);
      linear_residual(context, {&l.down, &gated}, residual);
    }
    if (emitting != rows) {
      context.reshape(in, emitting, head, true);
      norm_quantize(context, x.data() + static_cast<std::size_t>(rows - emitting) * kHidden, kHidden, nullptr,
                    norm.data(), in);
    }
    linear_argmax(context, {&head, &in}, next);
  }
};

Model& model(const benchmark::State& state) {
  static std::unique_ptr<Model> last;  // one at a time: weights are large
  static std::pair<std::int64_t, std::int64_t> key{-1, -1};
  const std::pair<std::int64_t, std::int64_t> wanted{state.range(1), state.range(2)};
  if (key != wanted) {
    last.reset();
    last = std::make_unique<Model>(select_isa(supported_isas().at(static_cast<std::size_t>(wanted.first))),
                                   static_cast<int>(wanted.second));
    key = wanted;
  }
  return *last;
}

void decode(benchmark::State& state) {
  Model& m = model(state);
  const auto rows = static_cast<std::size_t>(state.range(0));
  std::vector<std::int32_t> tokens(rows, 1), next(rows), position(rows, 128);
  std::vector<const std::int32_t*> table;
  for (std::size_t r = 0; r < rows; ++r) table.push_back(m.tables[r].data());
  for (auto _ : state) {
    m.forward(tokens, position, table, static_cast<int>(rows), next.data());
    for (std::size_t r = 0; r < rows; ++r) {
      tokens[r] = std::max(0, next[r]);
      position[r] = position[r] == 191 ? 128 : position[r] + 1;
    }
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetLabel(m.context.isa().name);
}
BENCHMARK(decode)->ArgsProduct({{1, 8, 16, 32}, {0}, {1, 2}})->UseRealTime()->Unit(benchmark::kMillisecond);

void prefill(benchmark::State& state) {
  Model& m = model(state);
  const auto rows = static_cast<std::size_t>(state.range(0));
  std::vector<std::int32_t> tokens(rows), position(rows);
  for (std::size_t r = 0; r < rows; ++r) tokens[r] = position[r] = static_cast<std::int32_t>(r);
  const std::vector<const std::int32_t*> table(rows, m.tables[0].data());
  std::int32_t next = 0;
  for (auto _ : state) m.forward(tokens, position, table, 1, &next);
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetLabel(m.context.isa().name);
}
BENCHMARK(prefill)->ArgsProduct({{128}, {0}, {1, 2}})->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace galley::kernels

BENCHMARK_MAIN();
