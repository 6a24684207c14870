// Writes what the loader reads from a GGUF file, for comparison with another reader.
//
//   galley-gguf-values FILE.gguf OUT
//
// OUT: for every tensor of two dimensions, in order of the file: float32 values, row by row. On standard output one
// line a tensor: name, type, rows, columns.
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <vector>

#include "models/gguf.h"
#include "models/gguf_matrix.h"
#include "ops/error.h"

namespace {

void run(const char* file, const char* result) {
  const galley::models::GgufFile gguf(file);
  std::ofstream out(result, std::ios::binary);
  for (const galley::models::GgufTensor& tensor : gguf.tensors()) {
    if (tensor.shape.size() != 2) continue;
    const auto matrix = galley::models::make_gguf_matrix(tensor, tensor.name, 0);
    std::cout << tensor.name << ' ' << tensor.type->name << ' ' << matrix->rows() << ' ' << matrix->cols() << '\n';
    std::vector<float> values(static_cast<std::size_t>(matrix->cols()));
    for (int row = 0; row < matrix->rows(); ++row) {
      matrix->values(row, values);
      out.write(reinterpret_cast<const char*>(values.data()),
                static_cast<std::streamsize>(values.size() * sizeof(float)));
    }
  }
  if (!out.flush()) throw galley::Error(500, std::string("cannot write ") + result);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: galley-gguf-values FILE.gguf OUT\n";
    return EXIT_FAILURE;
  }
  try {
    run(argv[1], argv[2]);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "galley-gguf-values: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
