// Residual branches that end in a norm of their own: the product is finished first, then one phase norms, adds and
// leaves what the next op reads.
#include <mlx/mlx.h>

#include <utility>

#include "ops/fused/fused_values.h"

namespace galley::ops {

namespace mx = mlx::core;

Value FusedOps::add_normed_residual(const std::shared_ptr<ActivationsHandle>& input,
                                    const kernels::PackedMatrix& matrix, const PackedNorm& norm, const Value& residual,
                                    float whole) {
  const FloatsHandle product(*machine_);  // free again once this op is recorded
  program_->add([&matrix, in = input->id, y = product.id](PhaseContext& c) {
    const auto ld = static_cast<std::size_t>(matrix.columns());
    kernels::linear(c.machine.context, {&matrix, &c.machine.activations(in)},
                    c.machine.floats(y, c.step.tokens.size() * ld), ld);
  });
  return norm_and_add(product, norm, residual, matrix.columns(), whole);
}

Value FusedOps::norm_and_add(const FloatsHandle& branch, const PackedNorm& norm, const Value& residual, int columns,
                             float whole) {
  const auto base = in_floats(residual);
  auto x = std::make_shared<Hidden>();
  x->columns = columns;
  x->floats = std::make_shared<FloatsHandle>(*machine_);
  x->activations = std::make_shared<ActivationsHandle>(*machine_);
  x->next = std::make_shared<Next>();
  x->program = program_.get();
  program_->add([weight = norm.weight.data(), eps = norm.eps, from = branch.id, base = base->floats->id, whole,
                 y = x->floats->id, out = x->activations->id, next = x->next, columns](PhaseContext& c) {
    kernels::Residual to;
    to.ld = static_cast<std::size_t>(columns);
    to.y = c.machine.floats(y, c.step.tokens.size() * to.ld);
    to.residual = c.machine.floats(base);
    to.whole = whole;
    to.norm = next->norm;
    if (next->consumer != nullptr) {
      to.out = &c.machine.activations(out);
      c.machine.context.reshape(*to.out, c.step.size(), *next->consumer, next->norm != nullptr);
    }
    kernels::norm_residual(c.machine.context, c.machine.floats(from), c.step.size(), columns, weight, eps, to);
  });
  return Value(std::move(x));
}

Value FusedOps::linear_norm_residual(const Value& x, const LinearPtr& linear, const NormPtr& norm,
                                     const Value& residual) {
  const auto& packed = dynamic_cast<const PackedLinear&>(*linear);
  if (!switches_.linear_residual) {
    const Value values[] = {x, residual};
    const std::vector<mx::array> arrays = to_arrays(values);
    return from_array(StockOps::array_of(
        stock_->linear_norm_residual(StockOps::value_of(mx::expand_dims(arrays[0], 0)), packed.stock, stock_norm(norm),
                                     StockOps::value_of(mx::expand_dims(arrays[1], 0)))));
  }
  return add_normed_residual(consume(x, nullptr, packed.matrix()), packed.matrix(),
                             dynamic_cast<const PackedNorm&>(*norm), residual);
}

}  // namespace galley::ops
