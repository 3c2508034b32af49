// Order statistics and the permutation test of statistics.h.
#include "runtime/profile/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dsv41 {
namespace {

constexpr std::size_t kMostBlocks = 20, kLeastBlocks = 5, kPermutations = 20000;

/// SplitMix64: a fixed sequence, so that a report is the same each time.
struct Random {
  std::uint64_t state = 0x9E3779B97F4A7C15u;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
};

std::vector<double> block_medians(std::span<const std::int64_t> values) {
  const std::size_t blocks = std::min(kMostBlocks, values.size());
  std::vector<double> medians;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t begin = values.size() * block / blocks, end = values.size() * (block + 1) / blocks;
    const auto part = values.subspan(begin, end - begin);
    medians.push_back(static_cast<double>(distribution({part.begin(), part.end()}).median));
  }
  return medians;
}

double mean(std::span<const double> values) {
  return values.empty()
             ? 0
             : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

Distribution distribution(std::vector<std::int64_t> values) {
  Distribution result;
  result.count = values.size();
  if (values.empty()) return result;
  std::sort(values.begin(), values.end());
  const auto percentile = [&](std::size_t percent) {
    return values[(values.size() * percent + 99) / 100 - 1];
  };
  result.median = percentile(50);
  result.p90 = percentile(90);
  result.max = values.back();
  result.sum = std::accumulate(values.begin(), values.end(), std::int64_t{0});
  return result;
}

Difference difference(std::span<const std::int64_t> before, std::span<const std::int64_t> after) {
  const std::vector<double> a = block_medians(before), b = block_medians(after);
  Difference result{mean(a), mean(b), 1, a.size() >= kLeastBlocks && b.size() >= kLeastBlocks};
  if (!result.enough) return result;

  const double observed = std::abs(result.after - result.before) * (1 - 1e-12);
  std::vector<double> all = a;
  all.insert(all.end(), b.begin(), b.end());
  Random random;
  std::size_t as_large = 1;  // the observed order is one of the permutations
  for (std::size_t permutation = 0; permutation < kPermutations; ++permutation) {
    for (std::size_t i = all.size() - 1; i > 0; --i) std::swap(all[i], all[random.next() % (i + 1)]);
    const std::span<const double> shuffled(all);
    as_large += std::abs(mean(shuffled.first(a.size())) - mean(shuffled.subspan(a.size()))) >= observed;
  }
  result.probability = static_cast<double>(as_large) / static_cast<double>(kPermutations + 1);
  return result;
}

}  // namespace dsv41
