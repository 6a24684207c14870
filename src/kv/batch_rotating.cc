#include "kv/batch_rotating.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace galley::kv {

namespace mx = mlx::core;

BatchRotatingKvCache::BatchRotatingKvCache(int max_size, std::vector<int> left_padding)
    : left_padding_(std::move(left_padding)), max_size_(max_size) {
  offset_.reserve(left_padding_.size());
  for (const int padding : left_padding_) offset_.push_back(-padding);
}

BatchRotatingKvCache BatchRotatingKvCache::merge(std::span<const RotatingKvCache* const> rows) {
  const int max_size = rows.front()->max_size();
  int longest = 0;
  const KeysValues* like = nullptr;
  for (const RotatingKvCache* row : rows) {
    if (row->max_size() != max_size) throw std::logic_error("rings of different sizes can't be merged");
    longest = std::max(longest, row->size());
    if (like == nullptr && row->buffer()) like = &*row->buffer();
  }
  if (longest == 0) return {max_size, std::vector<int>(rows.size(), 0)};

  std::vector<int> padding;
  std::vector<KeysValues> parts;
  for (const RotatingKvCache* row : rows) {
    const int left = longest - row->size();
    padding.push_back(left);
    if (row->size() == 0) {
      parts.push_back(zeros_like(*like, longest));
      continue;
    }
    const KeysValues ordered = row->in_order();
    parts.push_back(padded(ordered.slice(ordered.capacity() - row->size(), ordered.capacity()), left, 0));
  }
  BatchRotatingKvCache merged(max_size, std::move(padding));
  merged.buffer_ = stacked(parts);
  for (std::size_t i = 0; i < rows.size(); ++i) merged.offset_[i] = rows[i]->position();
  merged.next_ = longest;
  merged.written_ = longest;
  return merged;
}

std::unique_ptr<BatchCache> BatchRotatingKvCache::clone() const {
  return std::make_unique<BatchRotatingKvCache>(*this);
}

ops::RopeOffset BatchRotatingKvCache::offset() const { return int_array(offset_); }

ops::AttentionMask BatchRotatingKvCache::mask(int tokens, int window) const {
  const int reach = window > 0 ? window : max_size_;
  const int before = std::min(max_size_ - 1, written_);
  // What the coming write will drop on the left, and whether it will turn the ring.
  const int dropped = std::max(next_ - max_size_ + (tokens > 1 ? 1 : 0), 0);
  const bool turning = tokens == 1 && (rotated_ || next_ >= max_size_);
  std::vector<int> padding = left_padding_;
  for (int& each : padding) each -= dropped + (turning ? 1 : 0);

  mx::array mask = causal_mask(tokens, before, reach, int_array(padding));
  if (turning) mask = mx::roll(mask, (next_ >= max_size_ ? 0 : next_) + 1, -1);
  return {"array", std::move(mask)};
}

// A write of several tokens leaves no room behind them; one of a single token may.
KeysValues BatchRotatingKvCache::fetched() const {
  return written_ < buffer_->capacity() ? buffer_->slice(0, written_) : *buffer_;
}

KeysValues BatchRotatingKvCache::update_and_fetch(const mx::array& k, const mx::array& v) {
  // A single column that is padding for some row can't overwrite that row's oldest token.
  return k.shape(2) == 1 && ends_.empty() ? write_in_place({k, v}) : append_in_order({k, v});
}

void BatchRotatingKvCache::put_in_order() {
  if (!rotated_) return;
  buffer_ = rolled(*buffer_, -next_);  // the newest column goes to the right edge
  next_ = buffer_->capacity();
  rotated_ = false;
}

// Rows that have run past their end, into padding, move right so that their last token is at the right edge.
void BatchRotatingKvCache::roll_past_ends() {
  if (ends_.empty()) return;
  std::vector<int> shifts;
  for (std::size_t row = 0; row < offset_.size(); ++row) {
    const int shift = std::max(0, offset_[row] - ends_[row]);
    shifts.push_back(shift);
    left_padding_[row] += shift;
    offset_[row] -= shift;
  }
  buffer_ = rolled_by_row(*buffer_, shifts);
}

