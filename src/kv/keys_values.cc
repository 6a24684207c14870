#include "kv/keys_values.h"

#include <utility>

namespace galley::kv {
namespace {

namespace mx = mlx::core;

// The arrays that make up `like`, in the order of KeysValues::arrays(), put together again.
KeysValues made_of(const std::vector<mx::array>& parts, const KeysValues& like) {
  KeysValues made{parts[0], parts[1]};
  if (like.groups) made.groups = KeysValues::Groups{parts[2], parts[3], parts[4], parts[5], like.groups->format};
  return made;
}

template <typename F>
KeysValues each(const KeysValues& x, const F& f) {
  std::vector<mx::array> parts = x.arrays();
  for (mx::array& part : parts) part = f(part);
  return made_of(parts, x);
}

KeysValues concatenated(const std::vector<KeysValues>& pieces, int axis) {
  std::vector<std::vector<mx::array>> columns(pieces.front().arrays().size());
  for (const KeysValues& piece : pieces) {
    const std::vector<mx::array> parts = piece.arrays();
    for (std::size_t i = 0; i < columns.size(); ++i) columns[i].push_back(parts.at(i));
  }
  std::vector<mx::array> whole;
  for (auto& column : columns) whole.push_back(mx::concatenate(std::move(column), axis));
  return made_of(whole, pieces.front());
}

// quantized_scaled_dot_product_attention of mlx-lm 0.32.2, operation by operation.
mx::array attend_quantized(mx::array q, const KeysValues& all, float scale, const ops::AttentionMask& mask) {
  const int rows = q.shape(0), heads = q.shape(1), length = q.shape(2), width = q.shape(3);
  const int kv_heads = all.keys.shape(1);
  const bool grouped = heads > kv_heads;
  q = mx::multiply(q, mx::array(scale, q.dtype()));
  KeysValues kv = all;
  if (grouped) {
    q = mx::reshape(q, {rows, kv_heads, heads / kv_heads, length, width});
    kv = each(kv, [](const mx::array& a) { return mx::expand_dims(a, -3); });
  }
  const auto [bits, group] = kv.groups->format;
  mx::array scores = mx::quantized_matmul(q, kv.keys, kv.groups->key_scales, kv.groups->key_biases, true, group, bits);
  std::optional<mx::array> visible = mask.array;
  if (mask.mode == "causal") {
    const int queries = scores.shape(-2), keys = scores.shape(-1);
    visible =
        mx::greater_equal(mx::expand_dims(mx::arange(keys - queries, keys), 1), mx::expand_dims(mx::arange(keys), 0));
  }
  if (visible) {
    if (grouped && visible->ndim() > 3) visible = mx::expand_dims(*visible, -3);
    scores = mx::where(*visible, scores, mx::array(mx::finfo(scores.dtype()).min, scores.dtype()));
  }
  scores = mx::softmax(scores, std::vector<int>{-1}, /*precise=*/true);
  const mx::array mixed =
      mx::quantized_matmul(scores, kv.values, kv.groups->value_scales, kv.groups->value_biases, false, group, bits);
  return grouped ? mx::reshape(mixed, {rows, heads, length, width}) : mixed;
}

}  // namespace

KeysValues KeysValues::quantized(ops::KvFormat format) const {
  if (!format.quantized()) return *this;
  const auto k = mx::quantize(keys, format.group, format.bits);
  const auto v = mx::quantize(values, format.group, format.bits);
  return {k[0], v[0], Groups{k[1], k[2], v[1], v[2], format}};
}

std::vector<mx::array> KeysValues::arrays() const {
  if (!groups) return {keys, values};
  return {keys, values, groups->key_scales, groups->key_biases, groups->value_scales, groups->value_biases};
}

std::size_t KeysValues::nbytes() const {
  std::size_t bytes = 0;
  for (const mx::array& part : arrays()) bytes += part.nbytes();
  return bytes;
}

KeysValues KeysValues::slice(int begin, int end) const {
  return each(*this, [&](const mx::array& a) {
    return mx::slice(a, {0, 0, begin, 0}, {a.shape(0), a.shape(1), end, a.shape(3)});
  });
}

KeysValues KeysValues::row(int row) const {
  return each(*this, [&](const mx::array& a) {
    return mx::slice(a, {row, 0, 0, 0}, {row + 1, a.shape(1), a.shape(2), a.shape(3)});
  });
}

void KeysValues::write(const KeysValues& fresh, int column) {
  const std::vector<mx::array> parts = fresh.arrays();
  auto part = parts.begin();
  *this = each(*this, [&](const mx::array& all) {
    const mx::array& added = *part++;
    mx::Shape start{0, 0, column, 0};
    mx::Shape stop{all.shape(0), all.shape(1), column + added.shape(2), all.shape(3)};
    return mx::slice_update(all, mx::astype(added, all.dtype()), std::move(start), std::move(stop));
  });
}

KeysValues zeros_like(const KeysValues& like, int columns) {
  return each(like, [&](const mx::array& a) {
    return mx::zeros({a.shape(0), a.shape(1), columns, a.shape(3)}, a.dtype());
  });
}

KeysValues joined(const std::vector<KeysValues>& parts) { return concatenated(parts, 2); }

KeysValues stacked(const std::vector<KeysValues>& parts) { return concatenated(parts, 0); }

KeysValues padded(const KeysValues& x, int left, int right) {
  if (left == 0 && right == 0) return x;
  return each(x, [&](const mx::array& a) { return mx::pad(a, {{0, 0}, {0, 0}, {left, right}, {0, 0}}); });
}

KeysValues taken(const KeysValues& x, const std::vector<int>& rows) {
  const mx::array index = int_array(rows);
  return each(x, [&](const mx::array& a) { return mx::take(a, index, 0); });
}

KeysValues rolled(const KeysValues& x, int shift) {
  return each(x, [&](const mx::array& a) { return mx::roll(a, shift, 2); });
}

KeysValues rolled_by_row(const KeysValues& x, const std::vector<int>& shifts) {
  const int columns = x.capacity();
  const mx::array shift = mx::reshape(int_array(shifts), {-1, 1, 1, 1});
  const mx::array column = mx::reshape(mx::arange(columns), {1, 1, -1, 1});
  const mx::array source = mx::remainder(mx::subtract(column, shift), mx::array(columns));
  return each(x, [&](const mx::array& a) { return mx::take_along_axis(a, source, 2); });
}

KeysValues contiguous(const KeysValues& x) {
  return each(x, [](const mx::array& a) { return mx::contiguous(a); });
}

KeysValues aligned(const std::optional<KeysValues>& buffer, int rows, int own_end, int end, int capacity,
                   const KeysValues& like) {
  const auto nothing = [&](const mx::array& a) { return mx::zeros({rows, a.shape(1), 0, a.shape(3)}, a.dtype()); };
  const KeysValues own = buffer ? *buffer : each(like, nothing);
  const int left = end - own_end;
  const int right = capacity - own.capacity() - left;
  if (right < 0) return padded(own.slice(0, own.capacity() + right), left, 0);
  return padded(own, left, right);
}

mx::array attend(const mx::array& q, const KeysValues& all, float scale, const ops::AttentionMask& mask) {
  if (all.groups) return attend_quantized(q, all, scale, mask);
  return mx::fast::scaled_dot_product_attention(q, all.keys, all.values, scale, mask.mode, mask.array);
}

mx::array int_array(std::span<const int> values) {
  return mx::array(values.data(), {static_cast<int>(values.size())}, mx::int32);
}

std::vector<int> taken(const std::vector<int>& values, const std::vector<int>& rows) {
  std::vector<int> out;
  out.reserve(rows.size());
  for (const int row : rows) out.push_back(values[static_cast<std::size_t>(row)]);
  return out;
}

mx::array causal_mask(int tokens, int offset, int window, const std::optional<mx::array>& left_padding) {
  const mx::array all = mx::arange(offset + tokens);
  const mx::array fresh = offset != 0 ? mx::arange(offset, offset + tokens) : all;
  const mx::array rows = mx::expand_dims(fresh, 1);
  const mx::array columns = mx::expand_dims(all, 0);
  mx::array mask = mx::greater_equal(rows, columns);
  if (window > 0) mask = mx::logical_and(mask, mx::less(rows, mx::add(columns, mx::array(window))));
  if (left_padding) {
    const mx::array padding = mx::expand_dims(*left_padding, std::vector<int>{1, 2, 3});
    mask = mx::logical_and(mask, mx::less_equal(padding, columns));
  }
  return mask;
}

}  // namespace galley::kv
