#include "models/stock_forward_sampling.h"

#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "ops/error.h"

namespace galley::models {
namespace {

namespace mx = mlx::core;

// Host-side sampling of float32 [B, vocab] -> uint32 [B], in stream order.
class SampleRows final : public mx::Primitive {
 public:
  SampleRows(mx::Stream stream, std::vector<sample::RowSampler*> samplers,
             std::shared_ptr<std::vector<RowOutcome>> outcomes)
      : mx::Primitive(stream), samplers_(std::move(samplers)), outcomes_(std::move(outcomes)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [samplers = samplers_, outcomes = outcomes_, vocab = static_cast<std::size_t>(inputs[0].shape(1)),
         logprobs = inputs[0].data<float>(), tokens = out.data<std::uint32_t>()] {
          for (std::size_t row = 0; row < samplers.size(); ++row) {
            tokens[row] = pick(*samplers[row], std::span(logprobs + row * vocab, vocab), (*outcomes)[row]);
          }
        });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(500, "SampleRows runs on the CPU only");
  }
  [[nodiscard]] const char* name() const override { return "SampleRows"; }

 private:
  static std::uint32_t pick(sample::RowSampler& sampler, std::span<const float> logprobs, RowOutcome& outcome) {
    if (sampler.argmax_only()) {
      const auto best = std::ranges::max_element(logprobs);
      outcome.choice.token = static_cast<std::int32_t>(best - logprobs.begin());
      outcome.choice.finite = std::isfinite(*best);
    } else {
      try {
        outcome.choice = sampler.choose(logprobs, /*normalized=*/true);
      } catch (const std::exception& error) {
        outcome.fault = error.what();
      }
    }
    return static_cast<std::uint32_t>(std::max(outcome.choice.token, 0));
  }

  std::vector<sample::RowSampler*> samplers_;
  std::shared_ptr<std::vector<RowOutcome>> outcomes_;
};

}  // namespace

SampledRows sample_rows(std::vector<RowId> rows, std::vector<sample::RowSampler*> samplers, mx::array logprobs) {
  const bool greedy = std::ranges::all_of(samplers, [](const auto* sampler) { return sampler->argmax_only(); });
  std::shared_ptr<std::vector<RowOutcome>> outcomes;
  mx::array tokens = mx::array(0);
  if (greedy) {
    tokens = mx::argmax(logprobs, -1);
  } else {
    outcomes = std::make_shared<std::vector<RowOutcome>>(rows.size());
    const mx::Stream stream = mx::default_stream(mx::Device::cpu);
    const mx::array wide = mx::contiguous(mx::astype(logprobs, mx::float32, stream), false, stream);
    tokens = mx::array(mx::Shape{static_cast<int>(rows.size())}, mx::uint32,
                       std::make_shared<SampleRows>(stream, samplers, outcomes), {wide});
  }
  mx::array picked =
      mx::astype(mx::squeeze(mx::take_along_axis(logprobs, mx::expand_dims(tokens, 1), 1), 1), mx::float32);
  return {std::move(rows),     std::move(samplers), std::move(tokens),
          std::move(logprobs), std::move(picked),   std::move(outcomes)};
}

RowOutcome outcome_of(const SampledRows& sampled, std::size_t index) {
  RowOutcome outcome;
  if (sampled.outcomes) {
    outcome = (*sampled.outcomes)[index];
  } else {
    outcome.choice.token = static_cast<std::int32_t>(sampled.tokens.data<std::uint32_t>()[index]);
    outcome.choice.finite = std::isfinite(sampled.picked.data<float>()[index]);
  }
  sample::RowSampler& sampler = *sampled.samplers[index];
  if (sampler.argmax_only()) sampler.note_argmax();
  return outcome;
}

}  // namespace galley::models
