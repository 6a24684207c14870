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
      contiguous_(options.contiguous_tokens > 0),
      sharing_(ops_->invariant() && !contiguous_),
      kv_(kv::Layout(model_->attention_layers(), options.kv_element,
                     contiguous_ ? options.contiguous_tokens : kv::PagedKv::kBlockTokens, options.kv_formats,
                     !contiguous_),
          options.kv_budget_bytes),
      sliding_(kv_.layout().sliding(options.prefill_step)),
      index_(kv_.pool()) {
  if (options.prompt_cache_bytes) {
    const std::size_t units = *options.prompt_cache_bytes / kv_.layout().unit_bytes;
    kv_.pool().limit_cache(static_cast<int>(std::min(units, static_cast<std::size_t>(kv_.pool().total()))));
  }
  if (options.prefix_store && sharing_) {
    archive_ = std::make_unique<kv::PrefixArchive>(kv_, index_, std::move(*options.prefix_store));
  }
  traits_.split_forwards = false;
  // Measured: planning and recording a step take 1 to 3 % of its time (`galley bench` prints it). That is all that
  // launching the next step early could hide, and a row that ends would still ride along in it.
  traits_.look_ahead = false;
  traits_.invariant = ops_->invariant();
  traits_.vocab = model_->config().vocab;
}

FusedForward::~FusedForward() = default;

KvUsage FusedForward::kv() const {
  const kv::BlockPool& pool = kv_.pool();
  KvUsage usage;
  usage.budget_bytes = bytes(pool.total());
  usage.used_bytes = bytes(pool.held());
  int unused = 0;  // only the last block of a row may have room, and nobody shares that
  for (const auto& [id, row] : rows_) {
    unused += static_cast<int>(row.kv.table().size()) * pool.block_tokens() - row.kv.length();
  }
  usage.unused_bytes =
      static_cast<std::size_t>(unused) * kv_.layout().block_bytes() / static_cast<std::size_t>(pool.block_tokens());
  usage.cached_bytes = bytes(pool.cached());
  usage.reserved_bytes = bytes(pool.total() - pool.unreserved());
  usage.window_used_bytes = bytes(pool.windows_held());
  usage.window_cached_bytes = bytes(pool.windows_cached());
  usage.blocks_total = pool.total() / pool.block_units();
  usage.blocks_free = (pool.free() + pool.cached()) / pool.block_units();
  usage.blocks_cached = pool.cached() / pool.block_units();
  usage.block_tokens = pool.block_tokens();
  return usage;
}

std::size_t FusedForward::bytes(int units) const { return static_cast<std::size_t>(units) * kv_.layout().unit_bytes; }

std::size_t FusedForward::bytes_for(int tokens) const {
  return static_cast<std::size_t>(kv_.layout().row_units(kv_.pool().blocks_for(tokens), sliding_)) *
         kv_.layout().unit_bytes;
}

int FusedForward::max_row_tokens() const {
  const std::int64_t held = kv_.layout().row_blocks(kv_.pool().total(), sliding_);
  const std::int64_t blocks = contiguous_ ? std::min<std::int64_t>(1, held) : held;
  const std::int64_t tokens = blocks * kv_.pool().block_tokens();
  return static_cast<int>(std::min<std::int64_t>(tokens, 1 << 30));
}

bool FusedForward::can_join(const RowSpec& spec) const {
  const kv::BlockPool& pool = kv_.pool();
  int needed = kv::PagedRow::needs(pool, sliding_, reserved_tokens(spec), shared_blocks(spec));
  for (const auto& [id, row] : rows_) {
    // A block for the growth of each row that is there keeps a join from being undone by the very next steps.
    needed += std::max(row.kv.growth(pool, 0), shares(spec) ? pool.block_units() : 0);
  }
  return needed <= pool.unreserved();
}

int FusedForward::reserved_tokens(const RowSpec& spec) const {
  return spec.prompt_tokens + (shares(spec) ? 1 : spec.max_tokens);
}

bool FusedForward::fits(const StepPlan& plan) const {
  const kv::BlockPool& pool = kv_.pool();
  int needed = 0;
  for (const auto& [id, row] : rows_) {
    if (!row.left) needed += row.kv.growth(pool, 0);
  }
  const auto grow = [&](RowId id, int n) {
    const kv::PagedRow& row = rows_.at(id).kv;
    needed += row.growth(pool, n) - row.growth(pool, 0);
  };
  for (const RowId id : plan.decode) grow(id, 1);
  for (const PromptPart& part : plan.prompt) grow(part.row, static_cast<int>(part.tokens.size()));
  return needed <= pool.unreserved();
}

