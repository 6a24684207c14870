// Mixtures of experts: routing, and the gated MLPs of the picked experts, each over the rows that picked it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "ops/kernels/scratch.h"

namespace galley::kernels {
namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// Softmax over all scores of a row, then the largest, largest first; of equals the lower index. NaNs are never larger:
// a faulty row picks something and stays NaN by its weights.
void route_row(const MoeLayer& moe, const float* scores, std::int32_t* expert, float* weight) {
  const int experts = static_cast<int>(moe.gate_up.size()), picks = moe.picks;
  float max = -std::numeric_limits<float>::infinity();
  for (int e = 0; e < experts; ++e) max = scores[e] > max ? scores[e] : max;
  float sum = 0;
  for (int e = 0; e < experts; ++e) sum += std::exp(scores[e] - max);
  for (int p = 0; p < picks; ++p) {
    int best = -1;
    for (int e = 0; e < experts; ++e) {
      if (std::find(expert, expert + p, e) != expert + p) continue;
      if (best < 0 || scores[e] > scores[best]) best = e;
    }
    expert[p] = best;
    weight[p] = std::exp(scores[best] - max) / sum;
  }
  if (moe.normalized) {
    float total = 0;
    for (int p = 0; p < picks; ++p) total += weight[p];
    for (int p = 0; p < picks; ++p) weight[p] /= total;
  }
  if (moe.factors == nullptr) return;
  for (int p = 0; p < picks; ++p) weight[p] *= moe.factors[expert[p]];
}

void check(const MoeLayer& moe) {
  const auto experts = moe.gate_up.size();
  require(experts > 0 && moe.down.size() == experts, "experts: as many down matrices as gate and up ones are needed");
  require(moe.picks > 0 && static_cast<std::size_t>(moe.picks) <= experts, "experts: more picks than experts");
  require(moe.norm != nullptr, "experts: the norm is missing");
  for (std::size_t e = 0; e < experts; ++e) {
    require(moe.gate_up[e].interleaved() && moe.gate_up[e].columns() == moe.down[e].depth() &&
                moe.gate_up[e].depth() == moe.down[e].columns(),
            "experts: gate, up and down don't fit together");
  }
}

}  // namespace

void experts(Context& context, const MoeLayer& moe, const float* scores, const float* x, int rows, float* y) {
  check(moe);
  const int count = static_cast<int>(moe.gate_up.size());
  const int hidden = moe.gate_up.front().depth();
  const auto width = static_cast<std::size_t>(hidden);
  Context::Scratch::Experts& scratch = context.scratch().experts;
  const std::size_t picks = static_cast<std::size_t>(rows) * static_cast<std::size_t>(moe.picks);
  scratch.expert.resize(picks);
  scratch.weight.resize(picks);
  spread(context, rows, [&](int begin, int end, int) {
    for (int r = begin; r < end; ++r) {
      const std::size_t at = static_cast<std::size_t>(r) * static_cast<std::size_t>(moe.picks);
      route_row(moe, scores + static_cast<std::size_t>(r) * static_cast<std::size_t>(count), scratch.expert.data() + at,
                scratch.weight.data() + at);
    }
  });

  // Picks in order of their experts: `order` holds the places (row * picks + rank).
  scratch.begin.assign(static_cast<std::size_t>(count) + 1, 0);
  for (const std::int32_t e : scratch.expert) ++scratch.begin[static_cast<std::size_t>(e) + 1];
  for (std::size_t e = 0; e < static_cast<std::size_t>(count); ++e) scratch.begin[e + 1] += scratch.begin[e];
  scratch.slot.resize(picks);
  scratch.row.resize(picks);
  std::vector<std::int32_t>& next = scratch.next;
  next.assign(scratch.begin.begin(), scratch.begin.end() - 1);
  for (std::size_t p = 0; p < picks; ++p) {
    const std::int32_t slot = next[static_cast<std::size_t>(scratch.expert[p])]++;
    scratch.slot[p] = slot;
    scratch.row[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(p) / moe.picks;
  }

  const std::size_t bytes = picks * width * sizeof(float);
  if (scratch.products.size() < bytes) scratch.products = AlignedMemory(bytes);
  auto* products = reinterpret_cast<float*>(scratch.products.data());
  for (int e = 0; e < count; ++e) {
    const auto at = static_cast<std::size_t>(e);
    const std::int32_t first = scratch.begin[at];
    const int n = scratch.begin[at + 1] - first;
    if (n == 0) continue;
    context.reshape(scratch.in, n, moe.gate_up[at], true);
    norm_quantize(context, x, width, scratch.row.data() + first, moe.norm, scratch.in);
    context.reshape(scratch.gated, n, moe.down[at], false);
    linear_gated(context, {&moe.gate_up[at], &scratch.in, moe.eps}, moe.gate, scratch.gated);
    linear(context, {&moe.down[at], &scratch.gated}, products + static_cast<std::size_t>(first) * width, width);
  }

  spread(context, rows, [&](int begin, int end, int) {
    for (int r = begin; r < end; ++r) {
      const std::size_t place = static_cast<std::size_t>(r) * static_cast<std::size_t>(moe.picks);
      const float* from = x + static_cast<std::size_t>(r) * width;
      float* to = y + static_cast<std::size_t>(r) * width;
      for (std::size_t p = place; p < place + static_cast<std::size_t>(moe.picks); ++p) {
        const float weight = scratch.weight[p];
        const float* product = products + static_cast<std::size_t>(scratch.slot[p]) * width;
        if (p == place) {
          for (std::size_t c = 0; c < width; ++c) to[c] = weight * product[c];
        } else {
          for (std::size_t c = 0; c < width; ++c) to[c] += weight * product[c];
        }
      }
      if (!moe.residual) continue;
      for (std::size_t c = 0; c < width; ++c) to[c] += from[c];
    }
  });
}

}  // namespace galley::kernels
