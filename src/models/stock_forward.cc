#include "models/stock_forward.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

#include "ops/error.h"

namespace galley::models {
namespace {

namespace mx = mlx::core;

// One token through fresh caches shows what a token of KV weighs in each layer. Nothing is evaluated.
std::vector<StockModel::TokenBytes> measure_kv_bytes(const StockModel& stock) {
  const auto caches = stock.row_caches();
  std::vector<ops::LayerKv*> layers;
  for (const auto& cache : caches) layers.push_back(cache.get());
  stock.ops->begin(mx::zeros({1, 1}, mx::int32));
  stock.model->forward(*stock.ops, layers);
  std::vector<StockModel::TokenBytes> bytes;
  for (const auto& cache : caches) {
    const auto columns = static_cast<std::size_t>(cache->buffer()->capacity());
    const std::size_t plain = cache->nbytes() / columns;
    cache->settle();
    bytes.push_back({plain, cache->nbytes() / columns});
  }
  return bytes;
}

}  // namespace

std::shared_ptr<StockModel> load_stock_model(const Checkpoint& checkpoint, bool dense, const KvQuant& kv_quant) {
  ops::StockNumerics numerics;
  numerics.float32 = !std::filesystem::is_directory(checkpoint.path());
  numerics.dense = dense;
  auto stock = std::make_shared<StockModel>();
  stock->ops = std::make_unique<ops::StockOps>(numerics);
  stock->model = load_model(checkpoint, *stock->ops);
  stock->kv_formats = kv_quant.formats(stock->model->attention_layers());
  stock->kv_bytes = measure_kv_bytes(*stock);
  return stock;
}

std::vector<std::unique_ptr<kv::RowCache>> StockModel::row_caches() const {
  std::vector<std::unique_ptr<kv::RowCache>> caches;
  for (const ops::AttentionSpec& layer : model->attention_layers()) {
    caches.push_back(kv::make_row_cache(layer, kv_formats[caches.size()]));
  }
  return caches;
}

std::vector<std::unique_ptr<kv::BatchCache>> StockModel::batch_caches(int rows) const {
  std::vector<std::unique_ptr<kv::BatchCache>> caches;
  for (const ops::AttentionSpec& layer : model->attention_layers()) {
    caches.push_back(kv::make_batch_cache(layer, rows, kv_formats[caches.size()]));
  }
  return caches;
}

std::vector<std::unique_ptr<kv::BatchCache>> StockModel::merged(
    const std::vector<std::vector<std::unique_ptr<kv::RowCache>>>& rows) const {
  std::vector<std::unique_ptr<kv::BatchCache>> caches;
  for (const ops::AttentionSpec& layer : model->attention_layers()) {
    std::vector<const kv::RowCache*> side_by_side;
    for (const auto& row : rows) side_by_side.push_back(row.at(caches.size()).get());
    caches.push_back(kv::merge_row_caches(layer, side_by_side, kv_formats[caches.size()]));
  }
  return caches;
}

std::size_t StockModel::row_bytes(std::size_t tokens, std::size_t piece, bool batched) const {
  const auto layers = model->attention_layers();
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::size_t columns = kv::most_columns(layers[i], tokens, piece);
    if (batched) {
      bytes += columns * (layers[i].window > 0 ? kv_bytes[i].plain : kv_bytes[i].stored);
    } else {  // the first piece is quantized when all of it has been written
      const std::size_t first = kv::most_columns(layers[i], std::min(tokens, piece), piece);
      bytes += std::max(columns * kv_bytes[i].stored, first * kv_bytes[i].plain);
    }
  }
  return bytes;
}

StockForward::StockForward(std::shared_ptr<StockModel> model, const StockOptions& options, bool batched)
    : model_(std::move(model)), options_(options), batched_(batched) {
  traits_.split_forwards = true;
  traits_.look_ahead = true;
  traits_.invariant = false;
  traits_.vocab = model_->model->config().vocab;
}

std::size_t StockForward::reserved_with(const RowSpec* another) const {
  std::vector<std::size_t> tokens;
  const auto count = [&](const RowSpec& spec) {
    tokens.push_back(static_cast<std::size_t>(spec.prompt_tokens) + static_cast<std::size_t>(spec.max_tokens));
  };
  for (const auto& [id, row] : rows_) count(row.spec);
  if (another != nullptr) count(*another);
  return projected_bytes(tokens);
}

