// The engine alone, without scheduler and HTTP: what the kernels and the graph around them give.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "app/memory_speed.h"
#include "app/model_files.h"
#include "app/options.h"

namespace galley::app {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

struct Timing {
  double prefill_s = 0, decode_s = 0;
  double host_s = 0;  ///< of decode_s: planning and recording steps, the most that a look-ahead could hide
};

/// Prefills `batch` rows of `prompt` tokens in steps of at most `prefill_step`, then decodes.
Timing run_once(models::Forward& forward, const BenchOptions& options, int batch) {
  std::vector<std::int32_t> prompt(static_cast<std::size_t>(options.prompt));
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<std::int32_t>((100 + i * 7 % 1000) % static_cast<std::size_t>(forward.traits().vocab));
  }
  std::vector<std::unique_ptr<sample::RowSampler>> samplers;
  std::vector<models::RowId> rows;
  for (int b = 0; b < batch; ++b) {
    samplers.push_back(std::make_unique<sample::RowSampler>(sample::Params{}));
    rows.push_back(forward.join({options.prompt, options.generate + 1, samplers.back().get()}));
  }
  Timing timing;
  const auto step = [&](const models::StepPlan& plan) {
    const auto begin = Clock::now();
    forward.launch(plan);
    timing.host_s += seconds_since(begin);
    while (forward.in_flight() > 0) forward.collect();
  };

  auto start = Clock::now();
  // Rows take their turns in order, several short ones sharing a step. A split forward takes the last token by itself.
  const bool split = forward.traits().split_forwards;
  const std::size_t body = prompt.size() - (split ? 1 : 0);
  models::StepPlan plan;
  int room = options.model.runtime.prefill_step;
  const auto flush = [&] {
    if (!plan.prompt.empty()) step(plan);
    plan.prompt.clear();
    room = options.model.runtime.prefill_step;
  };
  for (const models::RowId row : rows) {
    for (std::size_t at = 0; at < body;) {
      const std::size_t n = std::min(body - at, static_cast<std::size_t>(room));
      plan.prompt.push_back({row, std::span(prompt).subspan(at, n), !split && at + n == prompt.size()});
      at += n;
      room -= static_cast<int>(n);
      if (room == 0 || at < body) flush();
    }
  }
  flush();
  if (split) {
    for (const models::RowId row : rows) plan.prompt.push_back({row, std::span(prompt).subspan(body, 1), true});
    flush();
  }
  timing.prefill_s = seconds_since(start);

  plan.decode = rows;
  timing.host_s = 0;
  start = Clock::now();
  for (int i = 0; i < options.generate; ++i) step(plan);
  timing.decode_s = seconds_since(start);
  for (const models::RowId row : rows) forward.leave(row);
  return timing;
}

}  // namespace

int bench(BenchOptions options) {
  options.model.resolve();
  options.model.runtime.batch = std::ranges::max(options.batch);
  if (!options.model.runtime.fused) options.model.runtime.batch = std::max(2, options.model.runtime.batch);
  const auto checkpoint = models::open_checkpoint(options.model.model);
  const models::Runtime runtime = models::make_runtime(*checkpoint, options.model.runtime);
  const auto& batched = runtime.batched != nullptr ? runtime.batched : runtime.serial;

  fmt::print("{} | {} kernels, {}, {} thread{}\n", options.model.model, runtime.kernels, runtime.isa, runtime.threads,
             runtime.threads == 1 ? "" : "s");
  nlohmann::ordered_json report{
      {"model", options.model.model}, {"isa", runtime.isa}, {"threads", runtime.threads}, {"kernels", runtime.kernels}};
  std::vector<double> prefill_rates;
  nlohmann::ordered_json decode = nlohmann::ordered_json::array();
  int prefill_tokens = 0;
  for (const int batch : options.batch) {
    models::Forward& forward = batch == 1 ? *runtime.serial : *batched;
    std::vector<double> prefill, step, host;
    for (int r = 0; r < options.repeat; ++r) {
      const Timing timing = run_once(forward, options, batch);
      prefill.push_back(batch * options.prompt / timing.prefill_s);
      step.push_back(timing.decode_s / options.generate);
      host.push_back(timing.host_s / options.generate);
    }
    const double step_s = median(step);
    prefill_rates.push_back(median(prefill));
    prefill_tokens = batch * options.prompt;
    const double host_ms = median(host) * 1e3;
    decode.push_back({{"batch", batch}, {"tok_s", batch / step_s}, {"step_ms", step_s * 1e3}, {"host_ms", host_ms}});
    fmt::print("B={:<4} prefill {:8.1f} tok/s   decode {:8.1f} tok/s   step {:8.3f} ms, {:.3f} ms of it on the host\n",
               batch, prefill_rates.back(), batch / step_s, step_s * 1e3, host_ms);
    std::fflush(stdout);
  }
  // Prefill at the largest batch: the longest run, so the steadiest figure.
  report["prefill"] = {{"tokens", prefill_tokens}, {"tok_s", prefill_rates.back()}};
  report["decode"] = decode;
  if (runtime.weight_bytes > 0) {
    // One row reads every weight once a token, so memory sets the pace however little there is to compute.
    const double speed = memory_read_speed(runtime.threads), bytes = static_cast<double>(runtime.weight_bytes);
    report["memory"] = {{"read_gb_s", speed / 1e9}, {"weights_mb", bytes / 1e6}, {"ceiling_tok_s", speed / bytes}};
    fmt::print("memory: {:.1f} GB/s read by {} thread{}; {:.1f} MB of weights a step: at most {:.0f} steps a second\n",
               speed / 1e9, runtime.threads, runtime.threads == 1 ? "" : "s", bytes / 1e6, speed / bytes);
  }
  if (options.json) fmt::print("{}\n", report.dump());
  return 0;
}

}  // namespace galley::app
