#include "models/runtime.h"

#include <fmt/format.h>
#include <mlx/mlx.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <utility>

#include "kv/prefix_store.h"
#include "models/fingerprint.h"
#include "models/fused_forward.h"
#include "models/kv_quant.h"
#include "models/stock_forward.h"
#include "ops/error.h"
#include "ops/fused/fused_ops.h"

namespace galley::models {

const std::vector<std::string> kFusedOpNames = {"embed",     "norm-linear", "attend",    "linear-residual",
                                                "gated-mlp", "moe",         "per-layer", "logits"};

int usable_processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::size_t kilobytes = 0;
  std::string unit;
  while (file >> key >> kilobytes >> unit) {
    if (key == "MemAvailable:") return kilobytes * 1024;
  }
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long size = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && size > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(size) / 2 : 1U << 30U;
}

namespace {

ops::FusedSwitches switches_of(const std::vector<std::string>& off) {
  ops::FusedSwitches s;
  bool* const flags[] = {&s.embed,     &s.norm_linear, &s.attend,    &s.linear_residual,
                         &s.gated_mlp, &s.moe,         &s.per_layer, &s.logits};
  for (const std::string& name : off) {
    const auto at = std::ranges::find(kFusedOpNames, name);
    if (at == kFusedOpNames.end()) throw Error(400, "no fused op is called " + name);
    *flags[at - kFusedOpNames.begin()] = false;
  }
  return s;
}

kernels::KvElement kv_element_of(const std::string& name) {
  if (name == "f16") return kernels::KvElement::f16;
  if (name == "bf16") return kernels::KvElement::bf16;
  if (name == "f32") return kernels::KvElement::f32;
  throw Error(400, "--kv-dtype " + name + " is not known; choose f16, bf16 or f32", "", "kv-dtype");
}

std::size_t budget_of(const RuntimeOptions& options, std::size_t full_rows_bytes) {
  if (options.kv_budget_bytes > 0) return options.kv_budget_bytes;
  return std::min(full_rows_bytes, available_memory() / 4);
}

int context_of(const Checkpoint& checkpoint, const RuntimeOptions& options) {
  const int most = checkpoint.config().context;
  if (options.context > most) {
    throw Error(400, fmt::format("--context {} is more than the model's {} tokens", options.context, most), "",
                "context");
  }
  return options.context > 0 ? options.context : most;
}

/// The store of blocks whose every bit these choices decide.
std::optional<kv::PrefixStore> open_prefix_store(const Checkpoint& checkpoint, const RuntimeOptions& options,
                                                 const ops::FusedOps& ops, std::span<const ops::KvFormat> formats,
                                                 const kv::Layout& layout, std::size_t budget) {
  if (options.prompt_cache_dir.empty()) return {};
  if (!ops.invariant()) {
    throw Error(400, "--prompt-cache-dir needs every fused op switched on: otherwise KV depends on who shares a batch",
                "", "prompt-cache-dir");
  }
  // Raise the number whenever a change to the kernels or to the blocks' layout changes a bit of them.
  constexpr int kNumerics = 1;
  std::string kv = options.kv_dtype;
  for (const ops::KvFormat& format : formats) kv += fmt::format(",{}/{}", format.bits, format.group);
  // Blocks of models with layers of one kind are still what they were before there were two.
  if (layout.window > 0) kv += fmt::format(" apart in windows of {}", layout.window);
  const std::size_t block = layout.text_bytes + layout.window_bytes;
  const std::string identity =
      fmt::format("model {} kv {} block {} tokens, {} bytes isa {} numerics {}", fingerprint(checkpoint.path()), kv,
                  layout.block_tokens, block, ops.isa().name, kNumerics);
  const std::size_t without_window = layout.window > 0 ? layout.text_bytes : 0;
  return kv::PrefixStore({options.prompt_cache_dir, identity, block, without_window, budget, options.warn});
}

struct Fused {
  std::shared_ptr<ops::FusedOps> ops;
  std::shared_ptr<FusedForward> forward;
  std::size_t budget = 0;
  std::vector<ops::KvFormat> kv_formats;
};

Fused make_fused(const Checkpoint& checkpoint, const RuntimeOptions& options, const KvQuant& kv_quant, int context) {
  const int threads = options.threads > 0 ? options.threads : usable_processors();
  auto ops =
      std::make_shared<ops::FusedOps>(kernels::select_isa(options.isa), threads, switches_of(options.switched_off));
  std::shared_ptr<const Model> model = load_model(checkpoint, *ops);
  checkpoint.release_pages();
  const kernels::KvElement element = kv_element_of(options.kv_dtype);
  const std::vector<ops::KvFormat> formats =
      kv_quant.off() ? std::vector<ops::KvFormat>{} : kv_quant.formats(model->attention_layers());
  const bool contiguous = options.kv_layout == "contiguous";
  if (contiguous && !options.prompt_cache_dir.empty()) {
    throw Error(400, "--prompt-cache-dir needs --kv paged: contiguous rows share nothing", "", "prompt-cache-dir");
  }
  constexpr int kUnit = kernels::kKeyGroup;
  const int block_tokens = contiguous ? (context + kUnit - 1) / kUnit * kUnit : kv::PagedKv::kBlockTokens;
  const kv::Layout layout(model->attention_layers(), element, block_tokens, formats, !contiguous);
  const std::size_t block = layout.block_bytes();
  const auto row_units =
      layout.row_units((context + block_tokens - 1) / block_tokens, layout.sliding(options.prefill_step));
  const std::size_t budget = budget_of(
      options, layout.unit_bytes * static_cast<std::size_t>(row_units) * static_cast<std::size_t>(options.batch));
  if (budget < block) {
    throw Error(400, fmt::format("--kv-budget: {} bytes don't hold one KV block of {} bytes", budget, block), "",
                "kv-budget");
  }
  FusedForwardOptions forward_options{budget,
                                      element,
                                      options.prompt_cache_bytes,
                                      contiguous ? block_tokens : 0,
                                      open_prefix_store(checkpoint, options, *ops, formats, layout, budget),
                                      formats,
                                      options.prefill_step};
  auto forward = std::make_shared<FusedForward>(ops, std::move(model), std::move(forward_options));
  return {std::move(ops), std::move(forward), budget, formats};
}

}  // namespace

