// Sums of the plain backend (docs/numerics.md 1 and 2), written as fixed-size lanes so that compilers
// vectorize them.
#pragma once

#include <array>
#include <cstddef>

#include "kernels/views.h"

namespace dsv41::plain {

inline constexpr std::size_t kLanes = 16;

/// term(0) + ... + term(count-1) in fp64: lane j takes the terms i = j (mod 16) in ascending i, then the
/// lanes fold by halves. Lanes start at +0.
template <class Term>
double wide_sum(std::size_t count, const Term& term) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  for (std::size_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline double wide_dot(const double* x, const double* y, std::size_t count) {
  return wide_sum(count, [=](std::size_t i) { return x[i] * y[i]; });
}

/// Dot product of one block of 32 code values. The products are multiples of 2^-18 below 2^18, so that fp64
/// holds every partial sum exactly: the order is free.
inline double block_dot(const double* x, const double* y) {
  double lanes[8] = {};
  for (std::size_t i = 0; i < kBlock; i += 8)
    for (std::size_t lane = 0; lane < 8; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

}  // namespace dsv41::plain
