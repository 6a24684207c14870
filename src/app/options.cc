#include "app/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "ops/error.h"

namespace galley::app {

namespace {

const auto kOnOff = [] { return CLI::IsMember({"on", "off"}); };

/// A number from `least` on, or above it; CLI11's own say "in 0 to 1797693134862315708145…".
CLI::Validator number_above(double least, bool itself) {
  const std::string words = fmt::format("{} {}", itself ? "at least" : "above", least);
  return {[=](const std::string& text) {
            double number = 0;
            if (!CLI::detail::lexical_cast(text, number)) return fmt::format("{} is not a number", text);
            return number > least || (itself && number == least) ? std::string()
                                                                 : fmt::format("{} must be {}", text, words);
          },
          words};
}

}  // namespace

void add_model_options(CLI::App& command, ModelOptions& options, bool with_batch) {
  options.fused_switch.assign(models::kFusedOpNames.size(), "on");
  command.add_option("MODEL,--model", options.model, "a .gguf file, or a folder with config.json")->required();
  if (with_batch) {
    command
        .add_option("--batch,--slots,--decode-concurrency", options.runtime.batch,
                    "rows that share a forward pass; 1: one request after another on the serial lane")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
  }
  command
      .add_option("--context", options.runtime.context, "tokens a row may hold; default: what the model was made for")
      ->check(CLI::Range(1, 1 << 30));
  command.add_option("--kernels", options.kernels, "fused: our own kernels; stock: MLX's, bit-equal with mlx-lm")
      ->check(CLI::IsMember({"fused", "stock"}))
      ->capture_default_str();
  command.add_option("--perf-kernel", options.perf_kernel, "on: --kernels fused, off: --kernels stock")
      ->check(kOnOff());
  for (std::size_t i = 0; i < models::kFusedOpNames.size(); ++i) {
    command
        .add_option("--fused-" + models::kFusedOpNames[i], options.fused_switch[i],
                    "off: run this op as its stock expansion (slow; seeded requests then use the serial lane)")
        ->check(kOnOff())
        ->group("Fused ops");
  }
  command
      .add_option("--kv-budget", options.kv_budget_gb,
                  "GB (10^9 bytes) for KV; default: what --batch full contexts need, at most a quarter of free memory")
      ->check(number_above(0, false));
  command
      .add_option("--prompt-cache", options.prompt_cache_gb,
                  "GB of the KV budget that finished requests may keep for prompts that begin alike; 0: none; "
                  "default: all that no row needs")
      ->check(number_above(0, true));
  command
      .add_option(
          "--kv", options.runtime.kv_layout,
          "layout of KV; paged: blocks of 32 tokens, shared where prompts begin alike (fused); contiguous: a row's "
          "in one piece as long as the context; default: paged with fused kernels, contiguous with stock")
      ->check(CLI::IsMember({"paged", "contiguous"}));
  command
      .add_option("--kv-quant", options.runtime.kv_quant,
                  "KV in 8 or 4 bits, as the model's kv_config.json says (config), or off; default: with --batch 1 "
                  "config where the model has that file, else off")
      ->check(CLI::IsMember({"off", "8", "4", "config"}));
  command.add_option("--kv-dtype", options.runtime.kv_dtype, "type of KV elements (fused)")
      ->check(CLI::IsMember({"f16", "bf16", "f32"}))
      ->capture_default_str();
  command.add_option("--threads", options.runtime.threads, "threads of the kernels; default: all processors")
      ->check(CLI::Range(1, 1024));
  command
      .add_option("--isa", options.runtime.isa,
                  "instruction set of the kernels: best, amx, avx3dl, avx3, avx2, scalar …")
      ->capture_default_str();
}

void add_sampling_options(CLI::App& command, SamplingOptions& options) {
  command
      .add_option(
          "--temperature,--temp", options.temperature,
          "0: greedy; default of serve: 1, or what the model's makers recommend; of generate: 0, or 1 with a seed")
      ->check(CLI::Range(0.0, 2.0));
  command.add_option("--top-p", options.top_p, "1: off")->check(CLI::Range(0.0, 1.0));
  command.add_option("--top-k", options.top_k, "0: off")->check(CLI::Range(0, 1 << 30));
  command.add_option("--min-p", options.min_p, "0: off")->check(CLI::Range(0.0, 1.0));
}

void ModelOptions::resolve() {
  if (!perf_kernel.empty()) kernels = perf_kernel == "on" ? "fused" : "stock";
  runtime.fused = kernels == "fused";
  runtime.prefill_step = prefill_step > 0 ? prefill_step : runtime.fused ? 256 : 2048;
  runtime.switched_off.clear();
  for (std::size_t i = 0; i < fused_switch.size(); ++i) {
    if (fused_switch[i] == "off") runtime.switched_off.push_back(models::kFusedOpNames[i]);
  }
  runtime.kv_budget_bytes = static_cast<std::size_t>(kv_budget_gb * 1e9);
  if (prompt_cache_gb >= 0) runtime.prompt_cache_bytes = static_cast<std::size_t>(prompt_cache_gb * 1e9);
}

}  // namespace galley::app
