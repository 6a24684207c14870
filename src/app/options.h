// The command line, as plain values.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/runtime.h"
#include "sample/sampler.h"

namespace CLI {
class App;
}

namespace galley::app {

/// Which model, and how it runs. Shared by every subcommand.
struct ModelOptions {
  std::string model;
  std::string kernels = "fused";
  std::string perf_kernel;                ///< alias: on = fused, off = stock
  std::vector<std::string> fused_switch;  ///< "on" or "off" for each of models::kFusedOpNames
  double kv_budget_gb = 0;
  double prompt_cache_gb = -1;  ///< negative: not given
  int prefill_step = 0;         ///< 0: 256 fused, 2048 stock
  models::RuntimeOptions runtime;

  /// The values above, checked and put into `runtime`. Throws Error naming the flag.
  void resolve();
};

/// Sampling on the command line; absent values are the model's or the built-in ones.
struct SamplingOptions {
  std::optional<double> temperature, top_p, min_p;
  std::optional<int> top_k;
};

struct ServeOptions {
  ModelOptions model;
  SamplingOptions sampling;
  std::string host = "127.0.0.1";
  int port = 8080;
  int prompt_concurrency = 8;
  double prefill_stretch = 2.5;
  int max_tokens = 2048;
  int max_queue = 256;
  double drain_timeout_s = 30;
  std::string log_level = "info";
  bool strict_model = false;
  std::vector<std::string> allowed_origins = {"local"};
};

struct GenerateOptions {
  ModelOptions model;
  SamplingOptions sampling;
  std::string prompt;
  std::string system;
  int max_tokens = 256;
  std::optional<std::uint64_t> seed;
  bool raw = false;
};

struct BenchOptions {
  ModelOptions model;
  std::vector<int> batch = {1, 4, 16};
  int prompt = 128;
  int generate = 64;
  int repeat = 3;
  bool json = false;
};

struct LogitsOptions {
  ModelOptions model;
  std::string tokens;
  std::string out;
};

void add_model_options(CLI::App& command, ModelOptions& options, bool with_batch);
void add_sampling_options(CLI::App& command, SamplingOptions& options);

int serve(ServeOptions options);
int generate(GenerateOptions options);
int bench(BenchOptions options);
int doctor(ModelOptions options);
int logits(LogitsOptions options);

}  // namespace galley::app
