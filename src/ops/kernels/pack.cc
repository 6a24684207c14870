#include "ops/kernels/pack.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>

#include "ops/error.h"
#include "ops/kernels/half.h"
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
    if (a.group != 32 && a.group != 64 && a.group != 128) {
      throw ModelError(m->name() + ": quantization groups of " + std::to_string(a.group) +
                       "; the kernels know 32, 64 and 128");
    }
    if (a.bits < 2 || a.bits > 8 || a.bits == 7) {
      throw ModelError(m->name() + ": " + std::to_string(a.bits) + "-bit codes; the kernels know 2, 3, 4, 5, 6 and 8");
    }
    if (a.group != first.affine().group) {
      throw ModelError(m->name() + ": groups of " + std::to_string(a.group) + ", but " + first.name() +
                       " has groups of " + std::to_string(first.affine().group));
    }
    if (m->cols() % a.group != 0) {
      throw ModelError(shape_of(*m) + ": columns are not a multiple of the group " + std::to_string(a.group));
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
    m.group_ = first.affine().group;
    m.pack_affine(order, pool);
  } else {
    m.kind_ = first.type() == ElementType::f16    ? WeightKind::f16
              : first.type() == ElementType::bf16 ? WeightKind::bf16
                                                  : WeightKind::f32;
    m.pack_plain(order, pool);
  }
  return m;
}

void PackedMatrix::pack_affine(const std::vector<Column>& order, Pool* pool) {
  const int group_count = groups();
  const int blocks = stored_columns_ / lanes_;
  const auto count = static_cast<std::size_t>(group_count);

  // What holds for the whole matrix decides the layout: bits, symmetric, scales that fit fp16.
  kind_ = WeightKind::affine4;
  for (const Column& c : order) {
    if (c.source != nullptr && c.source->affine().bits != 4) kind_ = WeightKind::affine8;
  }
  // Only groups of 32 have symmetric kernels: that is what GGUF's Q4_0 and Q8_0 use.
  std::atomic<bool> symmetric{group_ == 32}, half{true};
  const float zero_point = static_cast<float>(1 << (bits() - 1));
  for_blocks(pool, blocks, [&](int begin, int end) {
    std::vector<float> scale(count), bias(count);
    for (int i = begin * lanes_; i < end * lanes_; ++i) {
      const Column& c = order[static_cast<std::size_t>(i)];
      if (c.source == nullptr) continue;
      c.source->scales(c.row, scale, bias);
      bool s = true, h = true;
      for (std::size_t g = 0; g < count; ++g) {
        s = s && bias[g] == -zero_point * scale[g];
        h = h && exact_half(scale[g]) && exact_half(bias[g]);
      }
      if (!s) symmetric = false;
      if (!h) half = false;
    }
  });
  symmetric_ = symmetric;
  half_scales_ = half;

  const auto lanes = static_cast<std::size_t>(lanes_);
  const std::size_t scale_bytes = half_scales_ ? 2 : 4;
  const std::size_t per_group = symmetric_ ? lanes : 2 * lanes;
  header_bytes_ = (count * per_group * scale_bytes + 63) / 64 * 64;
  const std::size_t part_bytes = lanes * 4 * static_cast<std::size_t>(bits());  // codes of 32 inputs
  block_bytes_ = header_bytes_ + static_cast<std::size_t>(depth_ / 32) * part_bytes;
  memory_ = AlignedMemory(block_bytes_ * static_cast<std::size_t>(blocks) + kSlack);

  const auto put_scale = [this](std::uint8_t* header, std::size_t index, float value) {
    if (half_scales_) {
      const std::uint16_t h = float_to_half(value);
      std::memcpy(header + index * 2, &h, 2);
    } else {
      std::memcpy(header + index * 4, &value, 4);
    }
  };
  for_blocks(pool, blocks, [&](int begin, int end) {
    std::vector<float> scale(count), bias(count);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(depth_));
    for (int b = begin; b < end; ++b) {
      std::uint8_t* block =
          reinterpret_cast<std::uint8_t*>(memory_.data()) + static_cast<std::size_t>(b) * block_bytes_;
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        const Column& c = order[static_cast<std::size_t>(b) * lanes + lane];
        if (c.source == nullptr) continue;  // the memory is zeroed: scale 0, codes 0
        c.source->scales(c.row, scale, bias);
        c.source->codes(c.row, codes);
        for (std::size_t g = 0; g < count; ++g) {
          put_scale(block, g * per_group + lane, scale[g]);
          if (!symmetric_) put_scale(block, g * per_group + lanes + lane, bias[g]);
        }
        for (std::size_t k = 0; k < codes.size(); k += 32) {
          std::uint8_t* part = block + header_bytes_ + k / 32 * part_bytes + lane * 4;
          const auto load = [&](std::size_t row) {  // four codes at once
            std::uint32_t four;
            std::memcpy(&four, codes.data() + k + row * 4, 4);
            return four;
          };
          for (std::size_t row = 0; row < static_cast<std::size_t>(bits()); ++row) {
            const std::uint32_t four =
                bits() == 8 ? load(row) : (load(row) & 0x0f0f0f0fU) | (load(row + 4) & 0x0f0f0f0fU) << 4;
            std::memcpy(part + row * lanes * 4, &four, 4);
          }
        }
      }
    }
  });
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
