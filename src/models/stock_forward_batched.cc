// PromptProcessingBatch and GenerationBatch of mlx-lm.
#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "models/stock_forward.h"
#include "ops/error.h"

namespace galley::models {
namespace {

namespace mx = mlx::core;

// Rows that run together, and their caches.
struct RowBatch {
  std::vector<RowId> rows;
  std::vector<std::unique_ptr<kv::BatchCache>> layers;
  std::optional<mx::array> next;  ///< uint32 [B]: the tokens the last step picked (generation only)

  [[nodiscard]] bool empty() const { return rows.empty(); }

  [[nodiscard]] std::size_t nbytes() const {
    std::size_t bytes = 0;
    for (const auto& layer : layers) bytes += layer->nbytes();
    return bytes;
  }

  void filter(const std::vector<int>& keep) {
    if (keep.empty()) {
      *this = {};
      return;
    }
    std::vector<RowId> kept;
    for (const int index : keep) kept.push_back(rows[static_cast<std::size_t>(index)]);
    rows = std::move(kept);
    for (auto& layer : layers) layer->filter(keep);
    if (next) next = mx::take(*next, mx::array(keep.data(), {static_cast<int>(keep.size())}, mx::int32), 0);
  }

  /// Takes the rows at `indices` (ascending) out, into a batch of their own. Copies and filters both, as mlx-lm does,
  /// also when nothing stays behind.
  RowBatch split(const std::vector<int>& indices) {
    RowBatch taken{rows, {}, next};
    for (const auto& layer : layers) taken.layers.push_back(layer->clone());
    std::vector<int> left;
    for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
      if (!std::ranges::binary_search(indices, i)) left.push_back(i);
    }
    filter(left);
    taken.filter(indices);
    return taken;
  }

  void extend(RowBatch other) {
    if (empty()) {
      *this = std::move(other);
      return;
    }
    if (other.empty()) return;
    rows.insert(rows.end(), other.rows.begin(), other.rows.end());
    for (std::size_t i = 0; i < layers.size(); ++i) layers[i]->extend(*other.layers[i]);
    if (next && other.next) next = mx::concatenate({*next, *other.next});
  }

  [[nodiscard]] std::vector<ops::LayerKv*> caches() {
    std::vector<ops::LayerKv*> pointers;
    for (auto& layer : layers) pointers.push_back(layer.get());
    return pointers;
  }

  void evaluate_caches() const {
    std::vector<mx::array> written;
    for (const auto& layer : layers) {
      for (mx::array& array : layer->arrays()) written.push_back(std::move(array));
    }
    mx::eval(std::move(written));
    mx::clear_cache();
  }
};

class BatchedStockForward final : public StockForward {
 public:
  BatchedStockForward(std::shared_ptr<StockModel> model, const StockOptions& options)
      : StockForward(std::move(model), options, /*batched=*/true) {}

 private:
  std::vector<SampledRows> run(const StepPlan& plan) override {
    drop_departed();
    std::vector<SampledRows> sampled;
    if (!plan.decode.empty()) sampled.push_back(decode(plan.decode));
    admit(plan.prompt);

    std::unordered_map<RowId, const PromptPart*> parts;
    for (const PromptPart& part : plan.prompt) parts.emplace(part.row, &part);
    std::vector<int> emitting;
    for (int i = 0; i < static_cast<int>(prompts_.rows.size()); ++i) {
      const auto part = parts.find(prompts_.rows[static_cast<std::size_t>(i)]);
      if (part != parts.end() && part->second->emits) emitting.push_back(i);
    }
    if (!emitting.empty()) sampled.push_back(begin_generation(prompts_.split(emitting), parts));
    if (!prompts_.empty()) {
      std::vector<std::span<const std::int32_t>> pieces;
      for (const RowId row : prompts_.rows) {
        const auto part = parts.find(row);
        pieces.push_back(part == parts.end() ? std::span<const std::int32_t>{} : part->second->tokens);
      }
      prefill(prompts_, pieces);
    }
    return sampled;
  }

  // Rows ride on until their end has been seen, so the last token has always been fed.
  kv::PromptCache::Layers give_up(RowId id, bool unfed) override {
    const auto found = std::ranges::find(generating_.rows, id);
    if (unfed || found == generating_.rows.end()) return {};
    kv::PromptCache::Layers layers;
    for (const auto& layer : generating_.layers) {
      layers.push_back(layer->row_cache(static_cast<int>(found - generating_.rows.begin())));
    }
    return layers;
  }

  void on_leave(RowId) override {
    departed_ = true;
    const auto gone = [this](RowId row) { return !joined(row); };
    if (std::ranges::all_of(prompts_.rows, gone)) prompts_ = {};
    if (std::ranges::all_of(generating_.rows, gone)) generating_ = {};
  }

  void on_recover() override {
    prompts_ = {};
    generating_ = {};
    departed_ = false;
  }

  [[nodiscard]] std::size_t used_bytes() const override { return prompts_.nbytes() + generating_.nbytes(); }

  [[nodiscard]] std::size_t projected_bytes(const std::vector<std::size_t>& tokens) const override {
    return tokens.empty() ? 0 : tokens.size() * row_bytes(*std::ranges::max_element(tokens));
  }

