// Weights as a checkpoint stores them, decoded row by row on demand, so that a backend can pack them into its own
// layout without a second full copy in memory. Free of MLX.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace galley::ops {

enum class ElementType { f32, f16, bf16 };

/// Affine quantization as MLX defines it: value = scale * code + bias, codes unsigned, one scale and bias per group of
/// consecutive columns.
struct AffineFormat {
  int bits = 4;    ///< 2, 3, 4, 5, 6 or 8
  int group = 32;  ///< 16, 32, 64 or 128
};

/// Scales in two levels, as K-quants store them: scale = half-precision number of a run of columns * small integer of
/// the group, and the same for the bias. The products are exact in fp32.
struct ScaleRuns {
  int columns = 0;      ///< in a run, a multiple of the group; 0: scales have one level
  bool biases = false;  ///< false: every bias is -2^(bits-1) * scale, and levels() writes none
};
struct ScaleLevels {
  std::span<std::uint16_t> run_scale, run_bias;  ///< `cols / run` halves, as bits
  std::span<std::int8_t> scale, bias;            ///< `cols / group` integers
};

/// A matrix [rows, cols]. The object borrows the mapped file and must not outlive its checkpoint.
class MatrixSource {
 public:
  virtual ~MatrixSource() = default;

  [[nodiscard]] virtual const std::string& name() const = 0;
  [[nodiscard]] virtual int rows() const = 0;
  [[nodiscard]] virtual int cols() const = 0;
  /// True: codes() and scales() work. False: the rows are plain numbers of type() and only values() works.
  [[nodiscard]] virtual bool quantized() const = 0;
  [[nodiscard]] virtual AffineFormat affine() const = 0;
  /// Plain: the stored element type. Quantized: the type of scales and biases (f32 for GGUF files).
  [[nodiscard]] virtual ElementType type() const = 0;

  /// One code a byte, `cols` of them.
  virtual void codes(int row, std::span<std::uint8_t> out) const = 0;
  /// `cols / group` scales and biases.
  virtual void scales(int row, std::span<float> scale, std::span<float> bias) const = 0;
  /// Whether scales() can also be had in two levels, which take less room.
  [[nodiscard]] virtual ScaleRuns runs() const { return {}; }
  /// Only where runs() says so.
  virtual void levels(int /*row*/, const ScaleLevels& /*out*/) const {}
  /// The row as numbers: stored ones converted exactly, quantized ones as float(scale * code + bias).
  virtual void values(int row, std::span<float> out) const = 0;
};

/// A vector (norm weight, bias), converted exactly to f32; `type` is what was stored.
struct VectorSource {
  std::string name;
  std::vector<float> values;
  ElementType type = ElementType::f32;
};

}  // namespace galley::ops
