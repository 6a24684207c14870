#include "kv/batch_cache.h"

#include <algorithm>
#include <utility>

namespace galley::kv {

namespace mx = mlx::core;

BatchKvCache::BatchKvCache(std::vector<int> left_padding, ops::KvFormat format)
    : format_(format), left_padding_(std::move(left_padding)) {
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

  std::vector<KeysValues> parts;
  for (const KvCache* row : rows) {
    parts.push_back(row->size() == 0 ? zeros_like(*like, longest)
                                     : padded(row->buffer()->slice(0, row->size()), longest - row->size(), 0));
  }
  BatchKvCache merged(std::move(padding), like->groups ? like->groups->format : ops::KvFormat{});
  merged.buffer_ = stacked(parts);
  for (int& offset : merged.offset_) offset += longest;
  merged.end_ = longest;
  return merged;
}

std::unique_ptr<BatchCache> BatchKvCache::clone() const { return std::make_unique<BatchKvCache>(*this); }

ops::RopeOffset BatchKvCache::offset() const { return int_array(offset_); }

ops::AttentionMask BatchKvCache::mask(int tokens, int window) const {
  return {"array", causal_mask(tokens, end_, window, int_array(left_padding_))};
}

KeysValues BatchKvCache::fetched() const { return buffer_->slice(0, end_); }

KeysValues BatchKvCache::update_and_fetch(const mx::array& k, const mx::array& v) {
  append(buffer_, end_, KeysValues{k, v}.quantized(format_));
  const int added = k.shape(2);
  for (int& offset : offset_) offset += added;
  end_ += added;
  return fetched();
}

void BatchKvCache::prepare(const std::vector<int>&, const std::vector<int>& right_padding) {
  if (std::ranges::any_of(right_padding, [](int padding) { return padding > 0; })) right_padding_ = right_padding;
}

void BatchKvCache::finalize() {
  if (right_padding_.empty()) return;
  buffer_ = rolled_by_row(*buffer_, right_padding_);
  for (std::size_t row = 0; row < offset_.size(); ++row) {
    offset_[row] -= right_padding_[row];
    left_padding_[row] += right_padding_[row];
  }
  right_padding_.clear();
}

void BatchKvCache::filter(const std::vector<int>& rows) {
  if (buffer_) buffer_ = taken(*buffer_, rows);
  offset_ = taken(offset_, rows);
  left_padding_ = taken(left_padding_, rows);
  const int common = left_padding_.empty() ? 0 : *std::ranges::min_element(left_padding_);
  if (common <= 0) return;
  if (buffer_) buffer_ = buffer_->slice(common, buffer_->capacity());
  end_ -= common;
  for (int& each : left_padding_) each -= common;
}

void BatchKvCache::extend(const BatchCache& added) {
  const auto& other = dynamic_cast<const BatchKvCache&>(added);
  const int end = std::max(end_, other.end_);
  if (buffer_ || other.buffer_) {
    const int capacity = std::max(buffer_ ? buffer_->capacity() : 0, other.buffer_ ? other.buffer_->capacity() : 0);
    const KeysValues& like = buffer_ ? *buffer_ : *other.buffer_;
    const KeysValues mine = aligned(buffer_, rows(), end_, end, capacity, like);
    const KeysValues theirs = aligned(other.buffer_, other.rows(), other.end_, end, capacity, like);
    for (int& padding : left_padding_) padding += end - end_;
    for (const int padding : other.left_padding_) left_padding_.push_back(padding + end - other.end_);
    buffer_ = stacked({mine, theirs});
    end_ = end;
  } else {
    left_padding_.insert(left_padding_.end(), other.left_padding_.begin(), other.left_padding_.end());
  }
  offset_.insert(offset_.end(), other.offset_.begin(), other.offset_.end());
}

KvCache BatchKvCache::extract(int row) const {
  if (!buffer_) return KvCache(format_);
  return KvCache::holding(contiguous(buffer_->row(row).slice(left_padding_[static_cast<std::size_t>(row)], end_)));
}

std::unique_ptr<RowCache> BatchKvCache::row_cache(int row) const { return std::make_unique<KvCache>(extract(row)); }

int BatchKvCache::trim(int tokens) {
  const int trimmed = std::min(end_, tokens);
  end_ -= trimmed;
  for (int& offset : offset_) offset -= trimmed;
  return trimmed;
}

}  // namespace galley::kv
