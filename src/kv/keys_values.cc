#include "kv/keys_values.h"

#include <utility>

namespace galley::kv {
namespace {

namespace mx = mlx::core;

template <typename F>
KeysValues each(const KeysValues& x, const F& f) {
  return {f(x.keys), f(x.values)};
}

KeysValues concatenated(const std::vector<KeysValues>& parts, int axis) {
  std::vector<mx::array> keys;
  std::vector<mx::array> values;
  for (const KeysValues& part : parts) {
    keys.push_back(part.keys);
    values.push_back(part.values);
  }
  return {mx::concatenate(std::move(keys), axis), mx::concatenate(std::move(values), axis)};
}

}  // namespace

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
  const auto into = [&](mx::array& all, const mx::array& part) {
    mx::Shape start{0, 0, column, 0};
    mx::Shape stop{all.shape(0), all.shape(1), column + part.shape(2), all.shape(3)};
    all = mx::slice_update(all, mx::astype(part, all.dtype()), std::move(start), std::move(stop));
  };
  into(keys, fresh.keys);
  into(values, fresh.values);
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

KeysValues rolled_by_row(const KeysValues& x, const std::vector<int>& shifts) {
  const int columns = x.capacity();
  const mx::array shift = mx::reshape(int_array(shifts), {-1, 1, 1, 1});
  const mx::array column = mx::reshape(mx::arange(columns), {1, 1, -1, 1});
  const mx::array source = mx::remainder(mx::subtract(column, shift), mx::array(columns));
  return each(x, [&](const mx::array& a) { return mx::take_along_axis(a, source, 2); });
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