  // Rows that left since the last launch rode that launch; now they go, all at once.
  void drop_departed() {
    if (!departed_) return;
    departed_ = false;
    for (RowBatch* batch : {&prompts_, &generating_}) {
      std::vector<int> keep;
      for (int i = 0; i < static_cast<int>(batch->rows.size()); ++i) {
        if (joined(batch->rows[static_cast<std::size_t>(i)])) keep.push_back(i);
      }
      if (keep.size() < batch->rows.size()) batch->filter(keep);
    }
  }

  // GenerationBatch._step over the rows of the plan.
  SampledRows decode(const std::vector<RowId>& rows) {
    const std::unordered_set<RowId> wanted(rows.begin(), rows.end());
    std::vector<int> idle;
    for (int i = 0; i < static_cast<int>(generating_.rows.size()); ++i) {
      if (!wanted.contains(generating_.rows[static_cast<std::size_t>(i)])) idle.push_back(i);
    }
    if (generating_.rows.size() - idle.size() != wanted.size()) {
      throw Error(500, "a row decodes before its prompt has been processed");
    }
    RowBatch resting;
    if (!idle.empty()) resting = generating_.split(idle);
    SampledRows sampled = step(generating_, mx::expand_dims(*generating_.next, 1));
    generating_.extend(std::move(resting));
    return sampled;
  }

  // New rows enter P together, with empty caches or those they took.
  void admit(const std::vector<PromptPart>& parts) {
    RowBatch fresh;
    for (const PromptPart& part : parts) {
      if (!joined(part.row)) throw Error(500, "a prompt part of a row that has not joined");
      if (std::ranges::find(prompts_.rows, part.row) == prompts_.rows.end()) fresh.rows.push_back(part.row);
    }
    if (fresh.empty()) return;
    if (std::ranges::any_of(fresh.rows, [this](RowId row) { return took(row); })) {
      std::vector<kv::PromptCache::Layers> own;
      for (const RowId row : fresh.rows) own.push_back(first_caches(row));
      fresh.layers = model().merged(own);
    } else {
      fresh.layers = model().batch_caches(static_cast<int>(fresh.rows.size()));
    }
    prompts_.extend(std::move(fresh));
  }

  // PromptProcessingBatch.generate: the last tokens at L = 1, then the rows join G.
  SampledRows begin_generation(RowBatch starting, const std::unordered_map<RowId, const PromptPart*>& parts) {
    std::vector<std::span<const std::int32_t>> before;
    std::vector<std::int32_t> last;
    bool longer = false;
    for (const RowId row : starting.rows) {
      const auto tokens = parts.at(row)->tokens;
      before.push_back(tokens.first(tokens.size() - 1));
      last.push_back(tokens.back());
      longer = longer || tokens.size() > 1;
    }
    if (longer) prefill(starting, before);
    SampledRows sampled = step(starting, mx::array(last.data(), {static_cast<int>(last.size()), 1}, mx::int32));
    generating_.extend(std::move(starting));
    return sampled;
  }

  // PromptProcessingBatch.prompt: pieces side by side, right-padded with token 0.
  void prefill(RowBatch& batch, const std::vector<std::span<const std::int32_t>>& pieces) {
    std::size_t longest = 0;
    for (const auto& piece : pieces) longest = std::max(longest, piece.size());
    if (longest == 0) return;
    std::vector<std::int32_t> padded(pieces.size() * longest, 0);
    std::vector<int> lengths;
    std::vector<int> padding;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      std::ranges::copy(pieces[i], padded.begin() + static_cast<std::ptrdiff_t>(i * longest));
      lengths.push_back(static_cast<int>(pieces[i].size()));
      padding.push_back(static_cast<int>(longest - pieces[i].size()));
    }
    for (auto& layer : batch.layers) layer->prepare(lengths, padding);
    forward(mx::array(padded.data(), {static_cast<int>(pieces.size()), static_cast<int>(longest)}, mx::int32),
            batch.caches(), batch.layers.front()->size());
    batch.evaluate_caches();
    if (std::ranges::all_of(padding, [](int n) { return n == 0; })) return;
    for (auto& layer : batch.layers) layer->finalize();
    batch.evaluate_caches();
  }

  // One token a row, [B, 1].
  SampledRows step(RowBatch& batch, mx::array tokens) {
    const mx::array logits = mx::take(forward(std::move(tokens), batch.caches(), batch.layers.front()->size()), 0, 1);
    std::vector<sample::RowSampler*> samplers;
    for (const RowId row : batch.rows) samplers.push_back(sampler(row));
    SampledRows picked = sample_rows(batch.rows, std::move(samplers),
                                     mx::subtract(logits, mx::logsumexp(logits, -1, /*keepdims=*/true)));
    mx::async_eval(picked.tokens, picked.picked);
    batch.next = picked.tokens;
    return picked;
  }

  RowBatch prompts_;     ///< P
  RowBatch generating_;  ///< G
  bool departed_ = false;
};

}  // namespace

std::unique_ptr<StockForward> make_batched_stock_forward(std::shared_ptr<StockModel> model,
                                                         const StockOptions& options) {
  return std::make_unique<BatchedStockForward>(std::move(model), options);
}

}  // namespace galley::models
