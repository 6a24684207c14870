// Drivers of the matrix products: units of output columns spread over the pool, tiles of rows inside, epilogue on the
// spot.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "ops/kernels/kv_ahead.h"
#include "ops/kernels/scratch.h"

namespace galley::kernels {
namespace {

constexpr std::size_t kFetchAhead = 8192;  // bytes; the hardware's prefetcher stops at page ends

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void check(const Context& context, const Product& p, bool interleaved) {
  require(p.w != nullptr && p.x != nullptr, "product: matrix or activations missing");
  require(p.w->block_columns() > 0 && p.w->depth() > 0, "product: empty matrix");
  require(!p.w->affine() || p.w->lanes() == context.isa().lanes, "product: matrix packed for another instruction set");
  require(p.x->form() == p.w->input_form() && p.x->k() == p.w->depth(),
          "product: activations of another form or depth");
  require(p.x->tile() <= context.isa().max_tile, "product: tiles too high for this instruction set");
  require(p.w->interleaved() == interleaved, "product: gate and up matrices go with linear_gated, and only they");
}

void check_out(const Product& p, const Activations& out, bool normed) {
  require(out.rows() == p.x->rows() && out.k() == p.w->columns(), "product: the output has another shape");
  require(out.normed() == normed, "product: the output must be normed exactly if a norm follows");
}

// RMS factor of each row, or null. The sum runs in order of the columns, whatever the tiling.
const float* rms_factors(Context& context, const Product& p) {
  const Activations& x = *p.x;
  if (!x.normed()) return nullptr;
  std::vector<float>& factors = context.scratch().factors;
  factors.resize(static_cast<std::size_t>(x.rows()));
  const int groups = x.ssq_groups();
  for (int t = 0; t < x.tiles(); ++t) {
    const int rows = x.tile_rows(t), row0 = t * x.tile();
    const float* ssq = x.ssq() + static_cast<std::size_t>(row0) * groups;
    for (int r = 0; r < rows; ++r) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += ssq[g * rows + r];
      factors[static_cast<std::size_t>(row0 + r)] = 1.0F / std::sqrt(sum / static_cast<float>(x.k()) + p.eps);
    }
  }
  return factors.data();
}

ProductFunction product_of(const KernelTable& kernels, const PackedMatrix& w) {
  return w.affine() ? kernels.affine[w.bits()] : kernels.plain;
}

// One tile of one unit: `width` stored columns from unit * width on, in buf [rows][width].
struct Tile {
  int unit, row0, rows, thread;
  float* buf;
};

// Pieces of KV for every block of the tiles after the first, which finds its weights in the caches. A piece is no more
// than two blocks of weights: much faster than the weights themselves it could not come. Only with 8 lanes: 16 lanes
// are done with a block too soon, and their products would wait for the KV instead.
KvPieces kv_pieces(Context& context, const Product& p, int units, int blocks) {
  const int slots = units * (p.x->tiles() - 1) * blocks;
  if (p.ahead == nullptr || slots == 0 || !p.w->affine() || p.w->lanes() != 8) return {};
  return {context.scratch().kv_blocks, *p.ahead, slots, 2 * p.w->block_bytes()};
}

// Calls before(tile) and epilogue(tile) around the product of each tile of each unit.
template <class Before, class Epilogue>
void run(Context& context, const Product& p, int units, int width, const Before& before, const Epilogue& epilogue) {
  const Activations& x = *p.x;
  if (x.rows() == 0) return;
  const PackedMatrix& w = *p.w;
  const KernelTable& kernels = *context.isa().kernels;
  const ProductFunction product = product_of(kernels, w);
  const float* factors = rms_factors(context, p);
  const int blocks = width / w.block_columns();
  const auto ld = static_cast<std::size_t>(width);
  const KvPieces pieces = kv_pieces(context, p, units, blocks);
  spread(context, units, [&](int begin, int end, int thread) {
    alignas(64) float buf[static_cast<std::size_t>(kMaxTile) * kMaxUnit];
    if (kernels.around_products != nullptr) kernels.around_products(x.tile(), true);
    for (int unit = begin; unit < end; ++unit) {
      const std::size_t first = static_cast<std::size_t>(unit) * blocks;
      for (int t = 0; t < x.tiles(); ++t) {
        const Tile tile{unit, t * x.tile(), x.tile_rows(t), thread, buf};
        before(tile);
        if (t == 0) {  // it pulls the weights in: prefetch a fixed distance ahead
          const char* at = reinterpret_cast<const char*>(w.block(first)) + kFetchAhead;
          product(w, x, first, blocks, t, buf, ld, {at, static_cast<std::size_t>(blocks) * w.block_bytes()});
        } else if (pieces.empty()) {
          product(w, x, first, blocks, t, buf, ld, {});
        } else {
          const int slot = (unit * (x.tiles() - 1) + t - 1) * blocks;
          for (int b = 0; b < blocks; ++b) {
            product(w, x, first + static_cast<std::size_t>(b), 1, t, buf + b * w.block_columns(), ld, pieces[slot + b]);
          }
        }
        if (factors != nullptr || w.bias() != nullptr) {
          kernels.scale_bias(buf, ld, tile.rows, width, factors != nullptr ? factors + tile.row0 : nullptr,
                             w.bias() != nullptr ? w.bias() + static_cast<std::size_t>(unit) * width : nullptr);
        }
        epilogue(tile);
      }
    }
    if (kernels.around_products != nullptr) kernels.around_products(x.tile(), false);
  });
}

constexpr auto kNoPreparation = [](const Tile&) {};

}  // namespace

