// Loading: packs weights for the kernels, and keeps stock ones beside them only when an op is switched off.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "ops/fused/fused_values.h"

namespace galley::ops {

namespace {

bool same_format(const MatrixSource& a, const MatrixSource& b) {
  if (a.quantized() != b.quantized()) return false;
  return a.quantized() ? a.affine().group == b.affine().group : a.type() == b.type();
}

}  // namespace

FusedOps::FusedOps(kernels::Isa isa, int threads, FusedSwitches switches)
    : machine_(std::make_shared<Machine>(std::move(isa), threads)),
      switches_(switches),
      order_(mlx::core::zeros({1}, mlx::core::int32)) {
  if (needs_stock()) stock_ = std::make_unique<StockOps>(StockNumerics{.float32 = true, .dense = true});
}

FusedOps::~FusedOps() = default;

std::vector<LinearPtr> FusedOps::load_linears(const std::vector<const MatrixSource*>& group,
                                              const std::vector<const VectorSource*>& biases) {
  const kernels::Isa& isa = machine_->context.isa();
  kernels::Pool* pool = &machine_->context.pool();
  auto packed = std::make_shared<PackedGroup>();
  const bool together = std::ranges::all_of(group, [&](const auto* m) { return same_format(*m, *group.front()); });
  if (together) {
    packed->matrices.push_back(kernels::PackedMatrix::concatenate(isa, group, biases, pool));
    int column = 0;
    for (const MatrixSource* matrix : group) {
      packed->parts.push_back({0, column});
      column += matrix->rows();
    }
  } else {
    for (std::size_t i = 0; i < group.size(); ++i) {
      const std::span<const VectorSource* const> bias =
          biases.empty() ? std::span<const VectorSource* const>{} : std::span(biases).subspan(i, 1);
      packed->matrices.push_back(kernels::PackedMatrix::concatenate(isa, std::span(group).subspan(i, 1), bias, pool));
      packed->parts.push_back({i, 0});
    }
  }
  for (const auto& matrix : packed->matrices) weight_bytes_ += matrix.bytes();

  std::vector<LinearPtr> stock;
  if (needs_stock()) stock = stock_->load_linears(group, biases);
  std::vector<LinearPtr> linears;
  for (std::size_t i = 0; i < group.size(); ++i) {
    auto linear = std::make_shared<PackedLinear>();
    linear->rows = group[i]->rows();
    linear->cols = group[i]->cols();
    linear->group = packed;
    linear->part = i;
    if (!stock.empty()) linear->stock = stock[i];
    linears.push_back(std::move(linear));
  }
  return linears;
}

GatedMlp FusedOps::load_mlp(const MatrixSource& gate, const MatrixSource& up, const MatrixSource& down,
                            Activation activation) {
  auto mlp = std::make_shared<PackedMlp>();
  mlp->rows = gate.rows();
  mlp->cols = gate.cols();
  mlp->gate_up =
      kernels::PackedMatrix::interleave(machine_->context.isa(), gate, up, nullptr, nullptr, &machine_->context.pool());
  weight_bytes_ += mlp->gate_up.bytes();
  GatedMlp result{mlp, mlp, load_linears({&down}, {}).front(), activation};
  if (needs_stock()) {
    const GatedMlp stock = stock_->load_mlp(gate, up, down, activation);
    mlp->stock_gate = stock.gate;
    mlp->stock_up = stock.up;
  }
  return result;
}

LinearPtr FusedOps::load_embedding(const MatrixSource& table) { return load_linears({&table}, {}).front(); }

NormPtr FusedOps::load_norm(const VectorSource& weight, float eps) {
  auto norm = std::make_shared<PackedNorm>();
  norm->eps = eps;
  norm->weight = weight.values;
  if (needs_stock()) norm->stock = stock_->load_norm(weight, eps);
  return norm;
}

NormPtr FusedOps::plain_norm(int size, float eps) {
  auto norm = std::make_shared<PackedNorm>();
  norm->eps = eps;
  norm->weight.assign(static_cast<std::size_t>(size), 1.0F);
  if (needs_stock()) norm->stock = stock_->plain_norm(size, eps);
  return norm;
}

FactorPtr FusedOps::load_factor(const VectorSource& one_number) {
  auto factor = std::make_shared<PackedFactor>();
  factor->number = one_number.values.at(0);
  if (needs_stock()) factor->stock = stock_->load_factor(one_number);
  return factor;
}

std::shared_ptr<const std::vector<float>> FusedOps::rope_table(const Rope& rope, int positions) {
  const auto same = [&](const RopeEntry& e) {
    return e.rope.dims == rope.dims && e.rope.base == rope.base && e.rope.scale == rope.scale &&
           e.rope.traditional == rope.traditional && e.rope.frequencies == rope.frequencies;
  };
  auto entry = std::ranges::find_if(ropes_, same);
  if (entry == ropes_.end()) entry = ropes_.insert(ropes_.end(), {rope, nullptr});
  const auto half = static_cast<std::size_t>(rope.dims / 2);
  const std::size_t have = entry->table ? entry->table->size() / static_cast<std::size_t>(rope.dims) : 0;
  if (have >= static_cast<std::size_t>(positions)) return entry->table;

  // Grown by doubling. Steps in flight keep the table they were recorded with; entries are the same in both.
  std::size_t count = std::max<std::size_t>(have, 1024);
  while (count < static_cast<std::size_t>(positions)) count *= 2;
  std::vector<double> inverse(half);
  for (std::size_t i = 0; i < half; ++i) {
    inverse[i] = rope.frequencies.empty()
                     ? std::pow(static_cast<double>(rope.base), -2.0 * static_cast<double>(i) / rope.dims)
                     : 1.0 / static_cast<double>(rope.frequencies[i]);
  }
  auto table = std::make_shared<std::vector<float>>(count * static_cast<std::size_t>(rope.dims));
  for (std::size_t p = 0; p < count; ++p) {
    float* row = table->data() + p * static_cast<std::size_t>(rope.dims);
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * static_cast<double>(rope.scale) * inverse[i];
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
    }
  }
  entry->table = table;
  return table;
}

}  // namespace galley::ops
