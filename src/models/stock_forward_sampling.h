// Sampling as the last node of a stock step's graph, so that the next step can be launched before this one is read.
#pragma once
#include <mlx/mlx.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/forward.h"
#include "sample/sampler.h"

namespace galley::models {

/// What became of one row, written by the MLX task that sampled it.
struct RowOutcome {
  sample::Choice choice;
  std::optional<std::string> fault;
};

/// The tokens picked for some rows of one forward. Read `outcomes` and data only after evaluating `tokens`.
struct SampledRows {
  std::vector<RowId> rows;
  std::vector<sample::RowSampler*> samplers;          ///< borrowed, in row order
  mlx::core::array tokens;                            ///< uint32 [B]
  mlx::core::array logprobs;                          ///< [B, vocab] in the model's type
  mlx::core::array picked;                            ///< float32 [B]: log-probability of each token
  std::shared_ptr<std::vector<RowOutcome>> outcomes;  ///< null when every row only needed its arg-max
};

/// Picks a token for each row of `logprobs` [B, vocab]: arg-max of the values as rounded to the model's type (what
/// mlx-lm's greedy sampler does), or RowSampler::choose on them for rows that sample or report log-probabilities.
/// A sampler that throws faults its own row alone.
SampledRows sample_rows(std::vector<RowId> rows, std::vector<sample::RowSampler*> samplers, mlx::core::array logprobs);

/// The outcome of row `index`, after evaluation. Counts the draw of an arg-max row. Logits without a finite maximum
/// show in Choice::finite.
RowOutcome outcome_of(const SampledRows& sampled, std::size_t index);

}  // namespace galley::models