void emit(const KernelTable& kernels, float* buf, std::size_t ld, int rows, int width, const float* norm,
          const Activations& out, int row, int column) {
  const int t = row / out.tile(), in_tile = out.tile_rows(t), row0 = t * out.tile();
  if (norm != nullptr) {
    alignas(64) float padded[kMaxUnit];
    const float* weight = norm + column;
    if (column + width > out.k()) {
      std::fill(std::copy(weight, norm + out.k(), padded), padded + width, 0.0F);
      weight = padded;
    }
    float* ssq = out.ssq() + static_cast<std::size_t>(row0) * out.ssq_groups() +
                 static_cast<std::size_t>(column / 32) * in_tile + (row - row0);
    kernels.norm(buf, ld, rows, width, weight, ssq, static_cast<std::size_t>(in_tile));
  }
  if (!out.form().quantized()) {
    for (int r = 0; r < rows; ++r) {
      std::memcpy(out.x() + static_cast<std::size_t>(row + r) * out.stride() + column, buf + r * ld,
                  static_cast<std::size_t>(width) * sizeof(float));
    }
    return;
  }
  const int group = out.form().group;
  for (int c = 0; c < width; c += group) kernels.quantize(buf + c, ld, rows, out, row, (column + c) / group);
}

void linear(Context& context, const Product& product, float* y, std::size_t ld, float softcap) {
  check(context, product, false);
  const int columns = product.w->columns();
  require(ld >= static_cast<std::size_t>(columns), "linear: rows of y are too short");
  const KernelTable& kernels = *context.isa().kernels;
  run(context, product, product.w->stored_columns() / kUnitColumns, kUnitColumns, kNoPreparation,
      [&](const Tile& tile) {
        const int column = tile.unit * kUnitColumns;
        const auto n = static_cast<std::size_t>(std::min(kUnitColumns, columns - column));
        if (softcap > 0) kernels.soft_cap(tile.buf, kUnitColumns, tile.rows, kUnitColumns, softcap);
        for (int r = 0; r < tile.rows; ++r) {
          std::memcpy(y + static_cast<std::size_t>(tile.row0 + r) * ld + column, tile.buf + r * kUnitColumns,
                      n * sizeof(float));
        }
      });
}

