#include "models/stacked_matrix.h"

#include <string>
#include <utility>

#include "ops/error.h"

namespace galley::models {
namespace {

class StackedMatrix final : public ops::MatrixSource {
 public:
  explicit StackedMatrix(std::vector<std::unique_ptr<ops::MatrixSource>> parts) : parts_(std::move(parts)) {}

  [[nodiscard]] const std::string& name() const override { return parts_.front()->name(); }
  [[nodiscard]] int rows() const override { return static_cast<int>(parts_.size()) * parts_.front()->rows(); }
  [[nodiscard]] int cols() const override { return parts_.front()->cols(); }
  [[nodiscard]] bool quantized() const override { return parts_.front()->quantized(); }
  [[nodiscard]] ops::AffineFormat affine() const override { return parts_.front()->affine(); }
  [[nodiscard]] ops::ElementType type() const override { return parts_.front()->type(); }
  void codes(int row, std::span<std::uint8_t> out) const override { part(row).codes(row % each(), out); }
  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    part(row).scales(row % each(), scale, bias);
  }
  void values(int row, std::span<float> out) const override { part(row).values(row % each(), out); }

 private:
  [[nodiscard]] int each() const { return parts_.front()->rows(); }
  [[nodiscard]] const ops::MatrixSource& part(int row) const { return *parts_[static_cast<std::size_t>(row / each())]; }

  std::vector<std::unique_ptr<ops::MatrixSource>> parts_;
};

class RowsOfEach final : public ops::MatrixSource {
 public:
  RowsOfEach(std::unique_ptr<ops::MatrixSource> whole, int count, int first, int rows)
      : whole_(std::move(whole)), count_(count), first_(first), rows_(rows) {}

  [[nodiscard]] const std::string& name() const override { return whole_->name(); }
  [[nodiscard]] int rows() const override { return count_ * rows_; }
  [[nodiscard]] int cols() const override { return whole_->cols(); }
  [[nodiscard]] bool quantized() const override { return whole_->quantized(); }
  [[nodiscard]] ops::AffineFormat affine() const override { return whole_->affine(); }
  [[nodiscard]] ops::ElementType type() const override { return whole_->type(); }
  [[nodiscard]] ops::ScaleRuns runs() const override { return whole_->runs(); }
  void codes(int row, std::span<std::uint8_t> out) const override { whole_->codes(at(row), out); }
  void scales(int row, std::span<float> scale, std::span<float> bias) const override {
    whole_->scales(at(row), scale, bias);
  }
  void levels(int row, const ops::ScaleLevels& out) const override { whole_->levels(at(row), out); }
  void values(int row, std::span<float> out) const override { whole_->values(at(row), out); }

 private:
  [[nodiscard]] int at(int row) const { return row / rows_ * (whole_->rows() / count_) + first_ + row % rows_; }

  std::unique_ptr<ops::MatrixSource> whole_;
  int count_, first_, rows_;
};

}  // namespace

std::unique_ptr<ops::MatrixSource> rows_of_each(std::unique_ptr<ops::MatrixSource> whole, int count, int first,
                                                int rows) {
  return std::make_unique<RowsOfEach>(std::move(whole), count, first, rows);
}

std::unique_ptr<ops::MatrixSource> stack_matrices(const std::filesystem::path& file,
                                                  std::vector<std::unique_ptr<ops::MatrixSource>> parts) {
  const ops::MatrixSource& first = *parts.at(0);
  for (const auto& part : parts) {
    const bool alike = part->rows() == first.rows() && part->cols() == first.cols() &&
                       part->quantized() == first.quantized() && part->type() == first.type() &&
                       (!first.quantized() ||
                        (part->affine().bits == first.affine().bits && part->affine().group == first.affine().group));
    if (!alike) {
      throw ModelError(file.string() + ": tensor \"" + part->name() + "\" is stored in another way than \"" +
                       first.name() + "\"; the experts of a layer must be alike");
    }
  }
  return std::make_unique<StackedMatrix>(std::move(parts));
}

}  // namespace galley::models
