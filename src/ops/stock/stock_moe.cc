#include "ops/stock/stock_moe.h"

#include <utility>

#include "ops/stock/stock_ops.h"

namespace galley::ops {
namespace {

namespace mx = mlx::core;

// From this many picks on mlx-lm sorts them by expert, which changes the kernels and so the last bits.
constexpr std::size_t kSortFrom = 64;

const StockNorm& stock(const NormPtr& norm) { return static_cast<const StockNorm&>(*norm); }

mx::array with_experts(const mx::array& a, int experts) {
  return mx::reshape(a, {experts, a.shape(0) / experts, a.shape(1)});
}

}  // namespace

StockSwitchLinear::StockSwitchLinear(const MatrixSource& source, int experts, const StockNumerics& numerics)
    : matrix_(source, numerics) {
  matrix_.weight = with_experts(matrix_.weight, experts);
  if (auto& packed = matrix_.packed) {
    packed->scales = with_experts(packed->scales, experts);
    packed->biases = with_experts(packed->biases, experts);
  } else if (matrix_.weight.dtype() != mx::float32 && mx::default_device() == mx::Device::cpu) {
    // MLX's gathered product of plain numbers is float32 only on a CPU (mlx-lm can't run such a model there).
    matrix_.weight = mx::astype(matrix_.weight, mx::float32);
    matrix_.weight.eval();
    widened_ = true;
  }
}

mx::array StockSwitchLinear::apply(const mx::array& x, const mx::array& experts, bool sorted) const {
  if (const auto& packed = matrix_.packed) {
    return mx::gather_qmm(x, matrix_.weight, packed->scales, packed->biases, std::nullopt, experts, /*transpose=*/true,
                          packed->format.group, packed->format.bits, "affine", std::nullopt, sorted);
  }
  const mx::array transposed = mx::swapaxes(matrix_.weight, -1, -2);
  if (!widened_) return mx::gather_mm(x, transposed, std::nullopt, experts, sorted);
  return mx::astype(mx::gather_mm(mx::astype(x, mx::float32), transposed, std::nullopt, experts, sorted), x.dtype());
}

Moe StockOps::load_moe(const MatrixSource& router, const MatrixSource& gate, const MatrixSource& up,
                       const MatrixSource& down, const MoeSpec& spec, const VectorSource* factors) {
  auto experts = std::make_shared<StockExperts>(gate, up, down, spec.experts, numerics_);
  if (factors != nullptr) experts->factors = stock_vector(*factors, numerics_);
  return {std::make_shared<StockLinear>(router, nullptr, numerics_), std::move(experts), spec};
}

// x [B, L, D] -> [B, L, picks, D]: SwitchGLU
mx::array StockOps::switch_glu(const mx::array& x, const mx::array& picks, const StockExperts& experts,
                               Activation activation) const {
  mx::array rows = mx::expand_dims(x, {-2, -3});
  mx::array index = picks;
  const bool sorted = picks.size() >= kSortFrom;
  mx::array back = picks;
  if (sorted) {
    index = mx::flatten(picks);
    const mx::array order = mx::argsort(index);
    back = mx::argsort(order);
    rows = mx::take(mx::flatten(rows, 0, -3), mx::floor_divide(order, mx::array(picks.shape(-1), order.dtype())), 0);
    index = mx::take(index, order, 0);
  }
  const mx::array up = experts.up.apply(rows, index, sorted);
  const mx::array gate = experts.gate.apply(rows, index, sorted);
  mx::array y = experts.down.apply(gated(gate, up, activation), index, sorted);
  if (sorted) y = mx::unflatten(mx::take(y, back, 0), 0, picks.shape());
  return mx::squeeze(y, -2);
}

StockOps::Routing StockOps::route(const mx::array& normed, const Moe& moe) {
  mx::array scores = static_cast<const StockLinear&>(*moe.router).apply(normed);
  if (!moe.spec.softmax_of_picked) scores = mx::softmax(scores, -1, /*precise=*/true);
  const mx::array partitioned = mx::argpartition(scores, -moe.spec.per_token, -1);
  mx::Shape start(partitioned.ndim(), 0);
  start.back() = moe.spec.experts - moe.spec.per_token;
  mx::array picks = mx::slice(partitioned, std::move(start), partitioned.shape());
  mx::array weights = mx::take_along_axis(scores, picks, -1);
  if (moe.spec.softmax_of_picked) {
    weights = mx::softmax(weights, -1);
  } else if (moe.spec.normalized) {
    weights = mx::divide(weights, mx::sum(weights, -1, /*keepdims=*/true));
  }
  if (const auto& factors = static_cast<const StockExperts&>(*moe.experts).factors) {
    weights = mx::multiply(weights, mx::take(*factors, picks, 0));
  }
  return {std::move(picks), std::move(weights)};
}

Value StockOps::moe(const Value& x, const NormPtr& norm, const Moe& moe) {
  const mx::array normed = stock(norm).apply(array_of(x));
  const auto [picks, weights] = route(normed, moe);
  const mx::array y = switch_glu(normed, picks, static_cast<const StockExperts&>(*moe.experts), moe.spec.activation);
  const mx::array mixed = mx::astype(mx::sum(mx::multiply(y, mx::expand_dims(weights, -1)), -2), y.dtype());
  return value_of(mx::add(array_of(x), mixed));
}

Value StockOps::mlp_beside_moe(const Value& x, const MlpBesideMoe& both) {
  const mx::array& h = array_of(x);
  const mx::array dense = stock(both.mlp.post_norm).apply(gated_product(stock(both.mlp_norm).apply(h), both.mlp));

  const auto [picks, weights] = route(stock(both.router_norm).apply(h), both.moe);
  const mx::array y = switch_glu(stock(both.moe_norm).apply(h), picks,
                                 static_cast<const StockExperts&>(*both.moe.experts), both.moe.spec.activation);
  const mx::array mixed = mx::sum(mx::multiply(mx::expand_dims(weights, -1), y), -2);
  const mx::array sparse = stock(both.moe_post_norm).apply(mixed);

  const mx::array sum = mx::add(h, stock(both.post_norm).apply(mx::add(dense, sparse)));
  return value_of(both.post_factor ? mx::multiply(sum, static_cast<const StockFactor&>(*both.post_factor).number)
                                   : sum);
}

}  // namespace galley::ops
