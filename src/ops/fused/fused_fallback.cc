// Crossing between the kernels' buffers and MLX arrays: what a step with switched-off ops needs.
#include <mlx/fast.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "ops/error.h"
#include "ops/fused/fused_values.h"
#include "ops/fused/paged_layer.h"
#include "ops/kernels/kv_numbers.h"

namespace galley::ops {

namespace mx = mlx::core;

namespace {

/// [T, heads * D] -> normed (unless `norm` is null) and rotated [T, heads, D], each token at its own position.
mx::array rotate(const mx::array& x, int heads, const NormPtr& norm, const AttentionSpec& spec,
                 const mx::array& positions) {
  const int tokens = x.shape(0);
  mx::array y = mx::reshape(x, {tokens, heads, 1, spec.head_dim});
  if (norm != nullptr) y = static_cast<const StockNorm&>(*norm).apply(y);
  const Rope& rope = spec.rope;
  if (rope.dims == 0) return mx::reshape(y, {tokens, heads, spec.head_dim});
  std::optional<mx::array> frequencies;
  std::optional<float> base = rope.base;
  if (!rope.frequencies.empty()) {
    frequencies =
        mx::array(rope.frequencies.begin(), mx::Shape{static_cast<int>(rope.frequencies.size())}, mx::float32);
    base.reset();
  }
  y = mx::fast::rope(y, rope.dims, rope.traditional, base, rope.scale, positions, frequencies);
  return mx::reshape(y, {tokens, heads, spec.head_dim});
}

/// Calls f(run of keys, run of values, token of the run, index) for every KV head of the row of token `t` at
/// `position`.
template <typename F>
void at_heads(const kernels::RowPlaces& places, const kernels::PagedKv& kv, int t, int position, const F& f) {
  const std::int32_t block = places.table[t][position / kv.block_tokens];
  const int slot = position % kv.block_tokens;
  for (int h = 0; h < kv.kv_heads; ++h) {
    f(kv.keys(block, h, slot), kv.values(block, h, slot), slot % kernels::kKeyGroup, h);
  }
}

/// Puts K and V rows [T, kv_heads, D] f32 into their blocks, rounded as these hold them.
void scatter(const kernels::RowPlaces& places, const kernels::PagedKv& kv, const mx::array& k, const mx::array& v) {
  const float* keys = k.data<float>();
  const float* values = v.data<float>();
  for (int t = 0; t < places.rows; ++t) {
    at_heads(places, kv, t, places.position[t], [&](std::byte* key_run, std::byte* value_run, int slot, int) {
      kernels::store_kv_row(kv, key_run, kernels::KvPart::keys, slot, keys);
      kernels::store_kv_row(kv, value_run, kernels::KvPart::values, slot, values);
      keys += kv.head_dim;
      values += kv.head_dim;
    });
  }
}

/// Reads keys and values [begin, end) of the row of token `t` into [1, kv_heads, end - begin, D] f32 arrays.
void gather(const kernels::RowPlaces& places, const kernels::PagedKv& kv, int t, int begin, int end, mx::array& k,
            mx::array& v) {
  for (int p = begin; p < end; ++p) {
    at_heads(places, kv, t, p, [&](const std::byte* key_run, const std::byte* value_run, int slot, int h) {
      const std::ptrdiff_t to = static_cast<std::ptrdiff_t>(h * (end - begin) + p - begin) * kv.head_dim;
      for (int d = 0; d < kv.head_dim; ++d) {
        k.data<float>()[to + d] = kernels::kv_number(kv, key_run, kernels::KvPart::keys, slot, d);
        v.data<float>()[to + d] = kernels::kv_number(kv, value_run, kernels::KvPart::values, slot, d);
      }
    });
  }
}

/// f32, next to each other in memory.
mx::array in_rows(const mx::array& a) { return mx::contiguous(mx::astype(a, mx::float32)); }

/// What `count` tokens at `position` and after it see of the keys from `begin` on.
AttentionMask mask_of(int position, int count, int begin, int window) {
  if (window == 0) return {count > 1 ? "causal" : "", std::nullopt};
  const mx::array at = mx::expand_dims(mx::arange(position, position + count), 1);
  const mx::array keys = mx::expand_dims(mx::arange(begin, position + count), 0);
  return {"array", mx::logical_and(mx::less_equal(keys, at), mx::greater(keys, mx::subtract(at, mx::array(window))))};
}

}  // namespace

Value FusedOps::from_array(const mx::array& a) {
  auto value = std::make_shared<Hidden>();
  value->columns = a.shape(-1);
  value->array = mx::reshape(a, {-1, value->columns});
  return Value(std::move(value));
}

mx::array FusedOps::to_array(const Value& value) {
  const Value values[] = {value};
  return to_arrays(values).front();
}

std::vector<mx::array> FusedOps::to_arrays(std::span<const Value> values) {
  const int tokens = step_->size();
  std::vector<std::optional<std::size_t>> at(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Hidden& x = hidden(values[i]);
    if (x.array) continue;
    const std::size_t index = program_->output({tokens, x.columns}, mx::float32);
    at[i] = index;
    const auto n = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(x.columns);
    if (x.projection != nullptr) {
      // The whole matrix is multiplied and the part's columns are kept: rarely used, so simple.
      const PackedGroup::Part part = x.projection->group->parts[x.part];
      const kernels::PackedMatrix* matrix = &x.projection->group->matrices[part.matrix];
      const FloatsHandle all(*machine_);
      program_->add([matrix, in = x.projection->inputs[part.matrix]->id, eps = x.projection->eps, index, n, y = all.id,
                     first = part.first_column, columns = x.columns](PhaseContext& c) {
        const auto width = static_cast<std::size_t>(matrix->columns());
        float* product = c.machine.floats(y, n / static_cast<std::size_t>(columns) * width);
        kernels::linear(c.machine.context, {matrix, &c.machine.activations(in), eps}, product, width);
        auto* to = c.outputs[index].data<float>();
        for (std::size_t t = 0; t * static_cast<std::size_t>(columns) < n; ++t) {
          std::copy_n(product + t * width + first, columns, to + t * static_cast<std::size_t>(columns));
        }
      });
    } else if (x.floats != nullptr) {
      program_->add([from = x.floats->id, index, n](PhaseContext& c) {
        std::copy_n(c.machine.floats(from), n, c.outputs[index].data<float>());
      });
    } else {  // an attention's result, not consumed yet
      if (x.next->consumer != nullptr) throw std::logic_error("a quantized intermediate can't become an MLX array");
      x.next->plain = true;
      program_->add([from = x.activations->id, index, columns = x.columns, tokens](PhaseContext& c) {
        const kernels::Activations& rows = c.machine.activations(from);
        auto* to = c.outputs[index].data<float>();
        for (int t = 0; t < tokens; ++t) {
          std::copy_n(rows.x() + static_cast<std::size_t>(t) * rows.stride(), columns,
                      to + static_cast<std::size_t>(t) * static_cast<std::size_t>(columns));
        }
      });
    }
  }
  if (std::ranges::any_of(at, [](const auto& a) { return a.has_value(); })) flush();
  std::vector<mx::array> arrays;
  for (std::size_t i = 0; i < values.size(); ++i) arrays.push_back(at[i] ? outputs_[*at[i]] : *hidden(values[i]).array);
  return arrays;
}

void FusedOps::write_keys_values(const std::vector<mx::array>& qkv, const AttentionSpec& spec,
                                 const PagedLayerKv& layer) {
  if (qkv.size() == 1) return;  // another layer's
  const mx::array positions = mx::array(step_->positions.begin(), mx::Shape{step_->size()}, mx::int32);
  mx::array values = mx::reshape(qkv[2], {step_->size(), spec.kv_heads, spec.head_dim});
  if (spec.v_norm) values = static_cast<const StockNorm&>(*stock_norm(spec.v_norm)).apply(values);
  const std::size_t k =
      program_->input(in_rows(rotate(qkv[1], spec.kv_heads, stock_norm(spec.k_norm), spec, positions)));
  const std::size_t v = program_->input(in_rows(values));
  program_->add([k, v, view = layer.view, table = layer.table](PhaseContext& c) {
    scatter(c.places(table), view, c.inputs[k], c.inputs[v]);
  });
}

void FusedOps::write_from_arrays(const std::vector<mx::array>& qkv, const kernels::QkvOutput& to,
                                 const AttentionSpec& spec, const PagedLayerKv& layer, int q_id) {
  const mx::array positions = mx::array(step_->positions.begin(), mx::Shape{step_->size()}, mx::int32);
  const std::size_t q = program_->input(mx::contiguous(
      mx::multiply(rotate(qkv[0], spec.heads, stock_norm(spec.q_norm), spec, positions), mx::array(to.q_scale))));
  program_->add([q, q_id](PhaseContext& c) {
    std::copy_n(c.inputs[q].data<float>(), c.inputs[q].size(), c.machine.floats(q_id, c.inputs[q].size()));
  });
  write_keys_values(qkv, spec, layer);
}

mx::array FusedOps::stock_attend(const std::vector<mx::array>& qkv, const AttentionSpec& spec,
                                 const PagedLayerKv& layer) {
  if (spec.softcap > 0.0F) throw Error(500, "--fused-attend off is not supported with a soft-cap on the scores");
  const mx::array positions = mx::array(step_->positions.begin(), mx::Shape{step_->size()}, mx::int32);
  write_keys_values(qkv, spec, layer);

  struct Span {
    int first, count;  // of the step's tokens
    int begin;         // of the keys they see
    std::size_t k, v;
  };
  std::vector<Span> rows;
  for (int t = 0; t < step_->size();) {
    int end = t;
    while (end < step_->size() &&
           step_->rows[static_cast<std::size_t>(end)] == step_->rows[static_cast<std::size_t>(t)]) {
      ++end;
    }
    const int length = step_->positions[static_cast<std::size_t>(end) - 1] + 1;
    const int begin = spec.window > 0 ? std::max(0, length - (end - t) - spec.window + 1) : 0;
    const mx::Shape shape{1, spec.kv_heads, length - begin, spec.head_dim};
    const Span row{t, end - t, begin, program_->output(shape, mx::float32), program_->output(shape, mx::float32)};
    program_->add([row, length, view = layer.view, table = layer.table](PhaseContext& c) {
      gather(c.places(table), view, row.first, row.begin, length, c.outputs[row.k], c.outputs[row.v]);
    });
    rows.push_back(row);
    t = end;
  }
  const mx::array rotated = rotate(qkv[0], spec.heads, stock_norm(spec.q_norm), spec, positions);  // [T, heads, D]
  flush();
  std::vector<mx::array> mixed;
  for (const Span& row : rows) {
    const mx::array queries = mx::expand_dims(
        mx::transpose(mx::slice(rotated, {row.first, 0, 0}, {row.first + row.count, spec.heads, spec.head_dim}),
                      {1, 0, 2}),
        0);
    const AttentionMask mask =
        mask_of(step_->positions[static_cast<std::size_t>(row.first)], row.count, row.begin, spec.window);
    const mx::array out = mx::fast::scaled_dot_product_attention(queries, outputs_[row.k], outputs_[row.v], spec.scale,
                                                                 mask.mode, mask.array);
    mixed.push_back(
        mx::reshape(mx::transpose(mx::squeeze(out, 0), {1, 0, 2}), {row.count, spec.heads * spec.head_dim}));
  }
  return mixed.size() == 1 ? mixed.front() : mx::concatenate(mixed, 0);
}

}  // namespace galley::ops
