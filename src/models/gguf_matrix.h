// One matrix of a GGUF file as a MatrixSource: plain or quantized, read in place.
#pragma once
#include <memory>
#include <string>

#include "models/gguf.h"
#include "ops/weights.h"

namespace galley::models {

/// Where a row of a query or key projection lies in the file. Hugging Face pairs element i of a head with element
/// i + head_dim/2 for rotation; GGUF files of the llama architecture have such pairs side by side. `head_dim` 0: rows
/// are not permuted.
int gguf_stored_row(int row, int head_dim);

/// `tensor` has two dimensions, both below 2^31, and outlives the matrix, as does its file. `head_dim`: of a projection
/// whose rows are permuted (a divisor of the rows), else 0. With the matrix the tensor's pages leave memory (reading
/// them again is possible): a model is packed matrix by matrix, and must not need its file in memory as well.
std::unique_ptr<ops::MatrixSource> make_gguf_matrix(const GgufTensor& tensor, std::string name, int head_dim);

}  // namespace galley::models
