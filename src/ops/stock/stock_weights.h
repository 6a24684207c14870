// Weights as MLX arrays, and the layers that mlx.nn builds from them: Linear, QuantizedLinear, Embedding,
// QuantizedEmbedding. Each applies the same MLX ops in the same order as its Python original.
#pragma once
#include <mlx/mlx.h>

#include <optional>

#include "ops/ops.h"

namespace galley::ops {

/// How to hold a checkpoint's weights.
struct StockNumerics {
  /// Compute in float32 whatever is stored: every plain weight is widened (exactly) at load. What GGUF files get.
  bool float32 = false;
  /// Expand quantized matrices to dense ones at load, at the price of memory. Which of MLX's CPU kernels is the faster
  /// depends on machine and shape; results differ in rounding at most.
  bool dense = false;
};

/// A matrix [rows, cols] as MLX holds it: dense, or packed codes with a scale and a bias per group.
struct StockMatrix {
  StockMatrix(const MatrixSource& source, const StockNumerics& numerics);

  struct Packed {
    mlx::core::array scales;
    mlx::core::array biases;
    AffineFormat format;
  };
  mlx::core::array weight;  ///< dense [rows, cols], or uint32 [rows, cols * bits / 32]
  std::optional<Packed> packed;
};

/// A matrix [rows, cols], dense or packed, as a layer or as an embedding table.
class StockLinear final : public Linear {
 public:
  StockLinear(const MatrixSource& source, const VectorSource* bias, const StockNumerics& numerics);

  /// x [.., cols] -> [.., rows]. Also Embedding.as_linear (which never has a bias).
  [[nodiscard]] mlx::core::array apply(const mlx::core::array& x) const;
  /// The rows named by `tokens`, any shape -> [.., cols].
  [[nodiscard]] mlx::core::array look_up(const mlx::core::array& tokens) const;

 private:
  StockMatrix matrix_;
  std::optional<mlx::core::array> bias_;
};

class StockNorm final : public Norm {
 public:
  StockNorm(const VectorSource& weight, float epsilon, const StockNumerics& numerics);
  explicit StockNorm(float epsilon) { eps = epsilon; }
  [[nodiscard]] mlx::core::array apply(const mlx::core::array& x) const;

 private:
  std::optional<mlx::core::array> weight_;
};

struct StockFactor final : Factor {
  StockFactor(const VectorSource& one_number, const StockNumerics& numerics);
  mlx::core::array number;  ///< [1]
};

/// A vector in the type that it is stored in, or in float32.
mlx::core::array stock_vector(const VectorSource& source, const StockNumerics& numerics);

}  // namespace galley::ops
