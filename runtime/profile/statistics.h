// Order statistics of measurements.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dsv41 {

struct Distribution {
  std::int64_t median = 0, p90 = 0, max = 0, sum = 0;
  std::size_t count = 0;
};

/// Nearest-rank percentiles; zeros for no values.
Distribution distribution(std::vector<std::int64_t> values);

/// Difference of two series of measurements, with the noise of each taken into account.
struct Difference {
  double before = 0, after = 0;  // means of the block medians
  double probability = 1;        // of a difference this large between runs that do not differ
  bool enough = false;           // whether there are measurements enough to tell
};

/// Neighbouring measurements share their disturbances, so each series is cut into at most twenty blocks of
/// neighbours and the blocks' medians are compared by a permutation test.
Difference difference(std::span<const std::int64_t> before, std::span<const std::int64_t> after);

/// Differences are called significant below this probability.
inline constexpr double kSignificance = 0.01;

}  // namespace dsv41
