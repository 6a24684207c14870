#include "ops/kernels/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>

#include "ops/error.h"
#include "ops/kernels/half.h"
#include "ops/kernels/pack_read.h"
#include "ops/kernels/pool.h"

namespace galley::kernels {
namespace {

using ops::ElementType;
using ops::MatrixSource;
using ops::VectorSource;

constexpr std::size_t kSlack = 16384;  // prefetches run past the last block

std::string shape_of(const MatrixSource& m) {
  return m.name() + " [" + std::to_string(m.rows()) + ", " + std::to_string(m.cols()) + "]";
}

const char* type_name(ElementType t) {
  switch (t) {
    case ElementType::f16:
      return "f16";
    case ElementType::bf16:
      return "bf16";
    case ElementType::f32:
      break;
  }
  return "f32";
}

void check_sources(std::span<const MatrixSource* const> sources) {
  if (sources.empty()) throw ModelError("no matrix to pack");
  const MatrixSource& first = *sources.front();
  for (const MatrixSource* m : sources) {
    if (m->rows() <= 0 || m->cols() <= 0) throw ModelError(shape_of(*m) + ": an empty matrix");
    if (m->cols() != first.cols()) {
      throw ModelError(shape_of(*m) + ": expected as many columns as " + shape_of(first));
    }
    if (m->quantized() != first.quantized()) {
      throw ModelError(m->name() + " and " + first.name() + ": one is quantized and the other is not");
    }
    if (!m->quantized()) {
      if (m->type() != first.type()) {
        throw ModelError(m->name() + ": expected " + type_name(first.type()) + " as " + first.name() + ", found " +
                         type_name(m->type()));
      }
      continue;
    }
    const ops::AffineFormat a = m->affine();
    if (a.group != 16 && a.group != 32 && a.group != 64 && a.group != 128) {
      throw ModelError(m->name() + ": quantization groups of " + std::to_string(a.group) +
                       "; the kernels know 16, 32, 64 and 128");
    }
    if (a.bits < 2 || a.bits > 8 || a.bits == 7) {
      throw ModelError(m->name() + ": " + std::to_string(a.bits) + "-bit codes; the kernels know 2, 3, 4, 5, 6 and 8");
    }
    if (const int step = std::max(a.group, 32); m->cols() % step != 0) {
      throw ModelError(shape_of(*m) + ": columns are not a multiple of " + std::to_string(step) + ", in groups of " +
                       std::to_string(a.group));
    }
  }
}

void check_bias(const MatrixSource& m, const VectorSource* bias) {
  if (bias != nullptr && bias->values.size() != static_cast<std::size_t>(m.rows())) {
    throw ModelError(bias->name + ": expected " + std::to_string(m.rows()) + " values as " + shape_of(m) + ", found " +
                     std::to_string(bias->values.size()));
  }
}

// Calls f(begin, end) for [0, count) on the pool (or here) and passes the first exception on.
template <class F>
void for_blocks(Pool* pool, int count, const F& f) {
  std::exception_ptr error;
  std::mutex mutex;
  const auto guarded = [&](int begin, int end, int) {
    try {
      f(begin, end);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  if (pool != nullptr) {
    pool->for_each(count, 1, guarded);
  } else {
    guarded(0, count, 0);
  }
  if (error) std::rethrow_exception(error);
}

bool exact_half(float f) { return half_to_float(float_to_half(f)) == f; }

int padded(int columns) { return (columns + kUnitColumns - 1) / kUnitColumns * kUnitColumns; }

}  // namespace

PackedMatrix PackedMatrix::concatenate(const Isa& isa, std::span<const MatrixSource* const> sources,
                                       std::span<const VectorSource* const> biases, Pool* pool) {
  check_sources(sources);
  if (!biases.empty() && biases.size() != sources.size()) {
    throw ModelError(sources.front()->name() + ": " + std::to_string(biases.size()) + " biases for " +
                     std::to_string(sources.size()) + " matrices");
  }
  std::vector<Column> order;
  for (const MatrixSource* m : sources) {
    for (int r = 0; r < m->rows(); ++r) order.push_back({m, r});
  }
  const int columns = static_cast<int>(order.size());
  order.resize(static_cast<std::size_t>(padded(columns)));
  std::vector<float> bias;
  for (std::size_t i = 0, at = 0; i < biases.size(); ++i) {
    check_bias(*sources[i], biases[i]);
    if (biases[i] != nullptr) {
      bias.resize(order.size());
      std::copy(biases[i]->values.begin(), biases[i]->values.end(), bias.begin() + static_cast<std::ptrdiff_t>(at));
    }
    at += static_cast<std::size_t>(sources[i]->rows());
  }
  PackedMatrix m = pack(isa, order, pool);
  m.columns_ = columns;
  m.bias_ = std::move(bias);
  return m;
}

PackedMatrix PackedMatrix::interleave(const Isa& isa, const MatrixSource& gate, const MatrixSource& up,
                                      const VectorSource* gate_bias, const VectorSource* up_bias, Pool* pool) {
  const MatrixSource* const both[] = {&gate, &up};
  check_sources(both);
  if (gate.rows() != up.rows()) throw ModelError(shape_of(up) + ": expected as many rows as " + shape_of(gate));
  check_bias(gate, gate_bias);
  check_bias(up, up_bias);
  std::vector<Column> order;
  std::vector<float> bias;
  for (int unit = 0; unit < padded(gate.rows()); unit += kUnitColumns) {
    for (const bool is_up : {false, true}) {
      const VectorSource* b = is_up ? up_bias : gate_bias;
      for (int r = unit; r < unit + kUnitColumns; ++r) {
        const bool real = r < gate.rows();
        order.push_back(real ? Column{is_up ? &up : &gate, r} : Column{});
        bias.push_back(real && b != nullptr ? b->values[static_cast<std::size_t>(r)] : 0.0F);
      }
    }
  }
  PackedMatrix m = pack(isa, order, pool);
  m.interleaved_ = true;
  m.columns_ = gate.rows();
  if (gate_bias != nullptr || up_bias != nullptr) m.bias_ = std::move(bias);
  return m;
}

PackedMatrix PackedMatrix::pack(const Isa& isa, const std::vector<Column>& order, Pool* pool) {
  const MatrixSource& first = *order.front().source;
  PackedMatrix m;
  m.lanes_ = isa.lanes;
  m.depth_ = first.cols();
  m.stored_columns_ = static_cast<int>(order.size());
  if (first.quantized()) {
    m.pack_affine(order, pool);
  } else {
    m.kind_ = first.type() == ElementType::f16    ? WeightKind::f16
              : first.type() == ElementType::bf16 ? WeightKind::bf16
                                                  : WeightKind::f32;
    m.pack_plain(order, pool);
  }
  return m;
}

// What holds for the whole matrix decides the layout: group, bits, symmetric, how scales are stored.
void PackedMatrix::choose_layout(const std::vector<Column>& order, Pool* pool) {
  int bits = 4, run = 0;
  bool two_level = true, own_biases = true;
  group_ = 0;
  const MatrixSource* previous = nullptr;
  for (const Column& c : order) {
    if (c.source == nullptr || c.source == previous) continue;
    previous = c.source;
    const ops::AffineFormat format = c.source->affine();
    bits = std::max(bits, format.bits);
    const ops::ScaleRuns runs = c.source->runs();
    two_level =
        two_level && runs.columns != 0 && (run == 0 || run == runs.columns) && (group_ == 0 || group_ == format.group);
    run = runs.columns;
    own_biases = own_biases && runs.biases;
    group_ = group_ == 0 ? format.group : std::min(group_, format.group);
  }
  if (group_ == 16) bits = std::max(bits, 6);
  kind_ = bits == 4   ? WeightKind::affine4
          : bits == 5 ? WeightKind::affine5
          : bits == 6 ? WeightKind::affine6
                      : WeightKind::affine8;

  // Groups of more than 32 have no symmetric kernels: what is symmetric are GGUF's Q4_0, Q5_0, Q8_0 and Q6_K.
  std::atomic<bool> symmetric{group_ <= 32}, half{true};
  for_blocks(pool, stored_columns_ / lanes_, [&](int begin, int end) {
    std::vector<float> scale, bias;
    for (int i = begin * lanes_; i < end * lanes_; ++i) {
      const Column& c = order[static_cast<std::size_t>(i)];
      if (c.source == nullptr) continue;
      const ops::AffineFormat format = c.source->affine();
      scale.resize(static_cast<std::size_t>(depth_ / format.group));
      bias.resize(scale.size());
      c.source->scales(c.row, scale, bias);
      const float zero = static_cast<float>(1 << (format.bits - 1));
      bool s = true, h = true;
      for (std::size_t g = 0; g < scale.size(); ++g) {
        s = s && bias[g] == -zero * scale[g];
        h = h && exact_half(scale[g]) && exact_half(bias[g]);
      }
      if (!s) symmetric = false;
      if (!h) half = false;
    }
  });
  symmetric_ = symmetric;
  two_level = two_level && (symmetric_ || own_biases);
  scale_kind_ = half ? ScaleKind::half : two_level ? ScaleKind::two_level : ScaleKind::single;
  groups_per_run_ = scale_kind_ == ScaleKind::two_level ? run / group_ : 1;
}

void PackedMatrix::pack_affine(const std::vector<Column>& order, Pool* pool) {
  choose_layout(order, pool);
  const auto lanes = static_cast<std::size_t>(lanes_);
  const auto count = static_cast<std::size_t>(groups());
  std::size_t lane_bytes = count * 4;  // of one column's scales
  if (scale_kind_ == ScaleKind::half) lane_bytes = count * 2;
  if (scale_kind_ == ScaleKind::two_level) lane_bytes = count + count / static_cast<std::size_t>(groups_per_run_) * 2;
  header_bytes_ = (lane_bytes * lanes * (symmetric_ ? 1 : 2) + 63) / 64 * 64;
  const std::size_t part_bytes = lanes * 4 * static_cast<std::size_t>(bits());  // codes of 32 inputs
  block_bytes_ = header_bytes_ + static_cast<std::size_t>(depth_ / 32) * part_bytes;
  const int blocks = stored_columns_ / lanes_;
  memory_ = AlignedMemory(block_bytes_ * static_cast<std::size_t>(blocks) + kSlack);
  for_blocks(pool, blocks, [&](int begin, int end) {
    for (int b = begin; b < end; ++b) {
      std::uint8_t* block =
          reinterpret_cast<std::uint8_t*>(memory_.data()) + static_cast<std::size_t>(b) * block_bytes_;
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        const Column& c = order[static_cast<std::size_t>(b) * lanes + lane];
        if (c.source == nullptr) continue;  // the memory is zeroed: scale 0, codes 0
        put_scales(c, block, lane);
        put_codes(c, block, lane);
      }
    }
  });
}

void PackedMatrix::put_scales(const Column& from, std::uint8_t* block, std::size_t lane) const {
  const auto lanes = static_cast<std::size_t>(lanes_);
  const auto format = from.source->affine();
  const auto stored = static_cast<std::size_t>(depth_ / format.group);
  std::uint8_t* at = block;
  const auto put = [&](auto value) {  // the next vector's lane
    std::memcpy(at + lane * sizeof value, &value, sizeof value);
    at += lanes * sizeof value;
  };
  if (scale_kind_ == ScaleKind::two_level) {
    const auto per_run = static_cast<std::size_t>(groups_per_run_);
    std::vector<std::uint16_t> run_scale(stored / per_run), run_bias(stored / per_run);
    std::vector<std::int8_t> scale(stored), bias(stored);
    from.source->levels(from.row, {run_scale, run_bias, scale, bias});
    for (std::size_t g = 0; g < stored; ++g) {
      if (g % per_run == 0) {
        put(run_scale[g / per_run]);
        if (!symmetric_) put(run_bias[g / per_run]);
      }
      put(scale[g]);
      if (!symmetric_) put(bias[g]);
    }
    return;
  }
  std::vector<float> scale(stored), bias(stored);
  from.source->scales(from.row, scale, bias);
  const auto put_float = [&](float value) {
    if (scale_kind_ == ScaleKind::half) {
      put(float_to_half(value));
    } else {
      put(value);
    }
  };
  const auto repeats = static_cast<std::size_t>(format.group / group_);
  for (std::size_t g = 0; g < stored * repeats; ++g) {
    put_float(scale[g / repeats]);
    if (!symmetric_) put_float(bias[g / repeats]);
  }
}

void PackedMatrix::put_codes(const Column& from, std::uint8_t* block, std::size_t lane) const {
  const auto lanes = static_cast<std::size_t>(lanes_);
  const int bits = this->bits();
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(depth_));
  from.source->codes(from.row, codes);
  // Symmetric codes count from the zero point of the stored width.
  const int shift = symmetric_ ? (1 << (bits - 1)) - (1 << (from.source->affine().bits - 1)) : 0;
  if (shift != 0) {
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(code + shift);
  }
  constexpr std::uint32_t each = 0x01010101U;
  std::uint8_t* part = block + header_bytes_ + lane * 4;
  for (std::size_t k = 0; k < codes.size(); k += 32, part += lanes * 4 * static_cast<std::size_t>(bits)) {
    std::array<std::uint32_t, 8> four;  // inputs 4c .. 4c+3
    std::memcpy(four.data(), codes.data() + k, sizeof four);
    const auto put = [&](std::size_t row, std::uint32_t value) { std::memcpy(part + row * lanes * 4, &value, 4); };
    if (bits == 8) {
      for (std::size_t c = 0; c < 8; ++c) put(c, four[c]);
      continue;
    }
    for (std::size_t c = 0; c < 4; ++c) put(c, (four[c] & 15 * each) | (four[c + 4] & 15 * each) << 4);
    if (bits == 5) {
      std::uint32_t plane = 0;
      for (std::size_t c = 0; c < 8; ++c) plane |= (four[c] >> 4 & each) << c;
      put(4, plane);
    } else if (bits == 6) {
      for (std::size_t h = 0; h < 2; ++h) {
        std::uint32_t plane = 0;
        for (std::size_t i = 0; i < 4; ++i) plane |= (four[4 * h + i] >> 4 & 3 * each) << 2 * i;
        put(4 + h, plane);
      }
    }
  }
}

void PackedMatrix::decode(int column, std::span<float> out) const {
  const auto columns = static_cast<std::size_t>(block_columns());
  const std::uint8_t* block = this->block(static_cast<std::size_t>(column) / columns);
  const std::size_t lane = static_cast<std::size_t>(column) % columns;
  if (!affine()) {
    for (std::size_t k = 0; k < out.size(); ++k) {
      const std::size_t at = k * columns + lane;
      switch (kind_) {
        case WeightKind::f16:
          out[k] = half_to_float(load_packed<std::uint16_t>(block + at * 2));
          break;
        case WeightKind::bf16:
          out[k] = bfloat_to_float(load_packed<std::uint16_t>(block + at * 2));
          break;
        default:
          out[k] = load_packed<float>(block + at * 4);
          break;
      }
    }
    return;
  }
  const int zero = zero_point(*this);
  for (int g = 0; g < groups(); ++g) {
    const PackedScale s = scale_at(*this, block, lane, g);
    for (int k = g * group_; k < (g + 1) * group_; ++k) {
      out[static_cast<std::size_t>(k)] = s.scale * static_cast<float>(code_at(*this, block, lane, k) - zero) + s.bias;
    }
  }
}

void PackedMatrix::pack_plain(const std::vector<Column>& order, Pool* pool) {
  const std::size_t element = kind_ == WeightKind::f32 ? 4 : 2;
  const int blocks = stored_columns_ / kPlainColumns;
  block_bytes_ = (static_cast<std::size_t>(depth_) * kPlainColumns * element + 63) / 64 * 64;
  memory_ = AlignedMemory(block_bytes_ * static_cast<std::size_t>(blocks) + kSlack);
  for_blocks(pool, blocks, [&](int begin, int end) {
    std::vector<float> row(static_cast<std::size_t>(depth_));
    for (int b = begin; b < end; ++b) {
      std::byte* block = memory_.data() + static_cast<std::size_t>(b) * block_bytes_;
      for (std::size_t lane = 0; lane < kPlainColumns; ++lane) {
        const Column& c = order[static_cast<std::size_t>(b) * kPlainColumns + lane];
        if (c.source == nullptr) continue;
        c.source->values(c.row, row);
        for (std::size_t k = 0; k < row.size(); ++k) {
          std::byte* at = block + (k * kPlainColumns + lane) * element;
          if (kind_ == WeightKind::f32) {
            std::memcpy(at, &row[k], 4);
          } else {
            const std::uint16_t h = kind_ == WeightKind::f16 ? float_to_half(row[k]) : float_to_bfloat(row[k]);
            std::memcpy(at, &h, 2);
          }
        }
      }
    }
  });
}

}  // namespace galley::kernels
