// Matrices of one shape seen as one, each below the one before: experts stored one by one.
#pragma once
#include <filesystem>
#include <memory>
#include <vector>

#include "ops/weights.h"

namespace galley::models {

/// Throws ModelError naming `file` and the tensor that is stored in another way than the first.
std::unique_ptr<ops::MatrixSource> stack_matrices(const std::filesystem::path& file,
                                                  std::vector<std::unique_ptr<ops::MatrixSource>> parts);

/// `whole` is `count` equal parts one below the other; of each the rows [first, first + rows), one below the other.
std::unique_ptr<ops::MatrixSource> rows_of_each(std::unique_ptr<ops::MatrixSource> whole, int count, int first,
                                                int rows);

}  // namespace galley::models
