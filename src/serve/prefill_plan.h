// How many prompt tokens each prefilling row contributes to a step.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace galley::serve {

/// Shares `budget` tokens among prompts, given what is left of each (> 0) in order of arrival. The oldest is sure of an
/// equal share, so that it never starves; the rest goes to the shortest first (equals by arrival), so that a short
/// prompt is not stuck behind a long one. A prompt may get nothing in this step. Sums to min(budget, all that is left).
[[nodiscard]] std::vector<std::size_t> share_prefill(std::span<const std::size_t> left, std::size_t budget);

}  // namespace galley::serve
