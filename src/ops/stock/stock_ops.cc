#include "ops/stock/stock_ops.h"

#include <mlx/compile.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "ops/error.h"

namespace galley::ops {
namespace {

namespace mx = mlx::core;

struct ArrayValue final : Value::Impl {
  explicit ArrayValue(mx::array a) : array(std::move(a)) {}
  mx::array array;
};

Value wrap(mx::array a) { return Value(std::make_shared<ArrayValue>(std::move(a))); }

const StockLinear& stock(const LinearPtr& linear) { return static_cast<const StockLinear&>(*linear); }
const StockNorm& stock(const NormPtr& norm) { return static_cast<const StockNorm&>(*norm); }

// mlx_lm.models.activations.swiglu
std::vector<mx::array> swiglu(const std::vector<mx::array>& inputs) {
  const mx::array& gate = inputs[0];
  return {mx::multiply(mx::multiply(gate, mx::sigmoid(gate)), inputs[1])};
}

// nn.gelu_approx
std::vector<mx::array> gelu(const std::vector<mx::array>& inputs) {
  const mx::array& x = inputs[0];
  const auto number = [&](double value) { return mx::array(static_cast<float>(value), x.dtype()); };
  const mx::array cubic = mx::multiply(number(0.044715), mx::power(x, mx::array(3)));
  const mx::array inner = mx::multiply(number(std::sqrt(2 / std::numbers::pi)), mx::add(x, cubic));
  return {mx::multiply(mx::multiply(number(0.5), x), mx::add(number(1.0), mx::tanh(inner)))};
}

// geglu of gemma4_text
std::vector<mx::array> geglu(const std::vector<mx::array>& inputs) {
  return {mx::multiply(gelu({inputs[0]}).front(), inputs[1])};
}

// clip_residual of gemma3_text, for float16
std::vector<mx::array> clipped_sum(const std::vector<mx::array>& inputs) {
  const mx::array bound(65504.0F);
  const mx::array sum = mx::add(mx::astype(inputs[0], mx::float32), mx::astype(inputs[1], mx::float32));
  return {mx::astype(mx::clip(sum, mx::negative(bound), bound), mx::float16)};
}

mx::array times(const mx::array& x, const FactorPtr& factor) {
  return factor == nullptr ? x : mx::multiply(x, static_cast<const StockFactor&>(*factor).number);
}

// [B, L, heads * D] -> [B, heads, L, D], each head normed unless `norm` is null
mx::array to_heads(const mx::array& x, int heads, const NormPtr& norm = nullptr) {
  mx::array y = mx::reshape(x, {x.shape(0), x.shape(1), heads, -1});
  if (norm != nullptr) y = stock(norm).apply(y);
  return mx::transpose(y, {0, 2, 1, 3});
}

mx::array rotate(const mx::array& x, const Rope& rope, const RopeOffset& offset) {
  std::optional<float> base = rope.base;
  std::optional<mx::array> frequencies;
  if (!rope.frequencies.empty()) {
    base.reset();
    frequencies = mx::array(rope.frequencies.data(), {static_cast<int>(rope.frequencies.size())});
  }
  return std::visit(
      [&](const auto& position) {
        return mx::fast::rope(x, rope.dims, rope.traditional, base, rope.scale, position, frequencies);
      },
      offset);
}

}  // namespace

StockOps::StockOps(StockNumerics numerics)
    : numerics_(numerics),
      swiglu_(mx::compile(swiglu, /*shapeless=*/true)),
      gelu_(mx::compile(gelu, /*shapeless=*/true)),
      geglu_(mx::compile(geglu, /*shapeless=*/true)),
      clipped_sum_(mx::compile(clipped_sum, /*shapeless=*/true)),
      tokens_(mx::array(0)) {}

void StockOps::begin(mx::array tokens) {
  tokens_ = std::move(tokens);
  masks_.clear();
  offsets_.clear();
}

const mx::array& StockOps::array_of(const Value& value) { return static_cast<const ArrayValue&>(*value.impl()).array; }

std::vector<LinearPtr> StockOps::load_linears(const std::vector<const MatrixSource*>& group,
                                              const std::vector<const VectorSource*>& biases) {
  std::vector<LinearPtr> linears;
  for (std::size_t i = 0; i < group.size(); ++i) {
    const VectorSource* bias = biases.empty() ? nullptr : biases[i];
    linears.push_back(std::make_shared<StockLinear>(*group[i], bias, numerics_));
  }
  return linears;
}

GatedMlp StockOps::load_mlp(const MatrixSource& gate, const MatrixSource& up, const MatrixSource& down,
                            Activation activation) {
  const auto load = [&](const MatrixSource& source) {
    return std::make_shared<StockLinear>(source, nullptr, numerics_);
  };
  return {load(gate), load(up), load(down), activation};
}

LinearPtr StockOps::load_embedding(const MatrixSource& table) {
  return std::make_shared<StockLinear>(table, nullptr, numerics_);
}

NormPtr StockOps::load_norm(const VectorSource& weight, float eps) {
  return std::make_shared<StockNorm>(weight, eps, numerics_);
}

NormPtr StockOps::plain_norm(int /*size*/, float eps) { return std::make_shared<StockNorm>(eps); }

FactorPtr StockOps::load_factor(const VectorSource& one_number) {
  return std::make_shared<StockFactor>(one_number, numerics_);
}

Value StockOps::value_of(mx::array a) { return wrap(std::move(a)); }

mx::array StockOps::saturating_sum(const mx::array& a, const mx::array& b) const {
  return a.dtype() == mx::float16 ? clipped_sum_({a, b}).front() : mx::add(a, b);
}

Value StockOps::embed(const LinearPtr& table, float scale) {
  mx::array rows = stock(table).look_up(tokens_);
  if (scale != 1.0F) rows = mx::multiply(rows, mx::array(scale, rows.dtype()));
  return wrap(std::move(rows));
}

std::vector<Value> StockOps::norm_linear(const Value& x, const NormPtr& norm, const std::vector<LinearPtr>& group) {
  const mx::array normed = stock(norm).apply(array_of(x));
  std::vector<Value> out;
  for (const LinearPtr& linear : group) out.push_back(wrap(stock(linear).apply(normed)));
  return out;
}

Value StockOps::attend(const Value& q, const Value& k, const Value& v, const AttentionSpec& spec, LayerKv& kv) {
  if (spec.softcap != 0.0F) throw Error(500, "attention with a soft-cap has no stock expansion");
  auto& cache = static_cast<StockLayerKv&>(kv);
  mx::array queries = to_heads(array_of(q), spec.heads, spec.q_norm);
  mx::array keys = to_heads(array_of(k), spec.kv_heads, spec.k_norm);
  const mx::array values = to_heads(array_of(v), spec.kv_heads, spec.v_norm);
  const int batch = queries.shape(0);
  const int length = queries.shape(2);

  auto mask = masks_.find(spec.window);
  if (mask == masks_.end()) mask = masks_.emplace(spec.window, cache.mask(length, spec.window)).first;

  const RopeOffset offset = cache.offset();
  offsets_.insert_or_assign(&kv, offset);
  queries = rotate(queries, spec.rope, offset);
  keys = rotate(keys, spec.rope, offset);
  const mx::array mixed = cache.write_and_attend(queries, keys, values, spec.scale, mask->second);
  return wrap(mx::reshape(mx::transpose(mixed, {0, 2, 1, 3}), {batch, length, -1}));
}

Value StockOps::attend_shared(const Value& q, const AttentionSpec& spec, LayerKv& kv) {
  const auto offset = offsets_.find(&kv);
  const auto mask = masks_.find(spec.window);
  if (offset == offsets_.end() || mask == masks_.end()) {
    throw Error(500, "attention to shared keys and values before they were written");
  }
  const mx::array queries = rotate(to_heads(array_of(q), spec.heads, spec.q_norm), spec.rope, offset->second);
  const mx::array mixed = static_cast<const StockLayerKv&>(kv).attend_again(queries, spec.scale, mask->second);
  return wrap(mx::reshape(mx::transpose(mixed, {0, 2, 1, 3}), {queries.shape(0), queries.shape(2), -1}));
}

Value StockOps::linear_residual(const Value& x, const LinearPtr& linear, const Value& residual) {
  return wrap(mx::add(array_of(residual), stock(linear).apply(array_of(x))));
}

Value StockOps::linear_norm_residual(const Value& x, const LinearPtr& linear, const NormPtr& norm,
                                     const Value& residual) {
  return wrap(saturating_sum(array_of(residual), stock(norm).apply(stock(linear).apply(array_of(x)))));
}

mx::array StockOps::gated(const mx::array& gate, const mx::array& up, Activation activation) const {
  switch (activation) {
    case Activation::silu:
      return swiglu_({gate, up}).front();
    case Activation::gelu_tanh:
      return mx::multiply(gelu_({gate}).front(), up);
    case Activation::geglu:
      return geglu_({gate, up}).front();
  }
  throw Error(500, "unknown activation");
}

mx::array StockOps::gated_product(const mx::array& normed, const GatedMlp& mlp) const {
  const mx::array gate = stock(mlp.gate).apply(normed);
  const mx::array up = stock(mlp.up).apply(normed);
  return stock(mlp.down).apply(gated(gate, up, mlp.activation));
}

Value StockOps::gated_mlp(const Value& x, const NormPtr& norm, const GatedMlp& mlp) {
  const mx::array down = gated_product(stock(norm).apply(array_of(x)), mlp);
  if (!mlp.post_norm) return wrap(times(mx::add(array_of(x), down), mlp.post_factor));
  return wrap(times(saturating_sum(array_of(x), stock(mlp.post_norm).apply(down)), mlp.post_factor));
}

Value StockOps::per_layer_inputs(const Value& x, const PerLayerInputs& inputs) {
  const auto scaled = [](const mx::array& a, float by) { return mx::multiply(a, mx::array(by, a.dtype())); };
  const auto by_layer = [&](const mx::array& a) { return mx::unflatten(a, -1, {inputs.layers, inputs.width}); };
  const mx::array own = by_layer(scaled(stock(inputs.table).look_up(tokens_), inputs.table_scale));
  const mx::array projected =
      stock(inputs.norm).apply(by_layer(scaled(stock(inputs.projection).apply(array_of(x)), inputs.projection_scale)));
  return wrap(scaled(mx::add(projected, own), inputs.scale));
}

Value StockOps::per_layer_gate(const Value& x, const PerLayerGate& gate, const Value& inputs, int layer) {
  const mx::array own = mx::take(array_of(inputs), layer, 2);
  const mx::array gated = mx::multiply(gelu_({stock(gate.gate).apply(array_of(x))}).front(), own);
  const mx::array branch = stock(gate.post_norm).apply(stock(gate.projection).apply(gated));
  return wrap(times(mx::add(array_of(x), branch), gate.post_factor));
}

Value StockOps::logits(const Value& x, const NormPtr& norm, const LinearPtr& head, float softcap) {
  mx::array scores = stock(head).apply(stock(norm).apply(array_of(x)));
  if (softcap == 0.0F) return wrap(std::move(scores));
  auto cap = softcaps_.find(softcap);
  if (cap == softcaps_.end()) {
    // logit_softcap of gemma4_text
    const auto capped = [softcap](const std::vector<mx::array>& inputs) -> std::vector<mx::array> {
      const mx::array bound(softcap, inputs[0].dtype());
      return {mx::multiply(mx::tanh(mx::divide(inputs[0], bound)), bound)};
    };
    cap = softcaps_.emplace(softcap, mx::compile(Compiled(capped), /*shapeless=*/true)).first;
  }
  return wrap(cap->second({std::move(scores)}).front());
}

}  // namespace galley::ops
