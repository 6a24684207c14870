// generate_step of mlx-lm: each row's own caches, B = 1.
#include <algorithm>
#include <memory>
#include <utility>

#include "models/stock_forward.h"
#include "ops/error.h"

namespace galley::models {
namespace {

namespace mx = mlx::core;

class SerialStockForward final : public StockForward {
 public:
  SerialStockForward(std::shared_ptr<StockModel> model, const StockOptions& options)
      : StockForward(std::move(model), options, /*batched=*/false) {}

 private:
  struct Row {
    std::vector<std::unique_ptr<kv::RowCache>> layers;
    std::optional<mx::array> next;  ///< uint32 [1]: the token its last step picked
  };

  std::vector<SampledRows> run(const StepPlan& plan) override {
    std::vector<SampledRows> sampled;
    for (const RowId id : plan.decode) {
      Row& row = state(id);
      if (!row.next) throw Error(500, "a row decodes before its prompt has been processed");
      sampled.push_back(step(id, row, mx::expand_dims(*row.next, 0)));
    }
    for (const PromptPart& part : plan.prompt) {
      Row& row = state(part.row);
      const auto last = part.tokens.size() - (part.emits ? 1 : 0);
      if (last > 0) prefill(row, part.tokens.first(last));
      if (part.emits) sampled.push_back(step(part.row, row, as_batch(part.tokens.subspan(last))));
    }
    return sampled;
  }

  void on_leave(RowId id) override { states_.erase(id); }

  // generate_step, too, feeds the last token that it yields.
  kv::PromptCache::Layers give_up(RowId id, bool unfed) override {
    const auto found = states_.find(id);
    if (found == states_.end() || !found->second.next) return {};
    if (unfed) advance(found->second, mx::expand_dims(*found->second.next, 0));
    return std::move(found->second.layers);
  }

  void on_recover() override { states_.clear(); }

  [[nodiscard]] std::size_t used_bytes() const override {
    std::size_t bytes = 0;
    for (const auto& [id, row] : states_) {
      for (const auto& layer : row.layers) bytes += layer->nbytes();
    }
    return bytes;
  }

  [[nodiscard]] std::size_t projected_bytes(const std::vector<std::size_t>& tokens) const override {
    std::size_t bytes = 0;
    for (const std::size_t each : tokens) bytes += row_bytes(each);
    return bytes;
  }

  Row& state(RowId id) {
    Row& row = states_[id];
    if (row.layers.empty()) row.layers = first_caches(id);
    return row;
  }

  static mx::array as_batch(std::span<const std::int32_t> tokens) {
    return mx::array(tokens.data(), {1, static_cast<int>(tokens.size())}, mx::int32);
  }

  // Logits [1, L, vocab].
  mx::array advance(Row& row, mx::array tokens) {
    std::vector<ops::LayerKv*> caches;
    for (auto& layer : row.layers) caches.push_back(layer.get());
    mx::array logits = forward(std::move(tokens), std::move(caches), row.layers.front()->size());
    for (auto& layer : row.layers) layer->settle();
    return logits;
  }

  void prefill(Row& row, std::span<const std::int32_t> tokens) {
    advance(row, as_batch(tokens));
    std::vector<mx::array> written;
    for (const auto& layer : row.layers) {
      for (mx::array& array : layer->arrays()) written.push_back(std::move(array));
    }
    mx::eval(std::move(written));
    mx::clear_cache();
  }

  SampledRows step(RowId id, Row& row, mx::array tokens) {
    const mx::array logits = mx::take(advance(row, std::move(tokens)), 0, 1);
    // Over all axes, as generate_step does; the batched path reduces over the last one.
    SampledRows picked =
        sample_rows({id}, {sampler(id)}, mx::subtract(logits, mx::logsumexp(logits, /*keepdims=*/true)));
    mx::async_eval(picked.tokens, picked.picked);
    row.next = picked.tokens;
    return picked;
  }

  std::unordered_map<RowId, Row> states_;
};

}  // namespace

std::unique_ptr<StockForward> make_serial_stock_forward(std::shared_ptr<StockModel> model,
                                                        const StockOptions& options) {
  return std::make_unique<SerialStockForward>(std::move(model), options);
}

}  // namespace galley::models
