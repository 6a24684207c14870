#include "models/stock_forward.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

#include "kv/contiguous.h"
#include "ops/error.h"

namespace galley::models {
namespace {

namespace mx = mlx::core;

// One token through fresh caches shows what a token of KV weighs. Nothing is evaluated.
std::size_t measure_kv_bytes(ops::StockOps& ops, const Model& model) {
  std::vector<kv::KvCache> caches(model.attention_layers().size());
  std::vector<ops::LayerKv*> layers;
  for (auto& cache : caches) layers.push_back(&cache);
  ops.begin(mx::zeros({1, 1}, mx::int32));
  model.forward(ops, layers);
  std::size_t bytes = 0;
  for (const auto& cache : caches) {
    bytes += cache.nbytes() / static_cast<std::size_t>(cache.buffer()->capacity());
  }
  return bytes;
}

}  // namespace

std::shared_ptr<StockModel> load_stock_model(const Checkpoint& checkpoint, bool dense) {
  ops::StockNumerics numerics;
  numerics.float32 = !std::filesystem::is_directory(checkpoint.path());
  numerics.dense = dense;
  auto stock = std::make_shared<StockModel>();
  stock->ops = std::make_unique<ops::StockOps>(numerics);
  stock->model = load_model(checkpoint, *stock->ops);
  for (const auto& layer : stock->model->attention_layers()) {
    if (layer.window > 0) {
      throw ModelError(checkpoint.path().string() + ": sliding-window attention is not supported by contiguous caches");
    }
  }
  stock->kv_bytes_per_token = measure_kv_bytes(*stock->ops, *stock->model);
  return stock;
}

StockForward::StockForward(std::shared_ptr<StockModel> model, const StockOptions& options)
    : model_(std::move(model)), options_(options) {
  traits_.split_forwards = true;
  traits_.look_ahead = true;
  traits_.invariant = false;
  traits_.vocab = model_->model->config().vocab;
}

std::size_t StockForward::reserved_with(const RowSpec* another) const {
  std::size_t rows = 0;
  std::size_t total = 0;
  std::size_t longest = 0;
  const auto count = [&](const RowSpec& spec) {
    const std::size_t tokens = static_cast<std::size_t>(spec.prompt_tokens) + static_cast<std::size_t>(spec.max_tokens);
    ++rows;
    total += tokens + kv::growth_tokens;
    longest = std::max(longest, tokens + kv::growth_tokens);
  };
  for (const auto& [id, spec] : rows_) count(spec);
  if (another != nullptr) count(*another);
  return projected_bytes(rows, total, longest);
}

KvUsage StockForward::kv() const {
  KvUsage usage;
  usage.budget_bytes = options_.kv_budget;
  usage.used_bytes = used_bytes();
  usage.reserved_bytes = reserved_with(nullptr);
  usage.blocks_total = options_.max_rows;
  usage.blocks_free = options_.max_rows - static_cast<int>(rows_.size());
  return usage;
}

std::size_t StockForward::bytes_for(int tokens) const {
  return (static_cast<std::size_t>(tokens) + kv::growth_tokens) * model_->kv_bytes_per_token;
}

int StockForward::max_row_tokens() const {
  const std::size_t tokens = options_.kv_budget / model_->kv_bytes_per_token;
  return tokens <= kv::growth_tokens ? 0
                                     : static_cast<int>(std::min<std::size_t>(tokens - kv::growth_tokens, 1U << 30));
}

bool StockForward::can_join(const RowSpec& spec) const {
  return static_cast<int>(rows_.size()) < options_.max_rows && reserved_with(&spec) <= options_.kv_budget;
}

RowId StockForward::join(const RowSpec& spec) {
  if (!can_join(spec)) {
    throw Error(503, "no room for a row of " + std::to_string(spec.prompt_tokens) + " prompt and " +
                         std::to_string(spec.max_tokens) + " new tokens in the KV budget");
  }
  rows_.emplace(next_row_, spec);
  return next_row_++;
}

void StockForward::leave(RowId row) {
  if (rows_.erase(row) > 0) on_leave(row);
}

void StockForward::launch(const StepPlan& plan) {
  Step step;
  step.order = plan.decode;
  for (const PromptPart& part : plan.prompt) {
    if (part.emits) step.order.push_back(part.row);
  }
  step.sampled = run(plan);
  steps_.push_back(std::move(step));
}

std::vector<Emission> StockForward::collect() {
  if (steps_.empty()) throw Error(500, "collect() without a step in flight");
  Step step = std::move(steps_.front());
  steps_.pop_front();

  std::unordered_map<RowId, std::pair<const SampledRows*, std::size_t>> found;
  for (SampledRows& sampled : step.sampled) {
    mx::eval(sampled.tokens, sampled.picked);
    for (std::size_t i = 0; i < sampled.rows.size(); ++i) found[sampled.rows[i]] = {&sampled, i};
  }
  std::vector<Emission> emissions;
  for (const RowId row : step.order) {
    if (!joined(row)) continue;
    const auto [sampled, index] = found.at(row);
    RowOutcome outcome = outcome_of(*sampled, index);
    if (probe_) {
      mx::array logprobs = mx::contiguous(mx::take(sampled->logprobs, static_cast<int>(index), 0));
      logprobs.eval();
      probe_(row, logprobs);
    }
    emissions.push_back({row, std::move(outcome.choice), std::move(outcome.fault)});
  }
  return emissions;
}

mx::array StockForward::forward(mx::array tokens, std::vector<ops::LayerKv*> caches, int columns) {
  if (shape_probe_) shape_probe_(tokens.shape(0), tokens.shape(1), columns);
  model_->ops->begin(std::move(tokens));
  return ops::StockOps::array_of(model_->model->forward(*model_->ops, caches));
}

}  // namespace galley::models
