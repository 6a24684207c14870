#include "ops/kernels/activations.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace galley::kernels {

void Activations::reshape(int rows, int k, ActivationForm form, bool normed, int max_tile) {
  if (rows < 0 || k <= 0 || max_tile <= 0 || (form.quantized() && k % form.group != 0)) {
    throw std::invalid_argument("Activations: " + std::to_string(rows) + " rows of " + std::to_string(k) +
                                " columns in groups of " + std::to_string(form.group));
  }
  rows_ = rows;
  k_ = k;
  form_ = form;
  // Balanced tiles: 13 rows become 7 + 6, not 12 + 1.
  const int count = std::max(1, (rows + max_tile - 1) / max_tile);
  tile_ = std::max(1, (rows + count - 1) / count);

  const auto align = [](std::size_t n) { return (n + 127) / 128 * 128; };
  const std::size_t n = static_cast<std::size_t>(rows);
  const std::size_t codes = form.quantized() ? align(n * static_cast<std::size_t>(k)) : 0;
  const std::size_t cells = form.quantized() ? align(n * static_cast<std::size_t>(k / form.group) * 4) : 0;
  const std::size_t halves = form.group == 32 ? align(n * static_cast<std::size_t>(k / 16) * 4) : 0;
  const std::size_t floats = form.quantized() ? 0 : align(n * stride() * 4);
  const std::size_t squares = normed ? align(n * static_cast<std::size_t>(ssq_groups()) * 4) : 0;
  const std::size_t need = codes + 3 * cells + halves + floats + squares + 128;
  if (memory_.size() < need) memory_ = AlignedMemory(need + need / 4);

  std::byte* p = memory_.data();
  const auto take = [&p](std::size_t bytes) {
    std::byte* at = p;
    p += bytes;
    return at;
  };
  q_ = nullptr;
  scale_ = sum_ = x_ = ssq_ = nullptr;
  neg_ = neg16_ = nullptr;
  if (form.quantized()) {
    q_ = reinterpret_cast<std::int8_t*>(take(codes));
    scale_ = reinterpret_cast<float*>(take(cells));
    sum_ = reinterpret_cast<float*>(take(cells));
    neg_ = reinterpret_cast<std::int32_t*>(take(cells));
    if (halves > 0) neg16_ = reinterpret_cast<std::int32_t*>(take(halves));
  } else {
    x_ = reinterpret_cast<float*>(take(floats));
  }
  if (normed) ssq_ = reinterpret_cast<float*>(take(squares));
}

}  // namespace galley::kernels