RowId FusedForward::join(const RowSpec& spec) {
  if (!can_join(spec)) {
    throw Error(503, "the KV budget has no room for this row now; try again when running requests have finished",
                "kv_budget_full");
  }
  Row row;
  const std::vector<std::int32_t> shared = shared_blocks(spec);
  row.kv = kv::PagedRow(kv_.pool(), sliding_, reserved_tokens(spec), shared);
  row.sampler = spec.sampler;
  if (sharing_) row.prompt = spec.prompt;
  row.known = shared.size();
  const auto reused = spec.prompt.first(shared.empty() ? 0 : static_cast<std::size_t>(row.kv.length()));
  row.tokens.assign(reused.begin(), reused.end());
  const RowId id = next_row_++;
  elect_leader(id, row);
  rows_.emplace(id, std::move(row));
  return id;
}

/// The blocks a new row begins with: never the one of the prompt's last token, whose logits are wanted.
std::vector<std::int32_t> FusedForward::shared_blocks(const RowSpec& spec) const {
  if (!shares(spec)) return {};
  auto found = index_.find(kv::PrefixIndex::kRoot, spec.prompt.first(spec.prompt.size() - 1));
  found.resize(kv::PagedRow::usable(kv_.pool(), sliding_, 0, found));
  return found;
}

Reuse FusedForward::reuse(RowId id) {
  Row& row = rows_.at(id);
  if (row.prompt.empty()) return {};
  const auto length = static_cast<std::size_t>(row.kv.length());
  const auto block_tokens = static_cast<std::size_t>(kv_.pool().block_tokens());
  if (row.known * block_tokens == length && length < row.prompt.size()) {
    const std::int32_t parent = row.known == 0 ? kv::PrefixIndex::kRoot : row.kv.table().back();
    const auto rest = row.prompt.subspan(length, row.prompt.size() - 1 - length);
    std::vector<std::int32_t> found = index_.find(parent, rest);
    found.resize(row.kv.usable(kv_.pool(), found));
    if (!row.kv.adopt(kv_.pool(), found)) found.clear();
    row.known += found.size();
    const auto reused = rest.first(found.size() * block_tokens);
    row.tokens.insert(row.tokens.end(), reused.begin(), reused.end());
    if (archive_ && flying_.empty() && row.asked_at != row.kv.length()) load_stored(row);
  }
  Reuse reuse;
  reuse.wait = awaits_leader(id, row);
  if (!reuse.wait && flying_.empty()) copy_part(id, row);
  reuse.tokens = row.tokens.size() - row.told;
  row.told = row.tokens.size();
  return reuse;
}

/// Copies on write: where another text, known or being computed, goes a part of a block along with the prompt, the row
/// begins its own block with a copy of that part.
void FusedForward::copy_part(RowId id, Row& row) {
  const auto length = static_cast<std::size_t>(row.kv.length());
  const auto block_tokens = static_cast<std::size_t>(kv_.pool().block_tokens());
  if (row.known * block_tokens != length || length + 1 >= row.prompt.size()) return;
  const std::int32_t parent = row.known == 0 ? kv::PrefixIndex::kRoot : row.kv.table().back();
  const auto rest = row.prompt.subspan(length, std::min(block_tokens, row.prompt.size() - 1 - length));
  kv::PrefixIndex::Part part = index_.find_part(parent, rest).value_or(kv::PrefixIndex::Part{});
  for (const auto& [other_id, other] : rows_) {
    if (other_id == id || other.left || other.tokens.size() <= length) continue;
    // Blocks of one text are the same for all rows, so the one before tells whether all before is the same.
    if (row.known > 0 && other.kv.table()[row.known - 1] != parent) continue;
    const auto theirs = std::span(other.tokens).subspan(length);
    const auto common = static_cast<std::size_t>(std::ranges::mismatch(rest, theirs).in1 - rest.begin());
    if (common > part.tokens) part = {other.kv.table()[row.known], common};
  }
  kv::BlockPool& pool = kv_.pool();
  const bool windows = pool.window_units() > 0;
  if (part.tokens == 0 || (windows && !pool.has_window(part.block))) return;
  if (row.kv.growth(pool, static_cast<int>(part.tokens)) > 0) return;  // others may count on the rest
  const int cached = (pool.references(part.block) == 0 ? pool.text_units() : 0) +
                     (windows && pool.window_references(part.block) == 0 ? pool.window_units() : 0);
  if (cached > pool.unreserved()) return;
  pool.retain(part.block);  // or the growth could evict it
  if (windows) pool.retain_window(part.block);
  row.kv.grow(pool, static_cast<int>(part.tokens));
  kv_.copy(part.block, row.kv.table().back());
  if (windows) pool.release_window(part.block);
  pool.release(part.block);
  row.tokens.insert(row.tokens.end(), rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(part.tokens));
}

