#include "models/rope.h"

#include <mlx/mlx.h>

#include <limits>
#include <numbers>
#include <vector>

#include "ops/error.h"

namespace galley::models {
namespace {

namespace mx = mlx::core;

// Llama 3's scaling: long wavelengths are stretched by `factor`, short ones stay, those between are interpolated.
// The same float32 array operations as mlx-lm's Llama3RoPE, for the same bits.
std::vector<float> llama3_frequencies(const Config& config, int head_dim) {
  const RopeScaling& scaling = config.rope_scaling;
  const auto number = [](double value) { return mx::array(static_cast<float>(value)); };
  const double context = scaling.original_context;
  const mx::array low_wavelength = number(context / scaling.low_freq_factor);
  const mx::array high_wavelength = number(context / scaling.high_freq_factor);

  mx::array frequencies =
      mx::power(number(config.rope_base), mx::divide(mx::arange(0, head_dim, 2), mx::array(head_dim)));
  const mx::array wavelengths = mx::multiply(number(2 * std::numbers::pi), frequencies);
  frequencies = mx::where(mx::greater(wavelengths, low_wavelength), mx::multiply(frequencies, number(scaling.factor)),
                          frequencies);
  const mx::array medium =
      mx::logical_and(mx::greater(wavelengths, high_wavelength), mx::less(wavelengths, low_wavelength));
  const mx::array smooth =
      mx::divide(mx::subtract(mx::divide(number(context), wavelengths), number(scaling.low_freq_factor)),
                 number(static_cast<double>(scaling.high_freq_factor) - static_cast<double>(scaling.low_freq_factor)));
  const mx::array blended =
      mx::divide(frequencies, mx::add(mx::divide(mx::subtract(number(1.0), smooth), number(scaling.factor)), smooth));
  mx::array result = mx::contiguous(mx::where(medium, blended, frequencies));
  result.eval();
  return {result.data<float>(), result.data<float>() + result.size()};
}

// The first pairs turn as in a whole head, the others not at all: their wavelength is infinite.
std::vector<float> proportional_frequencies(const Config& config, int head_dim) {
  const auto rotated = static_cast<int>(head_dim * config.rope_scaling.rotated);
  const mx::array exponents =
      mx::divide(mx::arange(0, rotated, 2, mx::float32), mx::array(static_cast<float>(head_dim)));
  mx::array result = mx::contiguous(
      mx::multiply(mx::array(config.rope_scaling.factor), mx::power(mx::array(config.rope_base), exponents)));
  result.eval();
  std::vector<float> frequencies(result.data<float>(), result.data<float>() + result.size());
  frequencies.resize(static_cast<std::size_t>(head_dim / 2), std::numeric_limits<float>::infinity());
  return frequencies;
}

}  // namespace

ops::Rope make_rope(const Config& config) { return make_rope(config, config.head_dim); }

ops::Rope make_rope(const Config& config, int head_dim) {
  ops::Rope rope;
  rope.dims = head_dim;
  rope.base = config.rope_base;
  rope.traditional = config.rope_traditional;
  const std::string& type = config.rope_scaling.type;
  if (type.empty() || type == "default") return rope;
  if (type == "linear") {
    rope.scale = static_cast<float>(1.0 / static_cast<double>(config.rope_scaling.factor));
  } else if (type == "llama3") {
    rope.frequencies = llama3_frequencies(config, head_dim);
  } else if (type == "proportional") {
    rope.frequencies = proportional_frequencies(config, head_dim);
  } else {
    throw ModelError("RoPE scaling type \"" + type +
                     "\" is not supported (known: default, linear, llama3, proportional)");
  }
  return rope;
}

}  // namespace galley::models
