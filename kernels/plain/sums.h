// Sums of the plain backend (docs/numerics.md 1 and 2), written as fixed-size lanes so that compilers
// vectorize them.
#pragma once

#include <cstddef>
#include <cstring>

#include "kernels/views.h"

namespace dsv41::plain {

inline constexpr std::size_t kLanes = 16;

/// Folds lanes by halves.
inline double fold(double* lanes) {
  for (std::size_t half = kLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

/// term(0) + ... + term(count-1) in fp64: lane j takes the terms i = j (mod 16) in ascending i, then the
/// lanes fold by halves. Lanes start at +0.
template <class Term>
double wide_sum(std::size_t count, const Term& term) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  for (std::size_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  return fold(lanes);
}

/// Two lanes in one register of any x86-64: left to itself, the compiler regroups the loops below with more
/// shuffles than sums. Element-wise operations only, so that every lane is the scalar sum it stands for.
using TwoLanes [[gnu::vector_size(16), gnu::aligned(8), gnu::may_alias]] = double;

inline TwoLanes two(const double* values) {
  return *reinterpret_cast<const TwoLanes*>(values);
}

/// wide_sum of x[i] * y[i].
inline double wide_dot(const double* x, const double* y, std::size_t count) {
  TwoLanes sums[kLanes / 2] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t pair = 0; pair < kLanes / 2; ++pair)
      sums[pair] += two(x + i + 2 * pair) * two(y + i + 2 * pair);
  double lanes[kLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (std::size_t lane = 0; i + lane < count; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
  return fold(lanes);
}

/// Dot product of one block of 32 code values. The products are multiples of 2^-18 below 2^18, so that fp64
/// holds every partial sum exactly: the order is free.
inline double block_dot(const double* x, const double* y) {
  TwoLanes sums[4] = {};
  for (std::size_t i = 0; i < kBlock; i += 8)
    for (std::size_t pair = 0; pair < 4; ++pair) sums[pair] += two(x + i + 2 * pair) * two(y + i + 2 * pair);
  const TwoLanes sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return sum[0] + sum[1];
}

}  // namespace dsv41::plain
