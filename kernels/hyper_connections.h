// mixes(): from the 24 projections of a residual stream to pre, post and comb (docs/model.md 2,
// docs/numerics.md 3-4).
#pragma once

#include <cstddef>
#include <span>

namespace dsv41 {

/// projections fp64 [(2 + copies) * copies], scale [3], base as projections; pre, post [copies], comb
/// [copies, copies]. Sinkhorn runs in fp64 and ends on a column step.
void finish_mixes(std::span<const double> projections, std::span<const float> scale,
                  std::span<const float> base, std::size_t copies, unsigned sinkhorn_iterations,
                  double hc_eps, std::span<float> pre, std::span<float> post, std::span<float> comb);

}  // namespace dsv41