Runtime make_runtime(const Checkpoint& checkpoint, const RuntimeOptions& options) {
  Runtime runtime;
  runtime.context = context_of(checkpoint, options);
  const KvQuant kv_quant = KvQuant::choose(options.kv_quant, checkpoint, options.batch);
  if (options.fused) {
    const Fused fused = make_fused(checkpoint, options, kv_quant, runtime.context);
    runtime.serial = fused.forward;
    if (options.batch > 1) runtime.batched = fused.forward;
    runtime.kernels = "fused";
    for (const std::string& name : options.switched_off) runtime.kernels += " without " + name;
    runtime.isa = fused.ops->isa().name;
    runtime.threads = fused.ops->threads();
    runtime.weight_bytes = fused.ops->weight_bytes();
    runtime.max_row_tokens = fused.forward->max_row_tokens();
    const KvUsage usage = fused.forward->kv();
    runtime.kv_plan = fmt::format("{} {}, {} blocks of {} tokens, {:.3g} GB budget",
                                  options.kv_layout == "contiguous" ? "contiguous" : "paged",
                                  describe(fused.kv_formats, options.kv_dtype), usage.blocks_total, usage.block_tokens,
                                  static_cast<double>(usage.budget_bytes) / 1e9);
    return runtime;
  }
  if (!options.switched_off.empty()) throw Error(400, "--fused-OP switches need --kernels fused");
  if (options.kv_layout == "paged") throw Error(400, "--kv paged needs --kernels fused", "", "kv");
  if (!options.prompt_cache_dir.empty()) {
    throw Error(400, "--prompt-cache-dir needs --kernels fused", "", "prompt-cache-dir");
  }
  const auto model = load_stock_model(checkpoint, options.dense, kv_quant);
  StockOptions stock;
  stock.prefill_step = options.prefill_step;
  const auto row_bytes = [&](bool batched) {
    return model->row_bytes(static_cast<std::size_t>(runtime.context), static_cast<std::size_t>(stock.prefill_step),
                            batched);
  };
  const std::size_t row = std::max(row_bytes(false), options.batch > 1 ? row_bytes(true) : 0);
  const std::size_t budget = budget_of(options, row * static_cast<std::size_t>(options.batch));
  stock.kv_budget = budget;
  const std::size_t cached = options.prompt_cache_bytes.value_or(budget);
  if (cached > 0) stock.prompt_cache = std::make_shared<kv::PromptCache>(cached);
  runtime.serial = make_serial_stock_forward(model, stock);
  stock.max_rows = options.batch;
  if (options.batch > 1) runtime.batched = make_batched_stock_forward(model, stock);
  runtime.max_row_tokens = runtime.serial->max_row_tokens();
  runtime.kernels = "stock";
  runtime.isa = "mlx";
  runtime.threads = usable_processors();
  runtime.kv_plan = fmt::format("contiguous {}, {:.3g} GB budget", describe(model->kv_formats, "plain"),
                                static_cast<double>(budget) / 1e9);
  return runtime;
}

std::vector<float> prompt_logits(const Checkpoint& checkpoint, const RuntimeOptions& options,
                                 const std::vector<std::int32_t>& tokens) {
  const int context = std::max(context_of(checkpoint, options), static_cast<int>(tokens.size()));
  const KvQuant kv_quant = KvQuant::choose(options.kv_quant, checkpoint, options.batch);
  if (options.fused) return make_fused(checkpoint, options, kv_quant, context + 1).forward->prompt_logits(tokens);

  namespace mx = mlx::core;
  constexpr std::size_t kChunk = 64;
  const auto stock = load_stock_model(checkpoint, options.dense, kv_quant);
  const auto caches = stock->row_caches();
  std::vector<ops::LayerKv*> layers;
  for (const auto& cache : caches) layers.push_back(cache.get());
  std::vector<float> all;
  for (std::size_t at = 0; at < tokens.size(); at += kChunk) {
    const auto n = std::min(kChunk, tokens.size() - at);
    stock->ops->begin(
        mx::array(tokens.begin() + static_cast<std::ptrdiff_t>(at), mx::Shape{1, static_cast<int>(n)}, mx::int32));
    mx::array logits = ops::StockOps::array_of(stock->model->forward(*stock->ops, layers));
    for (const auto& cache : caches) cache->settle();
    logits = mx::contiguous(mx::astype(logits, mx::float32));
    logits.eval();
    all.insert(all.end(), logits.data<float>(), logits.data<float>() + logits.size());
  }
  return all;
}

}  // namespace galley::models
