#include "ops/fused/program.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <stdexcept>
#include <utility>

namespace galley::ops {

namespace mx = mlx::core;

float* Machine::floats(int id, std::size_t n) {
  auto& memory = floats_[static_cast<std::size_t>(id)];
  if (memory.size() < n * sizeof(float)) memory = kernels::AlignedMemory(n * sizeof(float));
  return reinterpret_cast<float*>(memory.data());
}

int Machine::take_floats() {
  if (free_floats_.empty()) {
    floats_.emplace_back();
    return static_cast<int>(floats_.size()) - 1;
  }
  const int id = free_floats_.back();
  free_floats_.pop_back();
  return id;
}

int Machine::take_activations() {
  if (free_activations_.empty()) {
    activations_.push_back(std::make_unique<kernels::Activations>());
    return static_cast<int>(activations_.size()) - 1;
  }
  const int id = free_activations_.back();
  free_activations_.pop_back();
  return id;
}

namespace {

class RunProgram final : public mx::Primitive {
 public:
  RunProgram(mx::Stream stream, std::shared_ptr<Program> program, std::shared_ptr<Machine> machine)
      : Primitive(stream), program_(std::move(program)), machine_(std::move(machine)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<mx::array> weak;
    weak.reserve(outputs.size());
    for (mx::array& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      weak.push_back(mx::array::unsafe_weak_copy(out));
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([program = program_, machine = machine_, inputs, weak = std::move(weak)]() mutable {
      program->run(*machine, inputs, weak);
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("fused CPU programs run on a CPU stream");
  }
  DEFINE_NAME(RunProgram)

 private:
  std::shared_ptr<Program> program_;
  std::shared_ptr<Machine> machine_;
};

}  // namespace

Program::Program(std::shared_ptr<const RaggedStep> step) : step_(std::move(step)) {
  const std::int32_t* const end = step_->tables.data() + step_->tables.size();
  for (const std::int32_t* table = step_->tables.data(); table < end;
       table += static_cast<std::ptrdiff_t>(step_->row_count) * step_->table_stride) {
    for (const std::int32_t row : step_->rows) {
      tables_.push_back(table + static_cast<std::ptrdiff_t>(row) * step_->table_stride);
    }
  }
  output({1}, mx::int32);  // the order token
}

std::size_t Program::input(mx::array a) {
  inputs_.push_back(std::move(a));
  return inputs_.size();  // [0] is the order token
}

std::size_t Program::output(mx::Shape shape, mx::Dtype type) {
  output_shapes_.push_back(std::move(shape));
  output_types_.push_back(type);
  return output_shapes_.size() - 1;
}

void Program::run(Machine& machine, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) const {
  PhaseContext context{machine, *step_, tables_, inputs, outputs};
  outputs.front().data<std::int32_t>()[0] = 0;
  for (const Phase& phase : phases_) phase(context);
}

std::vector<mx::array> Program::submit(std::shared_ptr<Program> program, std::shared_ptr<Machine> machine,
                                       const mx::array& order) {
  std::vector<mx::array> inputs{order};
  for (mx::array& a : program->inputs_) inputs.push_back(std::move(a));
  program->inputs_.clear();
  const auto stream = mx::default_stream(mx::Device(mx::Device::cpu));
  auto shapes = program->output_shapes_;
  auto types = program->output_types_;
  return mx::array::make_arrays(std::move(shapes), types,
                                std::make_shared<RunProgram>(stream, std::move(program), std::move(machine)), inputs);
}

}  // namespace galley::ops
