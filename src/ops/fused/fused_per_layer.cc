// Per-layer inputs: made once a step beside the embedding, then read by every layer's gate.
#include <mlx/mlx.h>

#include <utility>

#include "ops/fused/fused_values.h"

namespace galley::ops {

namespace mx = mlx::core;

Value FusedOps::per_layer_inputs(const Value& x, const PerLayerInputs& inputs) {
  const auto& table = dynamic_cast<const PackedLinear&>(*inputs.table);
  const auto& projection = dynamic_cast<const PackedLinear&>(*inputs.projection);
  if (!switches_.per_layer) {
    PerLayerInputs stock = inputs;
    stock.table = table.stock;
    stock.projection = projection.stock;
    stock.norm = stock_norm(inputs.norm);
    const Value all = stock_->per_layer_inputs(StockOps::value_of(mx::expand_dims(to_array(x), 0)), stock);
    return from_array(mx::flatten(StockOps::array_of(all), -2, -1));
  }
  const auto input = consume(x, nullptr, projection.matrix());
  const FloatsHandle projected(*machine_);  // free again once this op is recorded
  auto all = std::make_shared<Hidden>();
  all->columns = inputs.layers * inputs.width;
  all->floats = std::make_shared<FloatsHandle>(*machine_);
  all->program = program_.get();
  program_->add([matrix = &projection.matrix(), in = input->id, y = projected.id](PhaseContext& c) {
    const auto ld = static_cast<std::size_t>(matrix->columns());
    kernels::linear(c.machine.context, {matrix, &c.machine.activations(in)},
                    c.machine.floats(y, c.step.tokens.size() * ld), ld);
  });
  kernels::PerLayerSum sum;
  sum.layers = inputs.layers;
  sum.width = inputs.width;
  sum.norm = dynamic_cast<const PackedNorm&>(*inputs.norm).weight.data();
  sum.eps = inputs.norm->eps;
  sum.projection_scale = inputs.projection_scale;
  sum.scale = inputs.scale;
  program_->add([matrix = &table.matrix(), scale = inputs.table_scale, sum, from = projected.id, to = all->floats->id,
                 columns = all->columns](PhaseContext& c) {
    const auto ld = static_cast<std::size_t>(columns);
    float* y = c.machine.floats(to, c.step.tokens.size() * ld);
    kernels::embed(c.machine.context, *matrix, c.step.tokens, scale, y, ld, nullptr, nullptr);
    kernels::per_layer_sum(c.machine.context, sum, c.machine.floats(from), c.step.size(), y);
  });
  return Value(std::move(all));
}

Value FusedOps::per_layer_gate(const Value& x, const PerLayerGate& gate, const Value& inputs, int layer) {
  const auto& in = dynamic_cast<const PackedLinear&>(*gate.gate);
  const auto& out = dynamic_cast<const PackedLinear&>(*gate.projection);
  if (!switches_.per_layer) {
    const Value values[] = {x, inputs};
    const std::vector<mx::array> arrays = to_arrays(values);
    const PerLayerGate stock{in.stock, out.stock, stock_norm(gate.post_norm), stock_factor(gate.post_factor)};
    const Value vectors = StockOps::value_of(mx::unflatten(mx::expand_dims(arrays[1], 0), -1, {-1, in.rows}));
    return from_array(StockOps::array_of(
        stock_->per_layer_gate(StockOps::value_of(mx::expand_dims(arrays[0], 0)), stock, vectors, layer)));
  }
  const auto input = consume(x, nullptr, in.matrix());
  const auto vectors = in_floats(inputs);
  const FloatsHandle product(*machine_);  // free again once this op is recorded
  const auto gated = std::make_shared<ActivationsHandle>(*machine_);
  program_->add([matrix = &in.matrix(), from = input->id, y = product.id, vectors = vectors->floats->id,
                 stride = vectors->columns, first = layer * in.rows, consumer = &out.matrix(),
                 to = gated->id](PhaseContext& c) {
    const auto ld = static_cast<std::size_t>(matrix->columns());
    float* rows = c.machine.floats(y, c.step.tokens.size() * ld);
    kernels::linear(c.machine.context, {matrix, &c.machine.activations(from)}, rows, ld);
    kernels::Activations& activations = c.machine.activations(to);
    c.machine.context.reshape(activations, c.step.size(), *consumer, false);
    kernels::gate_rows(c.machine.context, rows, ld, c.machine.floats(vectors) + first, static_cast<std::size_t>(stride),
                       kernels::Gate::gelu_tanh, activations);
  });
  return add_normed_residual(gated, out.matrix(), dynamic_cast<const PackedNorm&>(*gate.post_norm), x,
                             factor_of(gate.post_factor));
}

}  // namespace galley::ops
