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
  if (needs_stock()) packed->stock = stock_->load_moe(router, gate, up, down, spec, factors);
  // In float32, and so its input: what an int8 rounding changes in a score could send the token to another expert.
  const Expanded precise(router);
  return {load_linears({&precise}, {}).front(), std::move(packed), spec};
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
  kernels::MoeLayer layer;
  layer.gate_up = packed.gate_up;
  layer.down = packed.down;
  layer.gate = gate_of(moe.spec.activation);
  layer.picks = moe.spec.per_token;
  layer.normalized = moe.spec.normalized;
  layer.norm = packed_norm.weight.data();
  layer.eps = norm->eps;
  program_->add([layer, scores = scores.id, from = base->floats->id, to = mixed->floats->id,
                 columns = mixed->columns](PhaseContext& c) {
    const std::size_t n = c.step.tokens.size() * static_cast<std::size_t>(columns);
    float* y = c.machine.floats(to, n);
    kernels::experts(c.machine.context, layer, c.machine.floats(scores), c.machine.floats(from), c.step.size(), y);
  });
  return Value(std::move(mixed));
}

}  // namespace galley::ops
