// Attention: q, k and v go straight from their product into a buffer and the pages, and what is read comes from there.

#include <algorithm>
#include <utility>

#include "ops/fused/fused_values.h"
#include "ops/fused/paged_layer.h"

namespace galley::ops {

Value FusedOps::attend(const Value& q, const Value& k, const Value& v, const AttentionSpec& spec, LayerKv& kv) {
  const Value qkv[] = {q, k, v};
  return attend_to(qkv, spec, dynamic_cast<PagedLayerKv&>(kv));
}

Value FusedOps::attend_shared(const Value& q, const AttentionSpec& spec, LayerKv& kv) {
  return attend_to({&q, 1}, spec, dynamic_cast<PagedLayerKv&>(kv));
}

Value FusedOps::attend_to(std::span<const Value> qkv, const AttentionSpec& spec, const PagedLayerKv& layer) {
  if (!switches_.attend) return from_array(stock_attend(to_arrays(qkv), spec, layer));
  const Hidden& query = hidden(qkv[0]);
  const bool whole = query.projection != nullptr && query.part == 0 && query.program == program_.get() &&
                     std::ranges::all_of(qkv, [&](const Value& v) { return hidden(v).projection == query.projection; });
  const std::shared_ptr<const Projection> projection = whole ? query.projection : nullptr;

  auto mixed = std::make_shared<Hidden>();
  mixed->columns = spec.heads * spec.head_dim;
  mixed->activations = std::make_shared<ActivationsHandle>(*machine_);
  mixed->next = std::make_shared<Next>();
  mixed->program = program_.get();
  const FloatsHandle rotated(*machine_);  // free again once this op is recorded

  int positions = 1;
  for (const std::int32_t p : step_->positions) positions = std::max(positions, p + 1);
  const auto table = spec.rope.dims > 0 ? rope_table(spec.rope, positions) : nullptr;
  kernels::QkvOutput to;
  to.kv = layer.view;
  to.heads = spec.heads;
  to.q_scale = kernels::query_scale(spec.scale);
  to.rope = {table ? table->data() : nullptr, spec.rope.dims, spec.rope.traditional};
  const auto weight = [](const NormPtr& norm) {
    return norm == nullptr ? nullptr : dynamic_cast<const PackedNorm&>(*norm).weight.data();
  };
  to.q_norm = weight(spec.q_norm);
  to.k_norm = weight(spec.k_norm);
  to.v_norm = weight(spec.v_norm);
  if (spec.q_norm) to.head_norm_eps = spec.q_norm->eps;

  if (projection != nullptr) {
    to.values_are_keys = qkv.size() == 3 && hidden(qkv[1]).part == hidden(qkv[2]).part;
    for (std::size_t m = 0; m < projection->group->matrices.size(); ++m) {
      int first_column = 0;
      for (std::size_t i = 0; i < projection->group->parts.size(); ++i) {
        if (projection->group->parts[i].matrix == m) break;
        first_column += i == 0 ? spec.heads * spec.head_dim : spec.kv_heads * spec.head_dim;
      }
      to.first_head = first_column / spec.head_dim;
      program_->add([matrix = &projection->group->matrices[m], input = projection->inputs[m]->id, eps = projection->eps,
                     to, y = rotated.id, table, blocks = layer.table, columns = mixed->columns](PhaseContext& c) {
        kernels::QkvOutput output = to;
        output.places = c.places(blocks);
        output.q = c.machine.floats(y, c.step.tokens.size() * static_cast<std::size_t>(columns));
        kernels::linear_qkv(c.machine.context, {matrix, &c.machine.activations(input), eps}, output);
      });
    }
  } else {
    write_from_arrays(to_arrays(qkv), to, spec, layer, rotated.id);
    mixed->program = program_.get();
  }
  *upcoming_ = {layer.view, layer.table, spec.window};
  upcoming_ = std::make_shared<Upcoming>();
  program_->add([view = layer.view, blocks = layer.table, heads = spec.heads, window = spec.window,
                 softcap = spec.softcap, q_id = rotated.id, out = mixed->activations->id, next = mixed->next,
                 columns = mixed->columns](PhaseContext& c) {
    kernels::Activations& activations = c.machine.activations(out);
    if (next->consumer != nullptr) {
      c.machine.context.reshape(activations, c.step.size(), *next->consumer, false);
    } else {
      activations.reshape(c.step.size(), columns, {}, false, c.machine.context.max_tile());
    }
    kernels::Attention args;
    args.places = c.places(blocks);
    args.kv = view;
    args.heads = heads;
    args.q = c.machine.floats(q_id);
    args.window = window;
    args.softcap = softcap;
    kernels::attention(c.machine.context, args, activations);
  });
  return Value(std::move(mixed));
}

}  // namespace galley::ops
