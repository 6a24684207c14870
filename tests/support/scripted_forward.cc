#include "support/scripted_forward.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <unordered_set>
#include <utility>

namespace galley::test {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("contract of Forward broken: ") + what);
}

constexpr float kNever = -1e9F;

void only(std::span<float> logits, std::int32_t token) {
  std::ranges::fill(logits, kNever);
  logits[static_cast<std::size_t>(token)] = 10.0F;
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

}  // namespace

Script say(std::string text) {
  return [bytes = bytes_of(text)](std::span<const std::int32_t> history, int prompt, std::span<float> logits) {
    const std::size_t said = history.size() - static_cast<std::size_t>(prompt);
    only(logits, said < bytes.size() ? bytes[said] : kEos);
  };
}

Script echo() {
  return [](std::span<const std::int32_t> history, int prompt, std::span<float> logits) {
    const std::size_t said = history.size() - static_cast<std::size_t>(prompt);
    only(logits, said < static_cast<std::size_t>(prompt) ? history[said] : kEos);
  };
}

Script babble(int mean_length) {
  return [mean_length](std::span<const std::int32_t> history, int, std::span<float> logits) {
    std::uint64_t hash = 0;
    for (const std::int32_t token : history) hash = mix(hash ^ static_cast<std::uint64_t>(token));
    std::ranges::fill(logits, kNever);
    const std::string_view letters = "abcdefghijklmnopqrstuvwxyz ";
    for (const char letter : letters) {
      const std::uint64_t word = mix(hash ^ static_cast<std::uint64_t>(letter));
      logits[static_cast<std::size_t>(letter)] = static_cast<float>(word >> 40U) * 0x1.0p-22F;  // 0 to 4
    }
    if (mean_length > 0 && mix(hash) % static_cast<std::uint64_t>(mean_length) == 0) only(logits, kEos);
  };
}

void StepGate::close() {
  const std::lock_guard lock(mutex_);
  open_ = false;
  allowed_ = 0;
}

void StepGate::allow(int n) {
  const std::lock_guard lock(mutex_);
  allowed_ += n;
  changed_.notify_all();
}

void StepGate::open() {
  const std::lock_guard lock(mutex_);
  open_ = true;
  changed_.notify_all();
}

void StepGate::pass() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return open_ || allowed_ > 0; });
  if (!open_) --allowed_;
}

models::KvUsage ScriptedForward::kv() const {
  models::KvUsage usage;
  const auto bytes = static_cast<std::size_t>(options_.bytes_per_token);
  std::size_t held = 0;
  for (const auto& [id, row] : rows_) held += row.history.size();
  usage.budget_bytes = static_cast<std::size_t>(options_.budget_tokens) * bytes;
  usage.used_bytes = held * bytes;
  usage.reserved_bytes = static_cast<std::size_t>(reserved_) * bytes;
  usage.blocks_total = options_.budget_tokens;
  usage.blocks_free = options_.budget_tokens - reserved_;
  usage.block_tokens = 1;
  return usage;
}

std::size_t ScriptedForward::bytes_for(int tokens) const {
  return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(options_.bytes_per_token);
}

bool ScriptedForward::can_join(const models::RowSpec& spec) const {
  return reserved_ + spec.prompt_tokens + spec.max_tokens <= options_.budget_tokens;
}

models::RowId ScriptedForward::join(const models::RowSpec& spec) {
  if (!can_join(spec)) throw Error(503, "no KV memory is free for the row", "no_memory");
  require(spec.prompt_tokens > 0 && spec.max_tokens > 0, "a row needs a prompt and room for a token");
  require(spec.sampler != nullptr, "a row needs a sampler");
  const models::RowId id = next_id_++;
  rows_[id].spec = spec;
  reserved_ += spec.prompt_tokens + spec.max_tokens;
  ++joins_;
  peak_rows_ = std::max(peak_rows_, rows());
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  require(rows() <= options_.max_rows, "more rows than the batch has");
  return id;
}

void ScriptedForward::leave(models::RowId id) {
  const Row& gone = row(id);
  reserved_ -= gone.spec.prompt_tokens + gone.spec.max_tokens;
  rows_.erase(id);
}

ScriptedForward::Row& ScriptedForward::row(models::RowId id) {
  const auto found = rows_.find(id);
  require(found != rows_.end(), "the row has not joined or has left");
  return found->second;
}

void ScriptedForward::check_plan(const models::StepPlan& plan) const {
  const bool split = options_.traits.split_forwards;
  require(!plan.decode.empty() || !plan.prompt.empty(), "an empty step");
  require(in_flight() <= 2, "more than two steps in flight before a launch");
  require(!split || plan.decode.empty() || plan.prompt.empty(), "prompt parts beside decode rows (split)");
  std::unordered_set<models::RowId> seen;
  for (const models::RowId id : plan.decode) require(seen.insert(id).second, "a row twice in a plan");
  std::size_t prompt_tokens = 0;
  bool pieces_began = false;
  for (const models::PromptPart& part : plan.prompt) {
    require(seen.insert(part.row).second, "a row twice in a plan");
    require(!part.tokens.empty(), "an empty prompt part");
    require(!split || !part.emits || part.tokens.size() == 1, "an emitting part of more than one token (split)");
    require(!split || !part.emits || !pieces_began, "an emitting part after other parts (split)");
    pieces_began = pieces_began || !part.emits;
    prompt_tokens = split ? std::max(prompt_tokens, part.tokens.size()) : prompt_tokens + part.tokens.size();
  }
  const auto limit = static_cast<std::size_t>(options_.max_prompt_tokens);
  require(limit == 0 || prompt_tokens <= limit, "more prompt tokens than a step may take");
}

