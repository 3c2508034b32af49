// RoPE tables (docs/model.md 3, docs/numerics.md 7). Every step of the YaRN blend is rounded to fp32.
#include "kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "kernels/exact_math.h"

namespace dsv41 {
namespace {

/// The pair index at which `rotations` full turns happen over the original length, fp64; base > 1.
double turning_dimension(const RopeParameters& parameters, double rotations) {
  constexpr double kTwoPi = 0x1.921fb54442d18p2;
  const double turns = static_cast<double>(parameters.original_length) / (rotations * kTwoPi);
  return static_cast<double>(parameters.dim) * exact::log1p(turns - 1.0) /
         (2.0 * exact::log1p(static_cast<double>(parameters.base) - 1.0));
}

}  // namespace

std::vector<float> rope_frequencies(const RopeParameters& parameters) {
  const std::size_t pairs = parameters.dim / 2;
  std::vector<float> frequencies(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(parameters.dim);
    frequencies[i] = 1.0f / static_cast<float>(exact::pow(parameters.base, exponent));
  }
  if (parameters.original_length == 0) return frequencies;

  const double last = static_cast<double>(parameters.dim) - 1.0;
  const auto low =
      static_cast<float>(std::max(std::floor(turning_dimension(parameters, parameters.beta_fast)), 0.0));
  const auto high =
      static_cast<float>(std::min(std::ceil(turning_dimension(parameters, parameters.beta_slow)), last));
  for (std::size_t i = 0; i < pairs; ++i) {
    const float position = (static_cast<float>(i) - low) / std::max(high - low, 1e-3f);
    const float ramp = std::min(std::max(position, 0.0f), 1.0f);
    const float smooth = 1.0f - ramp;
    const float stretched = frequencies[i] / parameters.factor * (1.0f - smooth);
    frequencies[i] = stretched + frequencies[i] * smooth;
  }
  return frequencies;
}

void rope_row(std::span<const float> frequencies, std::uint32_t position, std::span<float> cosine,
              std::span<float> sine) {
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    cosine[i] = static_cast<float>(exact::cos(angle));
    sine[i] = static_cast<float>(exact::sin(angle));
  }
}

}  // namespace dsv41
