// Recording: each composite op adds its phases to the program of the step. A producer learns from its consumer, which
// is recorded later, which norm follows and in which form the result is read.
#include "ops/fused/fused_ops.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ops/error.h"
#include "ops/fused/fused_values.h"

namespace galley::ops {

namespace mx = mlx::core;

NormPtr FusedOps::stock_norm(const NormPtr& norm) {
  return norm == nullptr ? nullptr : dynamic_cast<const PackedNorm&>(*norm).stock;
}

FactorPtr FusedOps::stock_factor(const FactorPtr& factor) {
  return factor == nullptr ? nullptr : dynamic_cast<const PackedFactor&>(*factor).stock;
}

float FusedOps::factor_of(const FactorPtr& factor) {
  return factor == nullptr ? 1.0F : dynamic_cast<const PackedFactor&>(*factor).number;
}

const FusedOps::Hidden& FusedOps::hidden(const Value& value) const {
  return dynamic_cast<const Hidden&>(*value.impl());
}

void FusedOps::recover() {
  step_.reset();
  program_.reset();
  outputs_.clear();
  order_ = mx::zeros({1}, mx::int32);  // the failed program's token will never be there
}

void FusedOps::begin(std::shared_ptr<const RaggedStep> step) {
  step_ = std::move(step);
  program_ = std::make_shared<Program>(step_);
  upcoming_ = std::make_shared<Upcoming>();
  if (stock_) {
    const auto n = static_cast<int>(step_->tokens.size());
    stock_->begin(mx::array(step_->tokens.begin(), mx::Shape{1, n}, mx::int32));
  }
}

void FusedOps::flush() {
  outputs_ = Program::submit(std::move(program_), machine_, order_);
  order_ = outputs_.front();
  program_ = std::make_shared<Program>(step_);
}

/// Leaves `x`, normed, in the form that `consumer` reads, and returns the id of its activations. They stay valid as
/// long as `keep` (for those made here) and the value (for those its producer left) live.
std::shared_ptr<ActivationsHandle> FusedOps::consume(const Value& value, const PackedNorm* norm,
                                                     const kernels::PackedMatrix& consumer) {
  const Hidden& x = hidden(value);
  const float* weight = norm == nullptr ? nullptr : norm->weight.data();
  if (x.next != nullptr && x.program == program_.get()) {
    if (x.next->consumer == nullptr && !x.next->plain) {
      x.next->consumer = &consumer;
      x.next->norm = weight;
      return x.activations;
    }
    if (x.next->norm == weight && x.next->consumer->input_form() == consumer.input_form()) return x.activations;
  }
  const auto source = in_floats(value);
  auto activations = std::make_shared<ActivationsHandle>(*machine_);
  program_->add(
      [from = source->floats->id, to = activations->id, columns = source->columns, weight, &consumer](PhaseContext& c) {
        kernels::Activations& out = c.machine.activations(to);
        c.machine.context.reshape(out, c.step.size(), consumer, weight != nullptr);
        kernels::norm_quantize(c.machine.context, c.machine.floats(from), static_cast<std::size_t>(columns), nullptr,
                               weight, out);
      });
  return activations;
}

/// The value as f32 rows in one of the machine's buffers.
std::shared_ptr<const FusedOps::Hidden> FusedOps::in_floats(const Value& value) {
  auto x = std::dynamic_pointer_cast<const Hidden>(value.impl());
  if (x->floats != nullptr) return x;
  // It came from MLX (or must pass through it, like the result of an attention that nobody read in its own form).
  const mx::array array = x->array ? *x->array : to_array(value);
  auto imported = std::make_shared<Hidden>();
  imported->columns = x->columns;
  imported->floats = std::make_shared<FloatsHandle>(*machine_);
  const std::size_t index = program_->input(mx::contiguous(mx::astype(array, mx::float32)));
  program_->add([index, to = imported->floats->id](PhaseContext& c) {
    const mx::array& in = c.inputs[index];
    std::copy_n(in.data<float>(), in.size(), c.machine.floats(to, in.size()));
  });
  return imported;
}

Value FusedOps::embed(const LinearPtr& table, float scale) {
  const auto& packed = dynamic_cast<const PackedLinear&>(*table);
  if (!switches_.embed) return from_array(StockOps::array_of(stock_->embed(packed.stock, scale)));
  auto x = std::make_shared<Hidden>();
  x->columns = packed.cols;
  x->floats = std::make_shared<FloatsHandle>(*machine_);
  x->activations = std::make_shared<ActivationsHandle>(*machine_);
  x->next = std::make_shared<Next>();
  x->program = program_.get();
  program_->add([matrix = &packed.matrix(), next = x->next, y = x->floats->id, out = x->activations->id,
                 columns = x->columns, scale](PhaseContext& c) {
    const auto ld = static_cast<std::size_t>(columns);
    kernels::Activations* activations = nullptr;
    if (next->consumer != nullptr) {
      activations = &c.machine.activations(out);
      c.machine.context.reshape(*activations, c.step.size(), *next->consumer, next->norm != nullptr);
    }
    kernels::embed(c.machine.context, *matrix, c.step.tokens, scale, c.machine.floats(y, c.step.tokens.size() * ld), ld,
                   next->norm, activations);
  });
  return Value(std::move(x));
}

std::vector<Value> FusedOps::norm_linear(const Value& x, const NormPtr& norm, const std::vector<LinearPtr>& group) {
  const auto& packed_norm = dynamic_cast<const PackedNorm&>(*norm);
  std::vector<Value> values;
  if (!switches_.norm_linear) {
    std::vector<LinearPtr> stock;
    for (const LinearPtr& linear : group) stock.push_back(dynamic_cast<const PackedLinear&>(*linear).stock);
    const Value input = StockOps::value_of(mx::expand_dims(to_array(x), 0));
    for (const Value& v : stock_->norm_linear(input, packed_norm.stock, stock)) {
      values.push_back(from_array(StockOps::array_of(v)));
    }
    return values;
  }
  auto projection = std::make_shared<Projection>();
  projection->group = dynamic_cast<const PackedLinear&>(*group.front()).group;
  projection->eps = norm->eps;
  for (const kernels::PackedMatrix& matrix : projection->group->matrices) {
    projection->inputs.push_back(consume(x, &packed_norm, matrix));
  }
  for (const LinearPtr& linear : group) {
    const auto& packed = dynamic_cast<const PackedLinear&>(*linear);
    if (packed.group != projection->group) throw std::logic_error("norm_linear: linears of different groups");
    auto part = std::make_shared<Hidden>();
    part->columns = packed.rows;
    part->projection = projection;
    part->part = packed.part;
    part->program = program_.get();
    values.emplace_back(std::move(part));
  }
  return values;
}

Value FusedOps::add_residual(const std::shared_ptr<ActivationsHandle>& input, const kernels::PackedMatrix& matrix,
                             const Value& residual) {
  const auto base = in_floats(residual);
  auto x = std::make_shared<Hidden>();
  x->columns = matrix.columns();
  x->floats = std::make_shared<FloatsHandle>(*machine_);
  x->activations = std::make_shared<ActivationsHandle>(*machine_);
  x->next = std::make_shared<Next>();
  x->program = program_.get();
  program_->add([&matrix, in = input->id, from = base->floats->id, y = x->floats->id, out = x->activations->id,
                 next = x->next, columns = x->columns](PhaseContext& c) {
    kernels::Residual to;
    to.ld = static_cast<std::size_t>(columns);
    to.y = c.machine.floats(y, c.step.tokens.size() * to.ld);
    to.residual = c.machine.floats(from);
    to.norm = next->norm;
    if (next->consumer != nullptr) {
      to.out = &c.machine.activations(out);
      c.machine.context.reshape(*to.out, c.step.size(), *next->consumer, next->norm != nullptr);
    }
    kernels::linear_residual(c.machine.context, {&matrix, &c.machine.activations(in)}, to);
  });
  return Value(std::move(x));
}

Value FusedOps::linear_residual(const Value& x, const LinearPtr& linear, const Value& residual) {
  const auto& packed = dynamic_cast<const PackedLinear&>(*linear);
  if (!switches_.linear_residual) {
    const Value values[] = {x, residual};
    const std::vector<mx::array> arrays = to_arrays(values);
    return from_array(
        StockOps::array_of(stock_->linear_residual(StockOps::value_of(mx::expand_dims(arrays[0], 0)), packed.stock,
                                                   StockOps::value_of(mx::expand_dims(arrays[1], 0)))));
  }
  return add_residual(consume(x, nullptr, packed.matrix()), packed.matrix(), residual);
}

Value FusedOps::gated_mlp(const Value& x, const NormPtr& norm, const GatedMlp& mlp) {
  const auto& packed_norm = dynamic_cast<const PackedNorm&>(*norm);
  const auto& packed = dynamic_cast<const PackedMlp&>(*mlp.gate);
  const auto& down = dynamic_cast<const PackedLinear&>(*mlp.down);
  if (!switches_.gated_mlp) {
    const GatedMlp stock{packed.stock_gate, packed.stock_up,           down.stock,
                         mlp.activation,    stock_norm(mlp.post_norm), stock_factor(mlp.post_factor)};
    const Value input = StockOps::value_of(mx::expand_dims(to_array(x), 0));
    return from_array(StockOps::array_of(stock_->gated_mlp(input, packed_norm.stock, stock)));
  }
  const auto input = consume(x, &packed_norm, packed.gate_up);
  const auto gated = std::make_shared<ActivationsHandle>(*machine_);
  program_->add([matrix = &packed.gate_up, in = input->id, out = gated->id, consumer = &down.matrix(), eps = norm->eps,
                 gate = gate_of(mlp.activation), upcoming = upcoming_](PhaseContext& c) {
    kernels::Activations& to = c.machine.activations(out);
    c.machine.context.reshape(to, c.step.size(), *consumer, false);
    kernels::KvAhead ahead;
    if (upcoming->kv) ahead = {c.places(upcoming->table), *upcoming->kv, upcoming->window};
    kernels::linear_gated(c.machine.context, {matrix, &c.machine.activations(in), eps, upcoming->kv ? &ahead : nullptr},
                          gate, to);
  });
  if (!mlp.post_norm) {
    if (mlp.post_factor) throw std::logic_error("gated_mlp: a factor without a norm before it");
    return add_residual(gated, down.matrix(), x);
  }
  return add_normed_residual(gated, down.matrix(), dynamic_cast<const PackedNorm&>(*mlp.post_norm), x,
                             factor_of(mlp.post_factor));
}

Value FusedOps::logits(const Value& x, const NormPtr& norm, const LinearPtr& head, float softcap) {
  const auto& packed_norm = dynamic_cast<const PackedNorm&>(*norm);
  const auto& packed = dynamic_cast<const PackedLinear&>(*head);
  auto result = std::make_shared<Hidden>();
  result->columns = packed.rows;
  const auto n = static_cast<int>(step_->emit.size());
  if (n == 0) return Value(std::move(result));
  if (!switches_.logits) {
    const mx::array rows = mx::take(to_array(x), mx::array(step_->emit.begin(), mx::Shape{n}, mx::int32), 0);
    const Value logits =
        stock_->logits(StockOps::value_of(mx::expand_dims(rows, 0)), packed_norm.stock, packed.stock, softcap);
    result->array = mx::contiguous(mx::astype(mx::squeeze(StockOps::array_of(logits), 0), mx::float32));
    return Value(std::move(result));
  }
  // All rows emit (a decode step): the last block's epilogue left the head's input. Else the emitting rows are
  // gathered.
  const kernels::PackedMatrix* matrix = &packed.matrix();
  std::shared_ptr<ActivationsHandle> input;
  if (n == step_->size()) {
    input = consume(x, &packed_norm, *matrix);
  } else {
    const auto source = in_floats(x);
    input = std::make_shared<ActivationsHandle>(*machine_);
    program_->add([matrix, from = source->floats->id, to = input->id, columns = source->columns,
                   weight = packed_norm.weight.data()](PhaseContext& c) {
      kernels::Activations& out = c.machine.activations(to);
      c.machine.context.reshape(out, static_cast<int>(c.step.emit.size()), *matrix, true);
      kernels::norm_quantize(c.machine.context, c.machine.floats(from), static_cast<std::size_t>(columns),
                             c.step.emit.data(), weight, out);
    });
  }
  if (step_->want_logits) {
    result->head_logits = program_->output({n, packed.rows}, mx::float32);
  } else {
    result->head_tokens = program_->output({n}, mx::int32);
  }
  program_->add([matrix, in = input->id, eps = norm->eps, logits = result->head_logits, tokens = result->head_tokens,
                 vocab = packed.rows, softcap](PhaseContext& c) {
    const kernels::Product product{matrix, &c.machine.activations(in), eps};
    if (logits) {
      kernels::linear(c.machine.context, product, c.outputs[*logits].data<float>(), static_cast<std::size_t>(vocab),
                      softcap);
    } else {
      kernels::linear_argmax(c.machine.context, product, c.outputs[*tokens].data<std::int32_t>(), nullptr, softcap);
    }
  });
  return Value(std::move(result));
}

FusedOps::Result FusedOps::finish(const Value& logits) {
  const Hidden& head = hidden(logits);
  Result result;
  flush();
  result.outputs_ = outputs_;
  result.tokens_ = head.head_tokens;
  result.logits_ = head.head_logits;
  if (head.array) {  // the stock head: the arg-max is its own op
    if (step_->want_logits) {
      result.logits_ = result.outputs_.size();
      result.outputs_.push_back(*head.array);
    } else {
      result.tokens_ = result.outputs_.size();
      result.outputs_.push_back(mx::astype(mx::argmax(*head.array, -1), mx::int32));
    }
  }
  outputs_.clear();
  program_.reset();
  mx::async_eval(result.outputs_);
  return result;
}

void FusedOps::Result::wait() { mx::eval(outputs_); }

std::span<const std::int32_t> FusedOps::Result::tokens() const {
  if (!tokens_) return {};
  const mx::array& a = outputs_[*tokens_];
  return {a.data<std::int32_t>(), a.size()};
}

std::span<const float> FusedOps::Result::logits() const {
  if (!logits_) return {};
  const mx::array& a = outputs_[*logits_];
  return {a.data<float>(), a.size()};
}

void FusedOps::parallel(int n, const std::function<void(int)>& f) {
  machine_->context.pool().for_each(n, 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) f(i);
  });
}

}  // namespace galley::ops