void ScriptedForward::sample(models::RowId id, Step& step) {
  Row& r = row(id);
  models::Emission emission;
  emission.row = id;
  if (options_.fault) emission.fault = options_.fault(r.history, r.spec.prompt_tokens);
  if (!emission.fault) {
    std::vector<float> logits(static_cast<std::size_t>(options_.traits.vocab));
    options_.script(r.history, r.spec.prompt_tokens, logits);
    emission.choice = r.spec.sampler->choose(logits);
  }
  r.failed = emission.fault.has_value();
  r.history.push_back(emission.choice.token);  // fed by the row's next step
  ++r.generated;
  step.emissions.push_back(std::move(emission));
  step.samplers.push_back(r.spec.sampler);
}

void ScriptedForward::launch(const models::StepPlan& plan) {
  if (options_.on_launch) options_.on_launch(plan, launches_);
  ++launches_;
  check_plan(plan);
  Step step;
  for (const models::RowId id : plan.decode) {
    const Row& r = row(id);
    require(r.generated > 0, "a row decodes before its prompt has emitted");
    // KV of the token fed: at most prompt + max_tokens, also for a row that rides on after its end.
    require(static_cast<int>(r.history.size()) <= r.spec.prompt_tokens + r.spec.max_tokens, "a row outgrows its KV");
    sample(id, step);
  }
  for (const models::PromptPart& part : plan.prompt) {
    Row& r = row(part.row);
    require(r.generated == 0, "a prompt part of a row that decodes");
    r.history.insert(r.history.end(), part.tokens.begin(), part.tokens.end());
    require(static_cast<int>(r.history.size()) <= r.spec.prompt_tokens, "more prompt than announced");
    require(part.emits == (static_cast<int>(r.history.size()) == r.spec.prompt_tokens),
            "the prompt's last part, and no other, emits");
    if (part.emits) sample(part.row, step);
  }
  if (options_.step_time.count() > 0) std::this_thread::sleep_for(options_.step_time);
  steps_.push_back(std::move(step));
}

bool ScriptedForward::recover() {
  if (!options_.recovers) return false;
  rows_.clear();
  steps_.clear();
  reserved_ = 0;
  return true;
}

std::vector<models::Emission> ScriptedForward::collect() {
  require(!steps_.empty(), "nothing in flight to collect");
  Step step = std::move(steps_.front());
  steps_.pop_front();
  for (const sample::RowSampler* sampler : step.samplers) {
    require(sampler->draws() > 0, "a sampler was lost while a step was in flight");
  }
  const std::size_t all = step.emissions.size();
  std::erase_if(step.emissions, [this](const models::Emission& emission) { return !rows_.contains(emission.row); });
  dropped_ += static_cast<int>(all - step.emissions.size());
  return std::move(step.emissions);
}

void RecordingSink::push(serve::TokenEvent event) noexcept {
  const std::lock_guard lock(mutex_);
  if (event.finish || event.error) ++last_events_;
  events_.push_back(std::move(event));
  changed_.notify_all();
}

bool RecordingSink::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return last_events_ > 0; });
}

bool RecordingSink::wait_events(std::size_t n, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return last_events_ > 0 || events_.size() >= n; });
}

std::string RecordingSink::text() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& event : events_) text += event.text;
  return text;
}

std::vector<serve::TokenEvent> RecordingSink::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::optional<serve::FinishReason> RecordingSink::finish() const {
  const std::lock_guard lock(mutex_);
  return events_.empty() ? std::nullopt : events_.back().finish;
}

std::optional<Error> RecordingSink::error() const {
  const std::lock_guard lock(mutex_);
  return events_.empty() ? std::nullopt : events_.back().error;
}

serve::Usage RecordingSink::usage() const {
  const std::lock_guard lock(mutex_);
  return events_.empty() ? serve::Usage{} : events_.back().usage;
}

int RecordingSink::last_events() const {
  const std::lock_guard lock(mutex_);
  return last_events_;
}

std::unique_ptr<serve::Engine> scripted_engine(const serve::EngineOptions& engine, const ScriptedOptions& options,
                                               std::shared_ptr<ScriptedForward>* forward) {
  auto scripted = std::make_shared<ScriptedForward>(options);
  if (forward != nullptr) *forward = scripted;
  return serve::start_engine(engine, byte_tokenizer(), {kEos, kTurnEnd}, [scripted] {
    return serve::Lanes{scripted, scripted};
  });
}

}  // namespace galley::test
