// Reader of the safetensors container.
//   https://github.com/huggingface/safetensors: a length, a JSON header, then the tensors' bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "models/mapped_file.h"

namespace galley::models {

struct SafeTensor {
  std::string dtype;                 ///< "F32", "BF16", "U32" …
  std::vector<std::uint64_t> shape;  ///< outermost dimension first
  const std::byte* data = nullptr;   ///< inside the mapping, as many bytes as dtype and shape need; any alignment
};

/// The header is checked on opening: names are unique, every tensor lies inside the file and is as long as its shape
/// says. Anything else is a ModelError naming file and tensor.
class SafeTensorsFile {
 public:
  explicit SafeTensorsFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return file_.path(); }
  [[nodiscard]] std::size_t size() const { return file_.bytes().size(); }
  [[nodiscard]] const std::map<std::string, SafeTensor>& tensors() const { return tensors_; }
  void release_pages() const noexcept { file_.release_pages(); }

 private:
  MappedFile file_;
  std::map<std::string, SafeTensor> tensors_;
};

}  // namespace galley::models
