// From logits to a token (docs/model.md 8, docs/numerics.md 8 and 10).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dsv41 {

struct SamplingOptions {
  double temperature = 0;  // 0: the largest logit, ties to the lowest id
  double top_p = 1;        // in (0, 1]: the fewest most likely tokens that together reach it
  std::uint64_t seed = 0;
};

/// A number in [0, 1) that depends on seed and position only, so that batching and speculation draw the same.
double uniform_draw(std::uint64_t seed, std::uint32_t position);

class Sampler {
 public:
  /// The token that follows `position`. Throws std::domain_error when the logits hold a NaN: the weights are
  /// damaged.
  std::uint32_t sample(std::span<const float> logits, const SamplingOptions& options, std::uint32_t position);

 private:
  std::vector<double> probabilities_;
  std::vector<std::uint32_t> order_;
};

}  // namespace dsv41
