// A program: the phases of one ragged step, recorded while a family's forward runs and executed by one MLX primitive.
//
// One primitive for many phases keeps MLX's graph out of the step (about 10 % with five primitives a layer). Buffers
// belong to the Machine and are reused from step to step; MLX doesn't see them, so each program takes the token output
// of the one before as an input, which keeps them in order.
#pragma once
#include <mlx/mlx.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ops/fused/ragged_step.h"
#include "ops/kernels/kernels.h"

namespace galley::ops {

/// The kernels' context and the buffers of the step in flight. Lives as long as the backend; recording happens on the
/// engine thread, use on the MLX stream's thread.
class Machine {
 public:
  Machine(kernels::Isa isa, int threads) : context(std::move(isa), threads) {}

  kernels::Context context;

  /// f32 buffer `id` with room for `n` numbers; growing discards what was in it.
  float* floats(int id, std::size_t n);
  [[nodiscard]] float* floats(int id) const {
    return reinterpret_cast<float*>(const_cast<std::byte*>(floats_[static_cast<std::size_t>(id)].data()));
  }
  kernels::Activations& activations(int id) { return *activations_[static_cast<std::size_t>(id)]; }

  // Recording: ids are free again when nobody who records holds them; phases run in the order of recording, so a buffer
  // may be handed on as soon as its last reader has been recorded.
  int take_floats();
  int take_activations();
  void give_floats(int id) { free_floats_.push_back(id); }
  void give_activations(int id) { free_activations_.push_back(id); }

 private:
  std::vector<kernels::AlignedMemory> floats_;
  std::vector<std::unique_ptr<kernels::Activations>> activations_;
  std::vector<int> free_floats_, free_activations_;
};

/// A held buffer id; gives it back when the last copy of the handle is gone.
class FloatsHandle {
 public:
  explicit FloatsHandle(Machine& machine) : machine_(machine), id(machine.take_floats()) {}
  ~FloatsHandle() { machine_.give_floats(id); }
  FloatsHandle(const FloatsHandle&) = delete;
  FloatsHandle& operator=(const FloatsHandle&) = delete;

 private:
  Machine& machine_;

 public:
  const int id;
};
class ActivationsHandle {
 public:
  explicit ActivationsHandle(Machine& machine) : machine_(machine), id(machine.take_activations()) {}
  ~ActivationsHandle() { machine_.give_activations(id); }
  ActivationsHandle(const ActivationsHandle&) = delete;
  ActivationsHandle& operator=(const ActivationsHandle&) = delete;

 private:
  Machine& machine_;

 public:
  const int id;
};

/// What a phase runs on.
struct PhaseContext {
  Machine& machine;
  const RaggedStep& step;
  std::span<const std::int32_t* const> tables;  ///< [tables][T]
  const std::vector<mlx::core::array>& inputs;  ///< of the primitive; [0] is the order token
  std::vector<mlx::core::array>& outputs;       ///< allocated; [0] is the order token

  /// Where the tokens stand, through one of the step's block tables.
  [[nodiscard]] kernels::RowPlaces places(int table) const {
    const auto tokens = step.tokens.size();
    return {step.size(), step.positions.data(),
            tables.subspan(static_cast<std::size_t>(table) * tokens, tokens).data()};
  }
};

class Program {
 public:
  explicit Program(std::shared_ptr<const RaggedStep> step);

  using Phase = std::function<void(PhaseContext&)>;
  void add(Phase phase) { phases_.push_back(std::move(phase)); }
  /// An array that phases read; returns its index in PhaseContext::inputs.
  std::size_t input(mlx::core::array a);
  /// An array that phases fill; returns its index in PhaseContext::outputs.
  std::size_t output(mlx::core::Shape shape, mlx::core::Dtype type);

  [[nodiscard]] const RaggedStep& step() const { return *step_; }
  void run(Machine& machine, const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) const;

  /// Wraps the program into one primitive after `order` (the previous program's token). Returns its outputs, lazy; the
  /// first is its own order token.
  static std::vector<mlx::core::array> submit(std::shared_ptr<Program> program, std::shared_ptr<Machine> machine,
                                              const mlx::core::array& order);

 private:
  std::shared_ptr<const RaggedStep> step_;
  std::vector<const std::int32_t*> tables_;  ///< [tables][T] block table of each token's row
  std::vector<Phase> phases_;
  std::vector<mlx::core::array> inputs_;
  std::vector<mlx::core::Shape> output_shapes_;
  std::vector<mlx::core::Dtype> output_types_;
};

}  // namespace galley::ops
