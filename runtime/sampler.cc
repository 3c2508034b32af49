#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "kernels/exact_math.h"

namespace dsv41 {
namespace {

// A 64-bit finalizer: every output bit depends on every input bit.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

}  // namespace

double uniform_draw(std::uint64_t seed, std::uint32_t position) {
  return static_cast<double>(mix(mix(seed) ^ position) >> 11) * 0x1p-53;
}

std::uint32_t Sampler::sample(std::span<const float> logits, const SamplingOptions& options,
                              std::uint32_t position) {
  std::size_t best = 0;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    if (std::isnan(logits[id]))
      throw std::domain_error("a logit is not a number: the checkpoint's weights are damaged");
    if (logits[id] > logits[best]) best = id;
  }
  if (options.temperature <= 0) return static_cast<std::uint32_t>(best);

  probabilities_.resize(logits.size());
  double total = 0;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    const double difference = static_cast<double>(logits[id]) - static_cast<double>(logits[best]);
    probabilities_[id] = exact::exp(difference / options.temperature);
    total += probabilities_[id];
  }

  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0u);
  if (options.top_p < 1) {
    std::sort(order_.begin(), order_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return probabilities_[a] != probabilities_[b] ? probabilities_[a] > probabilities_[b] : a < b;
    });
    double kept = 0;
    std::size_t count = 0;
    while (count < order_.size() && kept < options.top_p * total) kept += probabilities_[order_[count++]];
    order_.resize(count);
    total = kept;
  }
  const double target = uniform_draw(options.seed, position) * total;
  double sum = 0;
  for (const std::uint32_t id : order_) {
    sum += probabilities_[id];
    if (sum > target) return id;
  }
  return order_.back();
}

}  // namespace dsv41
