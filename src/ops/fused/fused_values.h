// Private to the fused backend: prepared weights, and what a Value of it holds.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "ops/fused/fused_ops.h"

namespace galley::ops {

/// How the consumer wants a phase's result; the consumer fills it in while it is recorded, after the producer.
struct FusedOps::Next {
  const kernels::PackedMatrix* consumer = nullptr;
  const float* norm = nullptr;
  bool plain = false;  ///< f32 rows for MLX, no consumer
};

/// The KV that the next attention reads: it fills this in while it is recorded, after the product that fetches ahead.
struct FusedOps::Upcoming {
  std::optional<kernels::PagedKv> kv;
  int table = 0;  ///< of the step's
  int window = 0;
};

/// Linears that share an input: one packed matrix, or several where their formats differ.
struct PackedGroup {
  std::vector<kernels::PackedMatrix> matrices;
  struct Part {
    std::size_t matrix = 0;
    int first_column = 0;  ///< within the matrix
  };
  std::vector<Part> parts;
};

struct FusedOps::PackedLinear final : Linear {
  std::shared_ptr<const PackedGroup> group;
  std::size_t part = 0;
  LinearPtr stock;  ///< when an op is switched off

  [[nodiscard]] const kernels::PackedMatrix& matrix() const { return group->matrices[group->parts[part].matrix]; }
};

struct FusedOps::PackedNorm final : Norm {
  std::vector<float> weight;
  NormPtr stock;
};

struct FusedOps::PackedFactor final : Factor {
  float number = 1.0F;
  FactorPtr stock;
};

/// Gate and up of one MLP, interleaved; both GatedMlp::gate and ::up point here.
struct FusedOps::PackedMlp final : Linear {
  kernels::PackedMatrix gate_up;
  LinearPtr stock_gate, stock_up;
};

struct FusedOps::PackedExperts final : Experts {
  std::vector<kernels::PackedMatrix> gate_up, down;  ///< [experts]
  std::vector<float> factors;                        ///< [experts], or none
  Moe stock;
};

inline kernels::Gate gate_of(Activation activation) {
  return activation == Activation::silu ? kernels::Gate::silu : kernels::Gate::gelu_tanh;
}

/// norm_linear(), recorded up to its input; what becomes of the product is decided by its consumer.
struct FusedOps::Projection {
  std::shared_ptr<const PackedGroup> group;
  std::vector<std::shared_ptr<ActivationsHandle>> inputs;  ///< per matrix of the group
  float eps = 1e-5F;
};

struct FusedOps::Hidden final : Value::Impl {
  int columns = 0;
  std::shared_ptr<FloatsHandle> floats;            ///< [T, columns], or null
  std::shared_ptr<ActivationsHandle> activations;  ///< what `next` describes, or null
  std::shared_ptr<Next> next;
  const Program* program = nullptr;  ///< that holds the producing phase
  std::shared_ptr<const Projection> projection;
  std::size_t part = 0;                                 ///< of the projection
  std::optional<mlx::core::array> array;                ///< [T, columns] or [n, vocab]
  std::optional<std::size_t> head_tokens, head_logits;  ///< outputs of the program: the result of logits()
};

}  // namespace galley::ops