/// Goes on with what an earlier process has computed; the index knows nothing more.
void FusedForward::load_stored(Row& row) {
  const std::int32_t parent = row.known == 0 ? kv::PrefixIndex::kRoot : row.kv.table().back();
  const auto length = static_cast<std::size_t>(row.kv.length());
  const auto rest = row.prompt.subspan(length, row.prompt.size() - 1 - length);
  const std::size_t blocks = archive_->load(row.kv, parent, rest);
  const auto loaded = rest.first(blocks * static_cast<std::size_t>(kv_.pool().block_tokens()));
  row.tokens.insert(row.tokens.end(), loaded.begin(), loaded.end());
  row.known += blocks;
  row.asked_at = row.kv.length();
}

bool FusedForward::tidy() { return archive_ && flying_.empty() && archive_->save_next(); }

bool FusedForward::awaits_leader(RowId id, Row& row) {
  while (row.leader != kNobody) {
    const auto leader = rows_.find(row.leader);
    if (leader != rows_.end() && !leader->second.left) {
      return static_cast<std::size_t>(row.kv.length()) < row.lead &&
             static_cast<std::size_t>(leader->second.kv.length()) < row.lead;
    }
    elect_leader(id, row);  // it left before it was done
  }
  return false;
}

/// The earlier row whose unfinished prompt has most in common with this one's, the earliest of equals.
void FusedForward::elect_leader(RowId id, Row& row) const {
  row.leader = kNobody;
  row.lead = static_cast<std::size_t>(row.kv.length());
  if (row.prompt.empty()) return;
  for (const auto& [other_id, other] : rows_) {
    if (other_id >= id) break;
    if (other.left || static_cast<std::size_t>(other.kv.length()) >= other.prompt.size()) continue;
    const auto mine = row.prompt.first(row.prompt.size() - 1);
    const auto differs = std::ranges::mismatch(mine, other.prompt).in1;
    const auto common = static_cast<std::size_t>(differs - mine.begin());
    if (common <= row.lead) continue;
    row.leader = other_id;
    row.lead = common;
  }
}

void FusedForward::remember(Row& row) {
  if (row.prompt.empty()) return;
  const auto block_tokens = static_cast<std::size_t>(kv_.pool().block_tokens());
  for (; (row.known + 1) * block_tokens <= row.tokens.size(); ++row.known) {
    const std::int32_t parent = row.known == 0 ? kv::PrefixIndex::kRoot : row.kv.table()[row.known - 1];
    const std::int32_t own = row.kv.table()[row.known];
    const auto tokens = std::span(row.tokens).subspan(row.known * block_tokens, block_tokens);
    const std::int32_t known = index_.insert(parent, tokens, own);
    if (known != own) {
      row.kv.exchange(kv_.pool(), row.known, known);  // somebody was faster
    } else if (archive_) {
      archive_->note(own);
    }
  }
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

/// A table for each unit of a block: those of text blocks, then those of window blocks.
void FusedForward::fill_tables(ops::RaggedStep& step, std::span<const Row* const> rows) const {
  const kv::BlockPool& pool = kv_.pool();
  std::size_t stride = 1;
  for (const Row* row : rows) stride = std::max(stride, row->kv.table().size());
  step.table_stride = static_cast<int>(stride);
  step.row_count = static_cast<int>(rows.size());
  const std::size_t size = stride * rows.size();
  step.tables.assign(size * static_cast<std::size_t>(pool.block_units()), 0);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::span<const std::int32_t> blocks = rows[r]->kv.table();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::size_t at = r * stride + i;
      const auto write = [&](std::int32_t block) {
        for (std::int32_t unit = block; unit != kv::BlockPool::kNone; unit = pool.next_unit(unit), at += size) {
          step.tables[at] = unit;
        }
      };
      write(blocks[i]);
      if (pool.window_units() > 0 && i >= rows[r]->kv.first_window()) write(pool.window(blocks[i]));
    }
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
    row.tokens.insert(row.tokens.end(), tokens.begin(), tokens.end());
    in_step.push_back(&row);
    flight.rows.push_back(id);
    if (!emits) return;
    step->emit.push_back(step->size() - 1);
    step->want_logits |= !row.sampler->argmax_only();
    flight.emitting.push_back(id);
  };
  for (const RowId id : plan.decode) add(id, std::span(&rows_.at(id).last_token, 1), true);
  for (const PromptPart& part : plan.prompt) {
    add(part.row, part.tokens, part.emits);
    rows_.at(part.row).told += part.tokens.size();
  }
  if (step->tokens.empty()) throw std::logic_error("an empty step was launched");
  fill_tables(*step, in_step);
  flight.step = std::move(step);

  try {
    start(flight);
  } catch (const std::exception&) {
    ops_->recover();
    flight.failed = true;  // collect() finds out whose fault it was
  }
  flying_.push_back(std::move(flight));
}