KvUsage StockForward::kv() const {
  KvUsage usage;
  usage.budget_bytes = options_.kv_budget;
  usage.used_bytes = used_bytes();
  if (options_.prompt_cache) usage.cached_bytes = options_.prompt_cache->nbytes();
  usage.reserved_bytes = reserved_with(nullptr);
  usage.blocks_total = options_.max_rows;
  usage.blocks_free = options_.max_rows - static_cast<int>(rows_.size());
  return usage;
}

std::size_t StockForward::bytes_for(int tokens) const { return row_bytes(static_cast<std::size_t>(tokens)); }

int StockForward::max_row_tokens() const {
  int fits = 0;
  for (int step = 1 << 29; step > 0; step /= 2) {
    if (bytes_for(fits + step) <= options_.kv_budget) fits += step;
  }
  return fits;
}

bool StockForward::can_join(const RowSpec& spec) const {
  return static_cast<int>(rows_.size()) < options_.max_rows && reserved_with(&spec) <= options_.kv_budget;
}

RowId StockForward::join(const RowSpec& spec) {
  if (!can_join(spec)) {
    throw Error(503, "no room for a row of " + std::to_string(spec.prompt_tokens) + " prompt and " +
                         std::to_string(spec.max_tokens) + " new tokens in the KV budget");
  }
  Row row;
  row.spec = spec;
  const bool seeded = spec.sampler != nullptr && spec.sampler->params().seed && !spec.sampler->params().greedy();
  if (options_.prompt_cache && !seeded) {
    if (auto hit = options_.prompt_cache->take(kind(), spec.prompt)) {
      row.taken = std::move(hit->layers);
      row.reused = row.fed = hit->tokens;
      row.tokens.assign(spec.prompt.begin(), spec.prompt.begin() + static_cast<std::ptrdiff_t>(hit->tokens));
    }
  }
  rows_.emplace(next_row_, std::move(row));
  make_room();
  return next_row_++;
}

Reuse StockForward::reuse(RowId row) { return {std::exchange(rows_.at(row).reused, 0), false}; }

kv::PromptCache::Layers StockForward::first_caches(RowId row) {
  kv::PromptCache::Layers taken = std::move(rows_.at(row).taken);
  return taken.empty() ? model_->row_caches() : std::move(taken);
}

// Quantized, the lanes' caches differ: a row alone quantizes its rings too.
int StockForward::kind() const {
  const bool quantized =
      std::ranges::any_of(model_->kv_formats, [](ops::KvFormat format) { return format.quantized(); });
  return quantized && batched_ ? 1 : 0;
}

void StockForward::leave(RowId id) {
  const auto found = rows_.find(id);
  if (found == rows_.end()) return;
  if (options_.prompt_cache) leave_behind(id, found->second);
  rows_.erase(found);
  on_leave(id);
  make_room();
}

void StockForward::leave_behind(RowId id, Row& row) {
  if (row.said == 0 || row.spoiled || row.spec.prompt.empty()) return;
  if (row.fed + 1 < row.tokens.size() || row.fed > row.tokens.size()) return;
  kv::PromptCache::Layers layers = give_up(id, row.fed < row.tokens.size());
  if (layers.empty()) return;
  // So that it holds on to no batch that it was a part of.
  std::vector<mx::array> written;
  for (const auto& layer : layers) {
    for (mx::array& array : layer->arrays()) written.push_back(std::move(array));
  }
  mx::async_eval(std::move(written));
  options_.prompt_cache->put(kind(), std::move(row.tokens), std::move(layers));
}

void StockForward::make_room() {
  if (!options_.prompt_cache) return;
  options_.prompt_cache->shrink_to(options_.kv_budget - std::min(options_.kv_budget, reserved_with(nullptr)));
}

bool StockForward::recover() {
  if (options_.prompt_cache) options_.prompt_cache->clear();  // the step that failed may be what some of it waits for
  rows_.clear();
  steps_.clear();
  on_recover();
  return true;
}

void StockForward::launch(const StepPlan& plan) {
  Step step;
  step.order = plan.decode;
  for (const RowId row : plan.decode) ++rows_.at(row).fed;
  for (const PromptPart& part : plan.prompt) {
    Row& row = rows_.at(part.row);
    row.tokens.insert(row.tokens.end(), part.tokens.begin(), part.tokens.end());
    row.fed += part.tokens.size();
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
    Row& live = rows_.at(row);
    live.tokens.push_back(outcome.choice.token);
    ++live.said;
    live.spoiled = live.spoiled || outcome.fault || !outcome.choice.finite;
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