void linear_residual(Context& context, const Product& product, const Residual& to) {
  check(context, product, false);
  const int columns = product.w->columns();
  require(to.residual != nullptr && to.y != nullptr && to.ld >= static_cast<std::size_t>(columns),
          "linear_residual: residual or y missing, or their rows too short");
  if (to.out != nullptr) check_out(product, *to.out, to.norm != nullptr);
  const KernelTable& kernels = *context.isa().kernels;
  const int width = to.out != nullptr ? unit_of(*to.out) : kUnitColumns;
  run(context, product, (columns + width - 1) / width, width, kNoPreparation, [&](const Tile& tile) {
    const int column = tile.unit * width;
    const auto ld = static_cast<std::size_t>(width);
    const std::size_t at = static_cast<std::size_t>(tile.row0) * to.ld + static_cast<std::size_t>(column);
    if (column + width <= columns) {
      kernels.add_residual(tile.buf, ld, tile.rows, width, to.residual + at, to.y + at, to.ld, to.scale);
    } else {  // the last columns are fewer than a unit: through padded rows
      alignas(64) float padded[kMaxUnit] = {};
      const std::size_t n = static_cast<std::size_t>(columns - column) * sizeof(float);
      for (int r = 0; r < tile.rows; ++r) {
        const std::size_t row = at + static_cast<std::size_t>(r) * to.ld;
        std::memcpy(padded, to.residual + row, n);
        kernels.add_residual(tile.buf + r * ld, ld, 1, width, padded, padded, ld, to.scale);
        std::memcpy(to.y + row, padded, n);
      }
    }
    if (to.out != nullptr) emit(kernels, tile.buf, ld, tile.rows, width, to.norm, *to.out, tile.row0, column);
  });
}

void linear_gated(Context& context, const Product& product, Gate gate, Activations& out) {
  check(context, product, true);
  check_out(product, out, false);
  const KernelTable& kernels = *context.isa().kernels;
  const int width = unit_of(out);  // of the result; the matrix holds twice as many columns
  run(context, product, (product.w->columns() + width - 1) / width, 2 * width, kNoPreparation, [&](const Tile& tile) {
    const auto ld = static_cast<std::size_t>(2 * width);
    kernels.gate(tile.buf, ld, tile.rows, width / kUnitColumns, gate);
    emit(kernels, tile.buf, ld, tile.rows, width, nullptr, out, tile.row0, tile.unit * width);
  });
}

void linear_argmax(Context& context, const Product& product, std::int32_t* token, float* value, float softcap) {
  check(context, product, false);
  const KernelTable& kernels = *context.isa().kernels;
  const auto rows = static_cast<std::size_t>(product.x->rows());
  const int columns = product.w->columns();
  std::vector<Best>& best = context.scratch().best;
  best.assign(rows * static_cast<std::size_t>(context.threads()), {-std::numeric_limits<float>::infinity(), -1});
  run(context, product, product.w->stored_columns() / kUnitColumns, kUnitColumns, kNoPreparation,
      [&](const Tile& tile) {
        const int column = tile.unit * kUnitColumns;
        if (softcap > 0) kernels.soft_cap(tile.buf, kUnitColumns, tile.rows, kUnitColumns, softcap);
        kernels.argmax(tile.buf, kUnitColumns, tile.rows, std::min(kUnitColumns, columns - column), column,
                       best.data() + static_cast<std::size_t>(tile.thread) * rows + tile.row0);
      });
  for (std::size_t r = 0; r < rows; ++r) {
    Best b = best[r];
    for (std::size_t at = rows + r; at < best.size(); at += rows) {
      const Best& other = best[at];
      if (other.index < 0) continue;
      if (b.index < 0 || other.value > b.value || (other.value == b.value && other.index < b.index)) b = other;
    }
    token[r] = b.index;
    if (value != nullptr) value[r] = b.value;
  }
}

