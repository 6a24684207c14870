#include "serve/prefill_plan.h"

#include <algorithm>
#include <numeric>

namespace galley::serve {

std::vector<std::size_t> share_prefill(std::span<const std::size_t> left, std::size_t budget) {
  std::vector<std::size_t> shares(left.size(), 0);
  if (left.empty() || budget == 0) return shares;
  shares[0] = std::min(left[0], std::max<std::size_t>(1, budget / left.size()));
  budget -= shares[0];
  std::vector<std::size_t> order(left.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return left[a] < left[b]; });
  for (const std::size_t row : order) {
    const std::size_t more = std::min(left[row] - shares[row], budget);
    shares[row] += more;
    budget -= more;
  }
  return shares;
}

}  // namespace galley::serve
