// Driver of the attention: groups of neighbouring rows, KV heads, and segments of the key range.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "ops/kernels/scratch.h"

namespace galley::kernels {
namespace {

constexpr int kRowBlock = 8;  // rows of one sequence that share a pass over the keys

// What does not change while one call runs.
struct Plan {
  const KernelTable& kernels;
  const Attention& args;
  int per_kv;       // query heads on a KV head
  int kv_per_unit;  // KV heads whose outputs fill whole quantization groups
  int sets;         // units a row group is made of
  float softcap;

  [[nodiscard]] int dim() const { return args.kv.head_dim; }
  [[nodiscard]] int heads_per_unit() const { return per_kv * kv_per_unit; }
  [[nodiscard]] int width() const { return heads_per_unit() * dim(); }
  [[nodiscard]] int first_key(int row) const {
    return args.window > 0 ? std::max(0, args.places.position[row] - args.window + 1) : 0;
  }
};

using Group = Context::Scratch::RowGroup;

// Results of one unit over one segment (or all): vectors in the order [kv head][row][query head].
struct Part {
  float *out, *max, *sum;
  static std::size_t floats(int vectors, int dim) { return static_cast<std::size_t>(vectors) * (dim + 2); }
  static Part at(float* p, int vectors, int dim) {
    float* max = p + static_cast<std::size_t>(vectors) * dim;
    return {p, max, max + vectors};
  }
};

constexpr std::size_t kScoreFloats = std::size_t{2} * kMaxVectors * (kAttentionSegment + kKeyGroup);

void run_segment(const Plan& plan, const Group& group, int set, int segment, float* scores, const Part& part) {
  const Attention& a = plan.args;
  const int dim = plan.dim(), vectors = group.rows * plan.per_kv;
  const int begin = segment * kAttentionSegment, end = begin + kAttentionSegment;
  constexpr int kMost = 64;  // vectors in one call; more are run in turns
  const float* q[kMost];
  int first[kMost], last[kMost];
  SegmentTask task;
  task.kv = &a.kv;
  task.table = a.places.table[group.row];
  task.q = q;
  task.first = first;
  task.last = last;
  task.softcap = plan.softcap;
  task.prefetch = group.rows == 1;
  task.scores = scores;
  for (int local = 0; local < plan.kv_per_unit; ++local) {
    task.kv_head = set * plan.kv_per_unit + local;
    for (int v0 = 0; v0 < vectors; v0 += kMost) {
      task.vectors = std::min(kMost, vectors - v0);
      for (int v = 0; v < task.vectors; ++v) {
        const int row = group.row + (v0 + v) / plan.per_kv;
        const int head = task.kv_head * plan.per_kv + (v0 + v) % plan.per_kv;
        q[v] = a.q + (static_cast<std::size_t>(row) * a.heads + head) * dim;
        first[v] = std::max(begin, plan.first_key(row));
        last[v] = std::min(end, a.places.position[row] + 1);
      }
      const std::size_t at = static_cast<std::size_t>(local) * vectors + v0;
      task.out = part.out + at * dim;
      task.max = part.max + at;
      task.sum = part.sum + at;
      plan.kernels.segment(task);
    }
  }
}

void clear(const Part& total, int vectors) {
  std::fill(total.max, total.max + vectors, kNothing);
  std::fill(total.sum, total.sum + vectors, 0.0F);
}

void merge(const Plan& plan, const Part& total, const Part& part, int vectors) {
  const int dim = plan.dim();
  for (int v = 0; v < vectors; ++v) {
    const std::size_t at = static_cast<std::size_t>(v) * dim;
    plan.kernels.merge(dim, total.out + at, total.max + v, total.sum + v, part.out + at, part.max[v], part.sum[v]);
  }
}

// Divides by the sums and leaves the rows in `out`. `rows`: scratch, [group.rows][width].
void finish(const Plan& plan, const Group& group, int set, const Part& total, float* rows, const Activations& out) {
  const int dim = plan.dim(), per_kv = plan.per_kv, width = plan.width();
  for (int local = 0; local < plan.kv_per_unit; ++local) {
    for (int r = 0; r < group.rows; ++r) {
      for (int h = 0; h < per_kv; ++h) {
        const std::size_t v = (static_cast<std::size_t>(local) * group.rows + r) * per_kv + h;
        const float inverse = 1.0F / total.sum[v];
        float* to = rows + static_cast<std::size_t>(r) * width + (static_cast<std::size_t>(local) * per_kv + h) * dim;
        for (int d = 0; d < dim; ++d) to[d] = total.out[v * dim + d] * inverse;
      }
    }
  }
  for (int r = 0; r < group.rows;) {  // a group of rows may lie across tiles of the output
    const int row = group.row + r;
    const int n = std::min(group.rows - r, out.tile() - row % out.tile());
    emit(plan.kernels, rows + static_cast<std::size_t>(r) * width, static_cast<std::size_t>(width), n, width, nullptr,
         out, row, set * width);
    r += n;
  }
}

void check_groups(const PagedKv& kv) {
  if (kv.quantized() && (kv.group <= 0 || kv.group % 32 != 0 || kv.head_dim % kv.group != 0)) {
    throw std::invalid_argument("attention: groups of codes must be a multiple of 32 that divides head_dim");
  }
}

void find_groups(const RowPlaces& places, std::vector<Group>& groups) {
  groups.clear();
  for (int r = 0; r < places.rows; ++r) {
    if (!groups.empty() && groups.back().rows < kRowBlock && places.table[r] == places.table[r - 1] &&
        places.position[r] == places.position[r - 1] + 1) {
      ++groups.back().rows;
    } else {
      groups.push_back({r, 1});
    }
  }
}

}  // namespace

void attention(Context& context, const Attention& args, Activations& out) {
  const PagedKv& kv = args.kv;
  const int dim = kv.head_dim;
  if (dim <= 0 || dim % 16 != 0 || dim > kMaxHeadDim || kv.kv_heads <= 0 || args.heads % kv.kv_heads != 0 ||
      kv.block_tokens <= 0 || kv.block_tokens % kKeyGroup != 0) {
    throw std::invalid_argument("attention: bad head_dim, heads or block_tokens");
  }
  check_groups(kv);
  if (out.rows() != args.places.rows || out.k() != args.heads * dim || out.normed()) {
    throw std::invalid_argument("attention: the output has another shape or expects a norm");
  }
  if (args.places.rows == 0) return;
  const int per_kv = args.heads / kv.kv_heads;
  const int group_columns = out.form().quantized() ? out.form().group : per_kv * dim;
  const int kv_per_unit = group_columns / std::gcd(group_columns, per_kv * dim);
  const Plan plan{
      *context.isa().kernels, args, per_kv, kv_per_unit, kv.kv_heads / kv_per_unit, args.softcap * 1.4426950408889634F};

  auto& scratch = context.scratch();
  find_groups(args.places, scratch.groups);
  const auto& groups = scratch.groups;
  const int units = static_cast<int>(groups.size()) * plan.sets;
  const auto group_of = [&](int unit) -> const Group& { return groups[static_cast<std::size_t>(unit / plan.sets)]; };
  const auto vectors_of = [&](const Group& g) { return g.rows * plan.heads_per_unit(); };
  const auto segments_of = [&](const Group& g) {
    return std::pair{plan.first_key(g.row) / kAttentionSegment,
                     args.places.position[g.row + g.rows - 1] / kAttentionSegment + 1};
  };
  const auto row_floats = [&](const Group& g) { return static_cast<std::size_t>(g.rows) * plan.width(); };

  // Where a few units with long contexts would keep one thread busy at the end, segments are spread instead of units.
  // Same parts, same order of merging, same bits.
  std::int64_t work = 0, largest = 0;
  for (const Group& g : groups) {
    const auto [s0, s1] = segments_of(g);
    const auto unit = static_cast<std::int64_t>(s1 - s0) * g.rows;
    work += unit * plan.sets;
    largest = std::max(largest, unit);
  }
  bool spread_segments = context.threads() > 1 && 4 * context.threads() * largest > work;
  std::int64_t parts = 0;
  std::size_t floats = 0;
  if (spread_segments) {
    scratch.offsets.clear();
    for (int u = 0; u < units; ++u) {
      const auto [s0, s1] = segments_of(group_of(u));
      scratch.offsets.push_back(parts);
      parts += s1 - s0;
    }
    scratch.offsets.push_back(parts);
    spread_segments = parts > units;
    const std::size_t most = Part::floats(kRowBlock * plan.heads_per_unit(), dim);
    floats = (most + 15) / 16 * 16;
  }
  if (!spread_segments) {
    spread(context, units, [&](int begin, int end, int thread) {
      for (int u = begin; u < end; ++u) {
        const Group& g = group_of(u);
        const int vectors = vectors_of(g), set = u % plan.sets;
        const std::size_t n = (Part::floats(vectors, dim) + 15) / 16 * 16;
        float* memory = scratch.threads[static_cast<std::size_t>(thread)].floats(kScoreFloats + 2 * n + row_floats(g));
        const Part part = Part::at(memory + kScoreFloats, vectors, dim);
        const Part total = Part::at(memory + kScoreFloats + n, vectors, dim);
        clear(total, vectors);
        const auto [s0, s1] = segments_of(g);
        for (int s = s0; s < s1; ++s) {
          run_segment(plan, g, set, s, memory, part);
          merge(plan, total, part, vectors);
        }
        finish(plan, g, set, total, memory + kScoreFloats + 2 * n, out);
      }
    });
    return;
  }
  const std::size_t need = static_cast<std::size_t>(parts) * floats * sizeof(float);
  if (scratch.parts.size() < need) scratch.parts = AlignedMemory(need + need / 4);
  const auto part_at = [&](std::int64_t index, int vectors) {
    return Part::at(reinterpret_cast<float*>(scratch.parts.data()) + static_cast<std::size_t>(index) * floats, vectors,
                    dim);
  };
  spread(context, static_cast<int>(parts), [&](int begin, int end, int thread) {
    float* scores = scratch.threads[static_cast<std::size_t>(thread)].floats(kScoreFloats);
    for (int i = begin; i < end; ++i) {
      const auto it = std::upper_bound(scratch.offsets.begin(), scratch.offsets.end(), std::int64_t{i}) - 1;
      const int u = static_cast<int>(it - scratch.offsets.begin());
      const Group& g = group_of(u);
      run_segment(plan, g, u % plan.sets, segments_of(g).first + static_cast<int>(i - *it), scores,
                  part_at(i, vectors_of(g)));
    }
  });
  spread(context, units, [&](int begin, int end, int thread) {
    for (int u = begin; u < end; ++u) {
      const Group& g = group_of(u);
      const int vectors = vectors_of(g);
      const std::size_t n = (Part::floats(vectors, dim) + 15) / 16 * 16;
      float* memory = scratch.threads[static_cast<std::size_t>(thread)].floats(n + row_floats(g));
      const Part total = Part::at(memory, vectors, dim);
      clear(total, vectors);
      for (auto i = scratch.offsets[static_cast<std::size_t>(u)]; i < scratch.offsets[static_cast<std::size_t>(u) + 1];
           ++i) {
        merge(plan, total, part_at(i, vectors), vectors);
      }
      finish(plan, g, u % plan.sets, total, memory + n, out);
    }
  });
}

}  // namespace galley::kernels
