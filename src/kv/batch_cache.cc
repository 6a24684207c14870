#include "kv/batch_cache.h"

#include <algorithm>
#include <utility>

namespace galley::kv {
namespace {

namespace mx = mlx::core;

mx::array int_array(std::span<const int> values) {
  return mx::array(values.data(), {static_cast<int>(values.size())}, mx::int32);
}

// Rolls row b of [B, H, S, D] right along S by shifts[b].
mx::array roll_rows(const mx::array& x, std::span<const int> shifts) {
  const int columns = x.shape(2);
  const mx::array shift = mx::reshape(int_array(shifts), {-1, 1, 1, 1});
  const mx::array column = mx::reshape(mx::arange(columns), {1, 1, -1, 1});
  const mx::array source = mx::remainder(mx::subtract(column, shift), mx::array(columns));
  return mx::take_along_axis(x, source, 2);
}

// Puts `cache` into a buffer of `capacity` columns so that its end falls on `end`. A batch without keys yet takes heads
// and widths from `like`.
KeysValues aligned(const std::optional<KeysValues>& buffer, int rows, int own_end, int end, int capacity,
                   const KeysValues& like) {
  const auto align = [&](const mx::array* own, const mx::array& other) {
    mx::array x = own != nullptr ? *own : mx::zeros({rows, other.shape(1), 0, other.shape(3)}, other.dtype());
    const int left = end - own_end;
    int right = capacity - x.shape(2) - left;
    if (right < 0) {
      x = mx::slice(x, {0, 0, 0, 0}, {x.shape(0), x.shape(1), x.shape(2) + right, x.shape(3)});
      right = 0;
    }
    if (left == 0 && right == 0) return x;
    return mx::pad(x, {{0, 0}, {0, 0}, {left, right}, {0, 0}});
  };
  return {align(buffer ? &buffer->keys : nullptr, like.keys), align(buffer ? &buffer->values : nullptr, like.values)};
}

}  // namespace

BatchKvCache::BatchKvCache(std::vector<int> left_padding) : left_padding_(std::move(left_padding)) {
  offset_.reserve(left_padding_.size());
  for (const int padding : left_padding_) offset_.push_back(-padding);
}

BatchKvCache BatchKvCache::merge(std::span<const KvCache* const> rows) {
  int longest = 0;
  const KeysValues* like = nullptr;
  for (const KvCache* row : rows) {
    longest = std::max(longest, row->size());
    if (like == nullptr && row->buffer()) like = &*row->buffer();
  }
  std::vector<int> padding;
  for (const KvCache* row : rows) padding.push_back(longest - row->size());
  if (longest == 0) return BatchKvCache(std::vector<int>(rows.size(), 0));

  BatchKvCache merged(std::move(padding));
  const auto side_by_side = [&](mx::array KeysValues::*part) {
    std::vector<mx::array> aligned_rows;
    for (const KvCache* row : rows) {
      const mx::array& shape = like->*part;
      mx::array tokens = row->size() == 0 ? mx::zeros({1, shape.shape(1), 0, shape.shape(3)}, shape.dtype())
                                          : row->buffer()->slice(0, row->size()).*part;
      aligned_rows.push_back(mx::pad(tokens, {{0, 0}, {0, 0}, {longest - row->size(), 0}, {0, 0}}));
    }
    return mx::concatenate(aligned_rows, 0);
  };
  merged.buffer_ = KeysValues{side_by_side(&KeysValues::keys), side_by_side(&KeysValues::values)};
  for (int& offset : merged.offset_) offset += longest;
  merged.end_ = longest;
  return merged;
}

ops::RopeOffset BatchKvCache::offset() const { return int_array(offset_); }

ops::AttentionMask BatchKvCache::mask(int tokens, int window) const {
  return {"array", causal_mask(tokens, end_, window, int_array(left_padding_))};
}

mx::array BatchKvCache::write_and_attend(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
                                         const ops::AttentionMask& mask) {
  const KeysValues all = update_and_fetch(k, v);
  return mx::fast::scaled_dot_product_attention(q, all.keys, all.values, scale, mask.mode, mask.array);
}

KeysValues BatchKvCache::update_and_fetch(const mx::array& k, const mx::array& v) {
  append(buffer_, end_, {k, v});
  const int added = k.shape(2);
  for (int& offset : offset_) offset += added;
  end_ += added;
  return buffer_->slice(0, end_);
}

void BatchKvCache::prepare(std::vector<int> right_padding) {
  if (std::ranges::any_of(right_padding, [](int padding) { return padding > 0; })) {
    right_padding_ = std::move(right_padding);
  }
}

void BatchKvCache::finalize() {
  if (right_padding_.empty()) return;
  buffer_ = KeysValues{roll_rows(buffer_->keys, right_padding_), roll_rows(buffer_->values, right_padding_)};
  for (std::size_t row = 0; row < offset_.size(); ++row) {
    offset_[row] -= right_padding_[row];
    left_padding_[row] += right_padding_[row];
  }
  right_padding_.clear();
}

void BatchKvCache::filter(std::span<const int> rows) {
  if (buffer_) {
    const mx::array index = int_array(rows);
    buffer_ = KeysValues{mx::take(buffer_->keys, index, 0), mx::take(buffer_->values, index, 0)};
  }
  std::vector<int> offset;
  std::vector<int> padding;
  for (const int row : rows) {
    offset.push_back(offset_[static_cast<std::size_t>(row)]);
    padding.push_back(left_padding_[static_cast<std::size_t>(row)]);
  }
  offset_ = std::move(offset);
  left_padding_ = std::move(padding);
  const int common = left_padding_.empty() ? 0 : *std::ranges::min_element(left_padding_);
  if (common <= 0) return;
  if (buffer_) buffer_ = buffer_->slice(common, buffer_->capacity());
  end_ -= common;
  for (int& each : left_padding_) each -= common;
}

void BatchKvCache::extend(const BatchKvCache& other) {
  const int end = std::max(end_, other.end_);
  if (buffer_ || other.buffer_) {
    const int capacity = std::max(buffer_ ? buffer_->capacity() : 0, other.buffer_ ? other.buffer_->capacity() : 0);
    const KeysValues& like = buffer_ ? *buffer_ : *other.buffer_;
    const KeysValues mine = aligned(buffer_, rows(), end_, end, capacity, like);
    const KeysValues theirs = aligned(other.buffer_, other.rows(), other.end_, end, capacity, like);
    for (int& padding : left_padding_) padding += end - end_;
    for (const int padding : other.left_padding_) left_padding_.push_back(padding + end - other.end_);
    buffer_ =
        KeysValues{mx::concatenate({mine.keys, theirs.keys}, 0), mx::concatenate({mine.values, theirs.values}, 0)};
    end_ = end;
  } else {
    left_padding_.insert(left_padding_.end(), other.left_padding_.begin(), other.left_padding_.end());
  }
  offset_.insert(offset_.end(), other.offset_.begin(), other.offset_.end());
}

KvCache BatchKvCache::extract(int row) const {
  if (!buffer_) return {};
  const KeysValues tokens = buffer_->slice(left_padding_[static_cast<std::size_t>(row)], end_);
  const auto own = [&](const mx::array& a) {
    return mx::contiguous(mx::slice(a, {row, 0, 0, 0}, {row + 1, a.shape(1), a.shape(2), a.shape(3)}));
  };
  return KvCache::holding({own(tokens.keys), own(tokens.values)});
}

int BatchKvCache::trim(int tokens) {
  const int trimmed = std::min(end_, tokens);
  end_ -= trimmed;
  for (int& offset : offset_) offset -= trimmed;
  return trimmed;
}

}  // namespace galley::kv