void linear_qkv(Context& context, const Product& product, const QkvOutput& to) {
  check(context, product, false);
  const PagedKv& kv = to.kv;
  const int dim = kv.head_dim, all_heads = to.heads + (to.values_are_keys ? 1 : 2) * kv.kv_heads;
  const int held = dim > 0 ? product.w->columns() / dim : 0;  // heads in this matrix
  require(dim > 0 && dim % 16 == 0 && dim <= kMaxHeadDim, "linear_qkv: head_dim must be a multiple of 16, at most 512");
  require(kv.block_tokens > 0 && kv.block_tokens % kKeyGroup == 0, "linear_qkv: block_tokens must be a multiple of 16");
  require(held * dim == product.w->columns() && to.first_head >= 0 && to.first_head + held <= all_heads,
          "linear_qkv: the matrix does not hold whole heads of this layer");
  require(to.places.rows == product.x->rows(), "linear_qkv: places and activations differ in rows");
  require(to.rope.table == nullptr || (to.rope.dims % 2 == 0 && to.rope.dims <= dim),
          "linear_qkv: bad RoPE dimensions");
  const KernelTable& kernels = *context.isa().kernels;
  require(!kv.quantized() || (kv.group > 0 && kv.group % 32 == 0 && dim % kv.group == 0),
          "linear_qkv: groups of codes must be a multiple of 32 that divides head_dim");

  // The run that a key or value of this row belongs to.
  const auto run_of = [&](int head, int row) -> std::byte* {
    const int position = to.places.position[row];
    const std::int32_t block = to.places.table[row][position / kv.block_tokens];
    const int slot = position % kv.block_tokens;
    return head < to.heads + kv.kv_heads ? kv.keys(block, head - to.heads, slot)
                                         : kv.values(block, head - to.heads - kv.kv_heads, slot);
  };
  const auto fetch = [&](const Tile& tile) {  // the lines the epilogue will write
    const int head = to.first_head + tile.unit;
    if (head < to.heads) return;
    const bool is_key = head < to.heads + kv.kv_heads;
    const std::size_t length = is_key ? kv.number_bytes() : kv.number_bytes() / kKeyGroup;
    for (int r = 0; r < tile.rows; ++r) {
      const auto slot = static_cast<std::size_t>(to.places.position[tile.row0 + r] % kKeyGroup);
      const std::byte* at = run_of(head, tile.row0 + r) + (is_key ? 0 : slot * length);
      for (std::size_t i = 0; i < length; i += 64) __builtin_prefetch(at + i, 1, 2);
    }
  };
  // One row of the product as the head it is taken for.
  const auto leave = [&](int head, int row, const float* values) {
    const bool is_q = head < to.heads, is_k = !is_q && head < to.heads + kv.kv_heads;
    const bool rotate = (is_q || is_k) && to.rope.table != nullptr;
    HeadTask task;
    task.dim = dim;
    task.norm = is_q ? to.q_norm : is_k ? to.k_norm : to.v_norm;
    task.eps = to.head_norm_eps;
    task.rope = rotate ? to.rope.table + static_cast<std::size_t>(to.places.position[row]) * to.rope.dims : nullptr;
    task.rope_dims = to.rope.dims;
    task.traditional = to.rope.traditional;
    task.scale = is_q ? to.q_scale : 1.0F;
    task.kv = &kv;
    task.part = is_k ? KvPart::keys : KvPart::values;
    if (is_q) {
      task.q = to.q + (static_cast<std::size_t>(row) * to.heads + head) * dim;
    } else {
      task.run = run_of(head, row);
      task.slot = to.places.position[row] % kKeyGroup;
    }
    kernels.head(task, values);
  };
  run(context, product, held, dim, fetch, [&](const Tile& tile) {
    const int head = to.first_head + tile.unit;
    for (int r = 0; r < tile.rows; ++r) {
      const float* values = tile.buf + static_cast<std::size_t>(r) * dim;
      leave(head, tile.row0 + r, values);
      if (to.values_are_keys && head >= to.heads) leave(head + kv.kv_heads, tile.row0 + r, values);
    }
  });
}

}  // namespace galley::kernels
