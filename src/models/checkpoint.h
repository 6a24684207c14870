// A model on disk: one GGUF file, or an MLX / Hugging Face folder. Both are mapped, bounds-checked, and shown under the
// same canonical tensor names (Hugging Face's: "model.layers.0.self_attn.q_proj.weight"), with q and k rows
// un-permuted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/config.h"
#include "models/generation_config.h"
#include "ops/weights.h"
#include "text/assets.h"

namespace galley::models {

class Checkpoint {
 public:
  virtual ~Checkpoint() = default;

  [[nodiscard]] virtual const Config& config() const = 0;
  /// What the text room needs: tokenizer, chat template, special tokens, end-of-generation ids.
  [[nodiscard]] virtual const text::Assets& assets() const = 0;
  /// Sampling values its makers recommend; none unless the files name some.
  [[nodiscard]] virtual GenerationConfig generation_config() const { return {}; }
  [[nodiscard]] virtual std::filesystem::path path() const = 0;
  /// Bytes on disk of everything that was mapped.
  [[nodiscard]] virtual std::size_t file_bytes() const = 0;
  /// One line for the ready card: "GGUF v3, Q4_1 + Q8_0" or "MLX 4-bit, groups of 64".
  [[nodiscard]] virtual std::string format() const = 0;

  [[nodiscard]] virtual bool has(const std::string& tensor) const = 0;
  /// Throws ModelError naming file, tensor, expected and found shape when absent or of another shape.
  [[nodiscard]] virtual std::unique_ptr<ops::MatrixSource> matrix(const std::string& tensor, int rows,
                                                                  int cols) const = 0;
  /// A tensor [count, rows, cols] as one matrix [count * rows, cols]: the experts of a layer.
  [[nodiscard]] virtual std::unique_ptr<ops::MatrixSource> stacked(const std::string& tensor, int count, int rows,
                                                                   int cols) const = 0;
  [[nodiscard]] virtual ops::VectorSource vector(const std::string& tensor, int size) const = 0;
  /// Tells the system that the mapped pages are no longer needed in memory (after packing).
  virtual void release_pages() const = 0;
};

/// Opens a .gguf file or a folder with config.json. Throws ModelError.
std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& path);

}  // namespace galley::models
