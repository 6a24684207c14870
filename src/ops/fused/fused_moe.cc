// Mixtures of experts: the router's scores are a phase of their own; the experts read the residual stream and leave it.
#include <mlx/mlx.h>

#include <utility>

#include "ops/fused/fused_values.h"

namespace galley::ops {

namespace mx = mlx::core;

namespace {

/// Rows [first, first + rows) of a matrix.
class RowsOf final : public MatrixSource {
 public:
  RowsOf(const MatrixSource& whole, int first, int rows) : whole_(whole), first_(first), rows_(rows) {}
  [[nodiscard]] const std::string& name() const override { return whole_.name(); }
  [[nodiscard]] int rows() const override { return rows_; }
  [[nodiscard]] int cols() const override { return whole_.cols(); }
  [[nodiscard]] bool quantized() const override { return whole_.quantized(); }
  [[nodiscard]] AffineFormat affine() const override { return whole_.affine(); }
  [[nodiscard]] ElementType type() const override { return whole_.type(); }
  [[nodiscard]] ScaleRuns runs() const override { return whole_.runs(); }
  void codes(int row, std::span<std::uint8_t> out) const override { whole_.codes(first_ + row, out); }
  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    whole_.scales(first_ + row, scale, bias);
  }
  void levels(int row, const ScaleLevels& out) const override { whole_.levels(first_ + row, out); }
  void values(int row, std::span<float> out) const override { whole_.values(first_ + row, out); }

 private:
  const MatrixSource& whole_;
  int first_, rows_;
};

/// A matrix as plain float32, whatever is stored.
class Expanded final : public MatrixSource {
 public:
  explicit Expanded(const MatrixSource& stored) : stored_(stored) {}
  [[nodiscard]] const std::string& name() const override { return stored_.name(); }
  [[nodiscard]] int rows() const override { return stored_.rows(); }
  [[nodiscard]] int cols() const override { return stored_.cols(); }
  [[nodiscard]] bool quantized() const override { return false; }
  [[nodiscard]] AffineFormat affine() const override { return {}; }
  [[nodiscard]] ElementType type() const override { return ElementType::f32; }
  void codes(int, std::span<std::uint8_t>) const override {}
  void scales(int, std::span<float>, std::span<float>) const override {}
  void values(int row, std::span<float> out) const override { stored_.values(row, out); }

 private:
  const MatrixSource& stored_;
};

}  // namespace

Moe FusedOps::load_moe(const MatrixSource& router, const MatrixSource& gate, const MatrixSource& up,
                       const MatrixSource& down, const MoeSpec& spec, const VectorSource* factors) {
  const kernels::Isa& isa = machine_->context.isa();
  kernels::Pool* pool = &machine_->context.pool();
  auto packed = std::make_shared<PackedExperts>();
  const int inner = gate.rows() / spec.experts;
  const int hidden = down.rows() / spec.experts;
  for (int e = 0; e < spec.experts; ++e) {
    packed->gate_up.push_back(kernels::PackedMatrix::interleave(isa, RowsOf(gate, e * inner, inner),
                                                                RowsOf(up, e * inner, inner), nullptr, nullptr, pool));
    const RowsOf out(down, e * hidden, hidden);
    const MatrixSource* const sources[] = {&out};
    packed->down.push_back(kernels::PackedMatrix::concatenate(isa, sources, {}, pool));
    weight_bytes_ += packed->gate_up.back().bytes() + packed->down.back().bytes();
  }
  if (factors != nullptr) packed->factors = factors->values;
  if (needs_stock()) packed->stock = stock_->load_moe(router, gate, up, down, spec, factors);
  // In float32, and so its input: what an int8 rounding changes in a score could send the token to another expert.
  const Expanded precise(router);
  return {load_linears({&precise}, {}).front(), std::move(packed), spec};
}

kernels::MoeLayer FusedOps::moe_layer(const PackedExperts& experts, const PackedNorm& norm, const MoeSpec& spec) {
  kernels::MoeLayer layer;
  layer.gate_up = experts.gate_up;
  layer.down = experts.down;
  layer.gate = gate_of(spec.activation);
  layer.picks = spec.per_token;
  layer.normalized = spec.normalized || spec.softmax_of_picked;  // which is the same but for rounding
  layer.norm = norm.weight.data();
  layer.eps = norm.eps;
  if (!experts.factors.empty()) layer.factors = experts.factors.data();
  return layer;
}