KeysValues BatchRotatingKvCache::append_in_order(const KeysValues& fresh) {
  if (!buffer_) {
    buffer_ = fresh;
  } else {
    put_in_order();
    if (buffer_->capacity() > next_) buffer_ = buffer_->slice(0, next_);
    roll_past_ends();
    const int surplus = next_ - max_size_ + 1;
    if (surplus > 0) {
      for (int& padding : left_padding_) padding -= surplus;
      buffer_ = buffer_->slice(surplus, buffer_->capacity());
    }
    buffer_ = joined({*buffer_, fresh});
  }
  const int added = fresh.capacity();
  for (int& offset : offset_) offset += added;
  written_ += added;
  next_ = buffer_->capacity();
  return fetched();
}

KeysValues BatchRotatingKvCache::write_in_place(const KeysValues& fresh) {
  if (!buffer_ || (written_ >= buffer_->capacity() && buffer_->capacity() < max_size_)) {
    const KeysValues room = zeros_like(fresh, std::min(growth_tokens, max_size_ - written_));
    buffer_ = buffer_ ? joined({*buffer_, room}) : room;
    next_ = written_;
  }
  const int surplus = buffer_->capacity() - max_size_;
  if (surplus > 0) {
    buffer_ = buffer_->slice(surplus, buffer_->capacity());
    next_ = max_size_;
    for (int& padding : left_padding_) padding -= surplus;
  }
  if (next_ == max_size_) {
    rotated_ = true;
    next_ = 0;
  }
  if (rotated_) {
    for (int& padding : left_padding_) --padding;
  }
  buffer_->write(fresh, next_);
  ++written_;
  for (int& offset : offset_) ++offset;
  ++next_;
  return fetched();
}

void BatchRotatingKvCache::prepare(const std::vector<int>& lengths, const std::vector<int>& right_padding) {
  if (std::ranges::none_of(right_padding, [](int padding) { return padding > 0; })) return;
  ends_.clear();
  for (std::size_t row = 0; row < offset_.size(); ++row) ends_.push_back(offset_[row] + lengths[row]);
}

void BatchRotatingKvCache::finalize() {
  roll_past_ends();
  ends_.clear();
}

void BatchRotatingKvCache::filter(const std::vector<int>& rows) {
  if (buffer_) buffer_ = taken(*buffer_, rows);
  offset_ = taken(offset_, rows);
  left_padding_ = taken(left_padding_, rows);
}

void BatchRotatingKvCache::extend(const BatchCache& added) {
  BatchRotatingKvCache other = dynamic_cast<const BatchRotatingKvCache&>(added);
  if (buffer_ || other.buffer_) {
    if (rotated_ != other.rotated_ || next_ != other.next_) {
      put_in_order();
      other.put_in_order();
    }
    const int end = std::max(next_, other.next_);
    const int capacity = std::max(buffer_ ? buffer_->capacity() : 0, other.buffer_ ? other.buffer_->capacity() : 0);
    const KeysValues& like = buffer_ ? *buffer_ : *other.buffer_;
    const KeysValues mine = aligned(buffer_, rows(), next_, end, capacity, like);
    const KeysValues theirs = aligned(other.buffer_, other.rows(), other.next_, end, capacity, like);
    for (int& padding : left_padding_) padding += end - next_;
    for (int& padding : other.left_padding_) padding += end - other.next_;
    buffer_ = stacked({mine, theirs});
    // As in mlx-lm, `rotated` is this batch's: the two agree, or both have just been put in order.
    next_ = end;
    written_ = std::max(written_, other.written_);
  }
  left_padding_.insert(left_padding_.end(), other.left_padding_.begin(), other.left_padding_.end());
  offset_.insert(offset_.end(), other.offset_.begin(), other.offset_.end());
}

RotatingKvCache BatchRotatingKvCache::extract(int row) const {
  if (!buffer_) return RotatingKvCache(max_size_);
  const auto at = static_cast<std::size_t>(row);
  const KeysValues own = buffer_->row(row);
  const KeysValues ordered = rotated_ ? rolled(own, -next_) : own;
  const KeysValues tokens = ordered.slice(std::max(0, left_padding_[at]), rotated_ ? max_size_ : next_);
  return RotatingKvCache::holding(max_size_, contiguous(tokens), offset_[at]);
}

std::unique_ptr<RowCache> BatchRotatingKvCache::row_cache(int row) const {
  return std::make_unique<RotatingKvCache>(extract(row));
}

int BatchRotatingKvCache::trim(int tokens) {
  const int trimmed = std::min(written_, tokens);
  written_ -= trimmed;
  next_ -= trimmed;
  for (int& offset : offset_) offset -= trimmed;
  return trimmed;
}

}  // namespace galley::kv