void FusedForward::start(Flight& flight) {
  ops_->begin(flight.step);
  flight.result = ops_->finish(model_->forward(*ops_, kv_.layers()));
}

std::vector<Emission> FusedForward::collect() {
  Flight flight = std::move(flying_.front());
  flying_.pop_front();
  bool lost = flight.failed;
  if (!lost) {
    try {
      flight.result.wait();
    } catch (const std::exception&) {
      ops_->recover();
      lost = true;
    }
  }
  std::vector<Emission> emissions = lost ? rerun(flight) : sample(flight);
  std::erase_if(emissions, [&](const Emission& e) { return rows_.at(e.row).left; });
  for (const RowId id : flight.rows) {
    const bool failed = std::ranges::any_of(emissions, [id](const Emission& e) { return e.row == id && e.fault; });
    if (Row& row = rows_.at(id); !row.left && !failed) remember(row);
  }
  if (flying_.empty()) {
    drop_left_rows();
    for (auto& [id, row] : rows_) row.kv.slide(kv_.pool());
  }
  return emissions;
}

std::vector<Emission> FusedForward::sample(Flight& flight) {
  std::vector<Emission> emissions(flight.emitting.size());
  const auto vocab = static_cast<std::size_t>(traits_.vocab);
  // Sampling touches one row's own state only, so the rows can be shared out over the kernel threads.
  ops_->parallel(static_cast<int>(emissions.size()), [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    Emission& emission = emissions[at];
    emission.row = flight.emitting[at];
    Row& row = rows_.at(emission.row);
    if (row.left) return;
    try {
      if (flight.step->want_logits) {
        emission.choice = row.sampler->choose(flight.result.logits().subspan(at * vocab, vocab));
      } else {
        const std::int32_t token = flight.result.tokens()[at];
        emission.choice.finite = token >= 0;
        emission.choice.token = token;
        row.sampler->note_argmax();
      }
      if (!emission.choice.finite) emission.fault = "the model's output is not finite";
    } catch (const std::exception& exception) {
      emission.fault = exception.what();
    }
    row.last_token = emission.choice.token;
  });
  return emissions;
}

// A step that threw is lost for all its rows, but nothing they hold is: what it wrote to the KV, if anything, are the
// very bits that the same tokens write again (invariance). So each row repeats its part alone, and only those that
// throw again fail.
std::vector<Emission> FusedForward::rerun(const Flight& lost) {
  std::vector<Emission> emissions;
  const ops::RaggedStep& all = *lost.step;
  for (std::size_t r = 0, begin = 0; r < lost.rows.size(); ++r) {
    const auto index = static_cast<std::int32_t>(r);
    std::size_t end = begin;
    while (end < all.rows.size() && all.rows[end] == index) ++end;
    auto step = std::make_shared<ops::RaggedStep>();
    const auto copy = [&](const std::vector<std::int32_t>& from, std::vector<std::int32_t>& to, std::size_t a,
                          std::size_t b) { to.assign(from.data() + a, from.data() + b); };
    copy(all.tokens, step->tokens, begin, end);
    copy(all.positions, step->positions, begin, end);
    const auto stride = static_cast<std::size_t>(all.table_stride);
    const std::size_t size = stride * static_cast<std::size_t>(all.row_count);
    for (std::size_t table = 0; table < all.tables.size(); table += size) {
      const std::int32_t* from = all.tables.data() + table + r * stride;
      step->tables.insert(step->tables.end(), from, from + stride);
    }
    step->rows.assign(step->tokens.size(), 0);
    step->row_count = 1;
    step->table_stride = all.table_stride;
    step->want_logits = all.want_logits;
    const RowId id = lost.rows[r];
    const bool emits = std::ranges::find(lost.emitting, id) != lost.emitting.end();
    if (emits) step->emit.push_back(step->size() - 1);
    begin = end;
    if (rows_.at(id).left) continue;

    Flight alone;
    alone.step = std::move(step);
    alone.rows = {id};
    if (emits) alone.emitting = {id};
    try {
      start(alone);
      alone.result.wait();
    } catch (const std::exception& exception) {
      ops_->recover();
      Emission failed;
      failed.row = id;
      failed.fault = exception.what();
      emissions.push_back(std::move(failed));
      continue;
    }
    for (Emission& emission : sample(alone)) emissions.push_back(std::move(emission));
  }
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
    row.kv.slide(kv_.pool());
  }
  leave(id);
  return all;
}

}  // namespace galley::models
