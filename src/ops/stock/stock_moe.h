// mlx-lm's SwitchGLU: the gated MLPs of all experts, applied through gathered products.
#pragma once
#include <mlx/mlx.h>

#include "ops/ops.h"
#include "ops/stock/stock_weights.h"

namespace galley::ops {

/// One projection of every expert, [experts, rows, cols].
class StockSwitchLinear {
 public:
  /// `source`: the experts' matrices one below the other.
  StockSwitchLinear(const MatrixSource& source, int experts, const StockNumerics& numerics);

  /// x [.., 1, cols] times the expert that `experts` [..] names at each place -> [.., 1, rows]. `sorted`: `experts`
  /// never falls.
  [[nodiscard]] mlx::core::array apply(const mlx::core::array& x, const mlx::core::array& experts, bool sorted) const;

 private:
  StockMatrix matrix_;  ///< with the experts as a first axis
  bool widened_ = false;
};

struct StockExperts final : Experts {
  StockExperts(const MatrixSource& gate_source, const MatrixSource& up_source, const MatrixSource& down_source,
               int count, const StockNumerics& numerics)
      : gate(gate_source, count, numerics), up(up_source, count, numerics), down(down_source, count, numerics) {}
  StockSwitchLinear gate, up, down;
  std::optional<mlx::core::array> factors;  ///< [experts] of the router's weights
};

}  // namespace galley::ops
