// Weights in the layout the kernels read, repacked once at load.
//
// Columns below are *output* columns: a checkpoint's matrix [rows, cols] computes y = W x, so its rows are our output
// columns n and its cols our inner dimension k.
//
// Affine (quantized) matrices. A *block* is `lanes` output columns (fp32 lanes of the instruction set):
//   header  [k/group] times [lanes] scales, then unless symmetric [lanes] biases: see ScaleKind
//   codes   per 32 inputs [bits][lanes][4] bytes. 8 bits: byte row c holds inputs k = 4c + j. 4 bits: low nibble
//           k = 4c + j, high nibble k = 16 + 4c + j. 5 bits: the 4-bit rows, then a row whose bit c is the fifth bit of
//           k = 4c + j. 6 bits: the 4-bit rows, then two rows h whose bits 2i and 2i + 1 are the high bits of
//           k = 16h + 4i + j. Codes of 2 and 3 bits are stored as 4.
//   *Symmetric*: every bias equals -2^(bits-1) * scale bit for bit; then biases are not stored.
// Groups of 16 are stored with 6 or 8 bits.
// Plain matrices (f32, f16, bf16, kept as they are): blocks of 16 output columns, [k][16] elements.
// In both, output columns are padded with zero weights to a multiple of 32.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/kernels/isa.h"
#include "ops/kernels/memory.h"
#include "ops/weights.h"

namespace galley::kernels {

class Pool;

constexpr int kUnitColumns = 32;   ///< output columns are padded to a multiple of this
constexpr int kPlainColumns = 16;  ///< output columns of a plain block

enum class WeightKind { affine4, affine5, affine6, affine8, f32, f16, bf16 };

/// How scales and biases are stored, exactly in every case.
enum class ScaleKind {
  half,       ///< fp16, when every one converts exactly (those of GGUF's blocks of 32 do, bf16's mostly do)
  two_level,  ///< per run of groups fp16 [lanes] (and [lanes] of biases), then per group int8 [lanes] (and [lanes]):
              ///< the product is meant. K-quants, see MatrixSource::levels()
  single      ///< fp32
};

/// What a matrix multiplies: int8 codes with a scale per group (affine weights) or fp32 rows (plain weights).
/// `group` is the quantization group of affine weights, but at least 32; 0 for plain ones.
struct ActivationForm {
  int group = 0;
  [[nodiscard]] bool quantized() const { return group != 0; }
  friend bool operator==(const ActivationForm&, const ActivationForm&) = default;
};

class PackedMatrix {
 public:
  PackedMatrix() = default;

  /// Packs the rows of `sources`, one source after the other (q, k, v; or a single matrix). All must have the same
  /// number of columns, and all be quantized or all be plain with the same type. Bits and groups may differ: narrow
  /// codes are widened to the widest, coarse groups split into the finest. `biases`: empty, or one per source (null:
  /// zeros), added to the output. `pool` (may be null) spreads the work; MatrixSource's const methods are then called
  /// from several threads. Throws ModelError naming the tensor: an unsupported group (not 16, 32, 64 or 128), columns
  /// not a multiple of 32 or the group, a mismatch among the sources, a bias of another length.
  static PackedMatrix concatenate(const Isa& isa, std::span<const ops::MatrixSource* const> sources,
                                  std::span<const ops::VectorSource* const> biases = {}, Pool* pool = nullptr);

  /// Packs gate and up for the gated epilogue: 32 columns of gate, the same 32 of up, and so on. Same rules; both must
  /// have the same shape. columns() is then that of one of the two.
  static PackedMatrix interleave(const Isa& isa, const ops::MatrixSource& gate, const ops::MatrixSource& up,
                                 const ops::VectorSource* gate_bias = nullptr,
                                 const ops::VectorSource* up_bias = nullptr, Pool* pool = nullptr);

  [[nodiscard]] WeightKind kind() const { return kind_; }
  [[nodiscard]] bool interleaved() const { return interleaved_; }
  /// Real output columns (of gate alone, when interleaved).
  [[nodiscard]] int columns() const { return columns_; }
  /// Inner dimension.
  [[nodiscard]] int depth() const { return depth_; }
  /// The form of the activations this matrix multiplies.
  [[nodiscard]] ActivationForm input_form() const { return {group_ == 16 ? 32 : group_}; }
  [[nodiscard]] bool symmetric() const { return symmetric_; }
  [[nodiscard]] ScaleKind scale_kind() const { return scale_kind_; }
  /// fp32 lanes of the instruction set it was packed for; usable only with an Isa of the same number.
  [[nodiscard]] int lanes() const { return lanes_; }
  /// Output column `column` decoded, out: [depth] (an embedding table's row). Not of an interleaved matrix.
  void decode(int column, std::span<float> out) const;
  [[nodiscard]] std::size_t bytes() const { return memory_.size() + bias_.size() * sizeof(float); }

  // ---- for kernels
  [[nodiscard]] bool affine() const { return group_ != 0; }
  /// Of the codes as stored.
  [[nodiscard]] int bits() const {
    return kind_ == WeightKind::affine4 ? 4 : kind_ == WeightKind::affine5 ? 5 : kind_ == WeightKind::affine6 ? 6 : 8;
  }
  [[nodiscard]] int group() const { return group_; }
  [[nodiscard]] int groups() const { return group_ == 0 ? 0 : depth_ / group_; }
  /// Groups that share an upper-level scale.
  [[nodiscard]] int groups_per_run() const { return groups_per_run_; }
  /// Output columns as stored, padding and both interleaved halves included; a multiple of 32.
  [[nodiscard]] int stored_columns() const { return stored_columns_; }
  [[nodiscard]] int block_columns() const { return affine() ? lanes_ : kPlainColumns; }
  [[nodiscard]] std::size_t header_bytes() const { return header_bytes_; }
  [[nodiscard]] std::size_t block_bytes() const { return block_bytes_; }
  [[nodiscard]] const std::uint8_t* block(std::size_t index) const {
    return reinterpret_cast<const std::uint8_t*>(memory_.data()) + index * block_bytes_;
  }
  /// Bias per stored column, or null.
  [[nodiscard]] const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

 private:
  struct Column {  // where a stored column comes from; source null: padding
    const ops::MatrixSource* source = nullptr;
    int row = 0;
  };
  static PackedMatrix pack(const Isa& isa, const std::vector<Column>& order, Pool* pool);
  void pack_affine(const std::vector<Column>& order, Pool* pool);
  void choose_layout(const std::vector<Column>& order, Pool* pool);
  void put_scales(const Column& from, std::uint8_t* block, std::size_t lane) const;
  void put_codes(const Column& from, std::uint8_t* block, std::size_t lane) const;
  void pack_plain(const std::vector<Column>& order, Pool* pool);

  WeightKind kind_ = WeightKind::f32;
  ScaleKind scale_kind_ = ScaleKind::half;
  bool interleaved_ = false, symmetric_ = false;
  int columns_ = 0, depth_ = 0, group_ = 0, lanes_ = 0, stored_columns_ = 0, groups_per_run_ = 1;
  std::size_t header_bytes_ = 0, block_bytes_ = 0;
  AlignedMemory memory_;
  std::vector<float> bias_;
};

}  // namespace galley::kernels
