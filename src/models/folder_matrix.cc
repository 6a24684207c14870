#include "models/folder_matrix.h"

#include <cstring>
#include <utility>
#include <vector>

#include "ops/error.h"

namespace galley::models {
namespace {

/// Eight codes fill `Bits` whole bytes.
template <int Bits>
void unpack(const std::byte* packed, std::size_t count, std::uint8_t* out) {
  constexpr std::uint64_t mask = (1U << Bits) - 1;
  for (std::size_t i = 0; i < count; i += 8, packed += Bits, out += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, packed, Bits);
    for (int k = 0; k < 8; ++k) out[k] = static_cast<std::uint8_t>((word >> (k * Bits)) & mask);
  }
}

using Unpack = void (*)(const std::byte*, std::size_t, std::uint8_t*);

Unpack unpacker(int bits) {
  switch (bits) {
    case 2:
      return unpack<2>;
    case 3:
      return unpack<3>;
    case 4:
      return unpack<4>;
    case 5:
      return unpack<5>;
    case 6:
      return unpack<6>;
    case 8:
      return unpack<8>;
    default:
      throw ModelError("quantization to " + std::to_string(bits) + " bits is not supported");
  }
}

class FolderMatrix : public ops::MatrixSource {
 public:
  FolderMatrix(std::string name, int rows, int cols, ops::ElementType type)
      : name_(std::move(name)), rows_(rows), cols_(cols), type_(type) {}

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] int rows() const override { return rows_; }
  [[nodiscard]] int cols() const override { return cols_; }
  [[nodiscard]] ops::ElementType type() const override { return type_; }

 protected:
  void require(bool holds) const {
    if (!holds) throw Error(500, "tensor \"" + name_ + "\": read with the wrong sizes or type");
  }
  [[nodiscard]] std::size_t checked(int row) const {
    require(row >= 0 && row < rows_);
    return static_cast<std::size_t>(row);
  }
  [[nodiscard]] std::size_t width() const { return static_cast<std::size_t>(cols_); }

 private:
  std::string name_;
  int rows_, cols_;
  ops::ElementType type_;
};

class PlainMatrix final : public FolderMatrix {
 public:
  PlainMatrix(std::string name, int rows, int cols, ops::ElementType type, const std::byte* data)
      : FolderMatrix(std::move(name), rows, cols, type), data_(data) {}

  [[nodiscard]] bool quantized() const override { return false; }
  [[nodiscard]] ops::AffineFormat affine() const override { return {0, 0}; }
  void codes(int /*row*/, std::span<std::uint8_t> /*out*/) const override { require(false); }
  void scales(int /*row*/, std::span<float> /*scale*/, std::span<float> /*bias*/) const override { require(false); }
  void values(int row, std::span<float> out) const override {
    require(out.size() == width());
    widen(type(), data_ + checked(row) * width() * element_bytes(type()), out);
  }

 private:
  const std::byte* data_;
};

class AffineMatrix final : public FolderMatrix {
 public:
  AffineMatrix(std::string name, int rows, int cols, ops::AffineFormat format, ops::ElementType type,
               const std::byte* codes, const std::byte* scales, const std::byte* biases)
      : FolderMatrix(std::move(name), rows, cols, type),
        format_(format),
        unpack_(unpacker(format.bits)),
        codes_(codes),
        scales_(scales),
        biases_(biases) {}

  [[nodiscard]] bool quantized() const override { return true; }
  [[nodiscard]] ops::AffineFormat affine() const override { return format_; }

  void codes(int row, std::span<std::uint8_t> out) const override {
    require(out.size() == width());
    unpack_(codes_ + checked(row) * (width() * static_cast<std::size_t>(format_.bits) / 8), out.size(), out.data());
  }

  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    require(scale.size() == groups() && bias.size() == groups());
    const std::size_t at = checked(row) * groups() * element_bytes(type());
    widen(type(), scales_ + at, scale);
    widen(type(), biases_ + at, bias);
  }

  void values(int row, std::span<float> out) const override {
    std::vector<std::uint8_t> code(width());
    std::vector<float> scale(groups());
    std::vector<float> bias(groups());
    codes(row, code);
    scales(row, scale, bias);
    require(out.size() == width());
    expand_affine(code, scale, bias, out);
  }

 private:
  [[nodiscard]] std::size_t groups() const { return width() / static_cast<std::size_t>(format_.group); }

  ops::AffineFormat format_;
  Unpack unpack_;
  const std::byte* codes_;
  const std::byte* scales_;
  const std::byte* biases_;
};

}  // namespace

std::unique_ptr<ops::MatrixSource> make_plain_matrix(std::string name, int rows, int cols, ops::ElementType type,
                                                     const std::byte* data) {
  return std::make_unique<PlainMatrix>(std::move(name), rows, cols, type, data);
}

std::unique_ptr<ops::MatrixSource> make_affine_matrix(std::string name, int rows, int cols, ops::AffineFormat format,
                                                      ops::ElementType type, const std::byte* codes,
                                                      const std::byte* scales, const std::byte* biases) {
  return std::make_unique<AffineMatrix>(std::move(name), rows, cols, format, type, codes, scales, biases);
}

}  // namespace galley::models
