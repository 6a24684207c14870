// GGUF's tensor types, one table row each: how many bytes a block takes and how a row of blocks is decoded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/weights.h"

namespace galley::models {

struct GgufType {
  std::uint32_t id;          ///< as stored in the file
  const char* name;          ///< as llama.cpp prints it
  std::size_t block;         ///< elements in a block; a row is a whole number of blocks
  std::size_t block_bytes;   ///< bytes of a block
  ops::ElementType type;     ///< plain: what is stored; quantized: f32, as scales and biases are handed out
  ops::AffineFormat affine;  ///< bits = 0: plain numbers

  // Decoders of `blocks` consecutive blocks; null for plain numbers. One scale and bias per affine.group elements.
  void (*codes)(const std::byte* row, std::size_t blocks, std::uint8_t* out);
  void (*scales)(const std::byte* row, std::size_t blocks, float* scale, float* bias);
  // The same scales as they are stored, in two levels with one run a block; null where they have one level. Halves are
  // written as bits; biases only with level_biases.
  void (*levels)(const std::byte* row, std::size_t blocks, const ops::ScaleLevels& out) = nullptr;
  bool level_biases = false;

  [[nodiscard]] bool quantized() const { return codes != nullptr; }
};

/// Null for a type that is not supported.
const GgufType* find_gguf_type(std::uint32_t id);

/// The name of any type, supported or not: "IQ3_S", or "number 77" for an unknown one.
std::string gguf_type_name(std::uint32_t id);

/// "F32, F16, Q4_0 …": for messages.
std::string supported_gguf_types();

}  // namespace galley::models
