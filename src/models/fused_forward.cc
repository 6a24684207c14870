#include "models/fused_forward.h"

#include <mlx/mlx.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ops/error.h"

namespace galley::models {

FusedForward::FusedForward(std::shared_ptr<ops::FusedOps> ops, std::shared_ptr<const Model> model,
                           FusedForwardOptions options)
    : ops_(std::move(ops)),
      model_(std::move(model)),
      kv_(model_->attention_layers(), options.kv_element, options.kv_budget_bytes) {
  traits_.split_forwards = false;
  traits_.look_ahead = false;  // tokens come from the host; the pool keeps every core busy within a step anyway
  traits_.invariant = ops_->invariant();
  traits_.vocab = model_->config().vocab;
}

FusedForward::~FusedForward() = default;

KvUsage FusedForward::kv() const {
  const kv::BlockPool& pool = kv_.pool();
  const auto bytes = [&](int blocks) { return static_cast<std::size_t>(blocks) * kv_.block_bytes(); };
  KvUsage usage;
  usage.budget_bytes = bytes(pool.total());
  usage.used_bytes = bytes(pool.total() - pool.free());
  usage.reserved_bytes = bytes(pool.total() - pool.unreserved());
  usage.blocks_total = pool.total();
  usage.blocks_free = pool.free();
  usage.block_tokens = pool.block_tokens();
  return usage;
}

std::size_t FusedForward::bytes_for(int tokens) const {
  return static_cast<std::size_t>(kv_.pool().blocks_for(tokens)) * kv_.block_bytes();
}

int FusedForward::max_row_tokens() const {
  const std::int64_t tokens = static_cast<std::int64_t>(kv_.pool().total()) * kv_.pool().block_tokens();
  return static_cast<int>(std::min<std::int64_t>(tokens, 1 << 30));
}

bool FusedForward::can_join(const RowSpec& spec) const {
  return kv_.pool().blocks_for(spec.prompt_tokens + spec.max_tokens) <= kv_.pool().unreserved();
}

RowId FusedForward::join(const RowSpec& spec) {
  if (!can_join(spec)) {
    throw Error(503, "the KV budget has no room for this row now; try again when running requests have finished",
                "kv_budget_full");
  }
  Row row;
  row.kv = kv::PagedRow(kv_.pool(), spec.prompt_tokens + spec.max_tokens);
  row.sampler = spec.sampler;
  const RowId id = next_row_++;
  rows_.emplace(id, std::move(row));
  return id;
}

void FusedForward::leave(RowId id) {
  Row& row = rows_.at(id);
  row.left = true;
  row.sampler = nullptr;
  if (flying_.empty()) drop_left_rows();  // else a step in flight may still write to its blocks
}

void FusedForward::drop_left_rows() {
  for (auto it = rows_.begin(); it != rows_.end();) {
    if (it->second.left) {
      it->second.kv.release(kv_.pool());
      it = rows_.erase(it);
    } else {
      ++it;
    }
  }
}

void FusedForward::add_tokens(ops::RaggedStep& step, Row& row, std::span<const std::int32_t> tokens) const {
  const std::int32_t index = step.rows.empty() ? 0 : step.rows.back() + 1;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    step.tokens.push_back(tokens[i]);
    step.rows.push_back(index);
    step.positions.push_back(row.kv.length() + static_cast<std::int32_t>(i));
  }
}

void FusedForward::fill_tables(ops::RaggedStep& step, std::span<const Row* const> rows) const {
  std::size_t stride = 1;
  for (const Row* row : rows) stride = std::max(stride, row->kv.table().size());
  step.table_stride = static_cast<int>(stride);
  step.tables.assign(stride * rows.size(), 0);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::ranges::copy(rows[r]->kv.table(), step.tables.begin() + static_cast<std::ptrdiff_t>(r * stride));
  }
}

void FusedForward::launch(const StepPlan& plan) {
  auto step = std::make_shared<ops::RaggedStep>();
  Flight flight;
  std::vector<const Row*> in_step;
  const auto add = [&](RowId id, std::span<const std::int32_t> tokens, bool emits) {
    Row& row = rows_.at(id);
    add_tokens(*step, row, tokens);
    row.kv.grow(kv_.pool(), static_cast<int>(tokens.size()));
    in_step.push_back(&row);
    if (!emits) return;
    step->emit.push_back(step->size() - 1);
    step->want_logits |= !row.sampler->argmax_only();
    flight.emitting.push_back(id);
  };
  for (const RowId id : plan.decode) add(id, std::span(&rows_.at(id).last_token, 1), true);
  for (const PromptPart& part : plan.prompt) add(part.row, part.tokens, part.emits);
  if (step->tokens.empty()) throw std::logic_error("an empty step was launched");
  fill_tables(*step, in_step);
  flight.logits = step->want_logits;

  ops_->begin(std::move(step));
  flight.result = ops_->finish(model_->forward(*ops_, kv_.layers()));
  flying_.push_back(std::move(flight));
}

std::vector<Emission> FusedForward::collect() {
  Flight flight = std::move(flying_.front());
  flying_.pop_front();
  flight.result.wait();
  std::vector<Emission> emissions(flight.emitting.size());
  const auto vocab = static_cast<std::size_t>(traits_.vocab);
  // Sampling touches one row's own state only, so the rows can be shared out over the kernel threads.
  ops_->parallel(static_cast<int>(emissions.size()), [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    Emission& emission = emissions[at];
    emission.row = flight.emitting[at];
    Row& row = rows_.at(emission.row);
    if (row.left) return;
    if (flight.logits) {
      emission.choice = row.sampler->choose(flight.result.logits().subspan(at * vocab, vocab));
    } else {
      const std::int32_t token = flight.result.tokens()[at];
      emission.choice.finite = token >= 0;
      emission.choice.token = token;
      row.sampler->note_argmax();
    }
    if (!emission.choice.finite) emission.fault = "the model's output is not finite";
    row.last_token = emission.choice.token;
  });
  std::erase_if(emissions, [&](const Emission& e) { return rows_.at(e.row).left; });
  if (flying_.empty()) drop_left_rows();
  return emissions;
}

std::vector<float> FusedForward::prompt_logits(std::span<const std::int32_t> tokens) {
  constexpr std::size_t kChunk = 64;
  sample::RowSampler sampler{sample::Params{}};
  const RowId id = join({static_cast<int>(tokens.size()), 1, &sampler});
  Row& row = rows_.at(id);
  const Row* rows[] = {&row};
  std::vector<float> all;
  all.reserve(tokens.size() * static_cast<std::size_t>(traits_.vocab));
  for (std::size_t at = 0; at < tokens.size(); at += kChunk) {
    const auto chunk = tokens.subspan(at, std::min(kChunk, tokens.size() - at));
    auto step = std::make_shared<ops::RaggedStep>();
    add_tokens(*step, row, chunk);
    row.kv.grow(kv_.pool(), static_cast<int>(chunk.size()));
    fill_tables(*step, rows);
    for (int i = 0; i < step->size(); ++i) step->emit.push_back(i);
    step->want_logits = true;
    ops_->begin(std::move(step));
    ops::FusedOps::Result result = ops_->finish(model_->forward(*ops_, kv_.layers()));
    result.wait();
    all.insert(all.end(), result.logits().begin(), result.logits().end());
  }
  leave(id);
  return all;
}

}  // namespace galley::models