Value FusedOps::moe(const Value& x, const NormPtr& norm, const Moe& moe) {
  const auto& packed_norm = dynamic_cast<const PackedNorm&>(*norm);
  const auto& packed = dynamic_cast<const PackedExperts&>(*moe.experts);
  if (!switches_.moe) {
    const Value input = StockOps::value_of(mx::expand_dims(to_array(x), 0));
    return from_array(StockOps::array_of(stock_->moe(input, packed_norm.stock, packed.stock)));
  }
  const kernels::PackedMatrix& router = dynamic_cast<const PackedLinear&>(*moe.router).matrix();
  const auto input = consume(x, &packed_norm, router);
  const auto base = in_floats(x);
  const FloatsHandle scores(*machine_);  // free again once this op is recorded
  program_->add([&router, in = input->id, eps = norm->eps, y = scores.id](PhaseContext& c) {
    const auto ld = static_cast<std::size_t>(router.columns());
    kernels::linear(c.machine.context, {&router, &c.machine.activations(in), eps},
                    c.machine.floats(y, c.step.tokens.size() * ld), ld);
  });
  auto mixed = std::make_shared<Hidden>();
  mixed->columns = base->columns;
  mixed->floats = std::make_shared<FloatsHandle>(*machine_);
  mixed->program = program_.get();
  const kernels::MoeLayer layer = moe_layer(packed, packed_norm, moe.spec);
  program_->add([layer, scores = scores.id, from = base->floats->id, to = mixed->floats->id,
                 columns = mixed->columns](PhaseContext& c) {
    const std::size_t n = c.step.tokens.size() * static_cast<std::size_t>(columns);
    float* y = c.machine.floats(to, n);
    kernels::experts(c.machine.context, layer, c.machine.floats(scores), c.machine.floats(from), c.step.size(), y);
  });
  return Value(std::move(mixed));
}

Value FusedOps::mlp_beside_moe(const Value& x, const MlpBesideMoe& both) {
  const auto packed_norm = [](const NormPtr& norm) -> const PackedNorm& {
    return dynamic_cast<const PackedNorm&>(*norm);
  };
  const auto& mlp = dynamic_cast<const PackedMlp&>(*both.mlp.gate);
  const auto& down = dynamic_cast<const PackedLinear&>(*both.mlp.down);
  const auto& experts = dynamic_cast<const PackedExperts&>(*both.moe.experts);
  if (!switches_.moe) {
    const GatedMlp stock_mlp{mlp.stock_gate, mlp.stock_up, down.stock, both.mlp.activation,
                             stock_norm(both.mlp.post_norm)};
    const MlpBesideMoe stock{
        stock_norm(both.mlp_norm),      stock_mlp,     stock_norm(both.router_norm), stock_norm(both.moe_norm),
        stock_norm(both.moe_post_norm), experts.stock, stock_norm(both.post_norm),   stock_factor(both.post_factor)};
    const Value input = StockOps::value_of(mx::expand_dims(to_array(x), 0));
    return from_array(StockOps::array_of(stock_->mlp_beside_moe(input, stock)));
  }
  const int columns = down.rows;
  const FloatsHandle dense(*machine_), sparse(*machine_), scores(*machine_);  // free again once this op is recorded

  const auto input = consume(x, &packed_norm(both.mlp_norm), mlp.gate_up);
  const ActivationsHandle gated(*machine_);
  program_->add([matrix = &mlp.gate_up, in = input->id, out = gated.id, next = &down.matrix(), y = dense.id,
                 eps = both.mlp_norm->eps, gate = gate_of(both.mlp.activation), columns](PhaseContext& c) {
    kernels::Activations& to = c.machine.activations(out);
    c.machine.context.reshape(to, c.step.size(), *next, false);
    kernels::linear_gated(c.machine.context, {matrix, &c.machine.activations(in), eps}, gate, to);
    const auto ld = static_cast<std::size_t>(columns);
    kernels::linear(c.machine.context, {next, &to}, c.machine.floats(y, c.step.tokens.size() * ld), ld);
  });

  const kernels::PackedMatrix& router = dynamic_cast<const PackedLinear&>(*both.moe.router).matrix();
  const auto routed = consume(x, &packed_norm(both.router_norm), router);
  const auto base = in_floats(x);
  kernels::MoeLayer layer = moe_layer(experts, packed_norm(both.moe_norm), both.moe.spec);
  layer.residual = false;
  program_->add([&router, layer, in = routed->id, eps = both.router_norm->eps, scores = scores.id,
                 from = base->floats->id, to = sparse.id, columns](PhaseContext& c) {
    const auto count = static_cast<std::size_t>(router.columns());
    float* s = c.machine.floats(scores, c.step.tokens.size() * count);
    kernels::linear(c.machine.context, {&router, &c.machine.activations(in), eps}, s, count);
    float* y = c.machine.floats(to, c.step.tokens.size() * static_cast<std::size_t>(columns));
    kernels::experts(c.machine.context, layer, s, c.machine.floats(from), c.step.size(), y);
  });

  // dense = norm(dense) + norm(sparse)
  program_->add([a = dense.id, b = sparse.id, columns, norm = &packed_norm(both.mlp.post_norm),
                 beside = &packed_norm(both.moe_post_norm)](PhaseContext& c) {
    kernels::Residual sum;
    sum.ld = static_cast<std::size_t>(columns);
    sum.y = c.machine.floats(a);
    kernels::norm_residual(c.machine.context, sum.y, c.step.size(), columns, norm->weight.data(), norm->eps, sum);
    sum.residual = sum.y;
    kernels::norm_residual(c.machine.context, c.machine.floats(b), c.step.size(), columns, beside->weight.data(),
                           beside->eps, sum);
  });
  return norm_and_add(dense, packed_norm(both.post_norm), x, columns, factor_of(both.post_factor));
}

}  // namespace galley::ops
