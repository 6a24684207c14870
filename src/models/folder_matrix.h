// Matrices as safetensors files hold them. The data is borrowed, its size already checked.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "models/checkpoint_numbers.h"
#include "ops/weights.h"

namespace galley::models {

/// Plain numbers, row by row.
std::unique_ptr<ops::MatrixSource> make_plain_matrix(std::string name, int rows, int cols, ops::ElementType type,
                                                     const std::byte* data);

/// MLX's affine quantization: `codes` holds a row as one little-endian stream of format.bits-wide codes (32-bit words
/// in the file, whatever the width), `scales` and `biases` [rows, cols / format.group] of `type`.
/// `cols` is a multiple of format.group.
std::unique_ptr<ops::MatrixSource> make_affine_matrix(std::string name, int rows, int cols, ops::AffineFormat format,
                                                      ops::ElementType type, const std::byte* codes,
                                                      const std::byte* scales, const std::byte* biases);

}  // namespace galley::models
