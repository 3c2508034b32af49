// Transcendental functions in fp64, error below 1 ulp, one source for host and device (docs/numerics.md 7).
// No libm: its last bit differs between systems. Only +, -, *, / and bit operations, to be compiled without
// contraction (-ffp-contract=off, -fmad=false); then every machine gives the same bits.
// The functions are static: a file compiled for AVX2 must not lend its copy to the rest of the program.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/formats.h"

namespace dsv41::exact {

namespace detail {

// Adding 1.5 * 2^52 rounds to an integer (nearest even) and leaves it in the low bits of the sum.
inline constexpr double kRoundToInteger = 0x1.8p52;
// ln 2 in two pieces; the first is short enough that its product with an exponent is exact.
inline constexpr double kLn2High = 0x1.62e42feep-1;
inline constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

/// 2^exponent for exponent in [-1022, 1023].
DSV41_HOST_DEVICE static inline double power_of_two(std::int64_t exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

/// e^(x + low) with |low| at most an ulp of x. Taylor series on [-ln2/2, ln2/2], where the terms beyond 13
/// are below 2^-57; the two roundings of the closing sums leave less than 0.9 ulp. No branch: vector code can
/// do the same.
DSV41_HOST_DEVICE static inline double exp_sum(double x, double low) {
  x = x > 800.0 ? 800.0 : x;    // already infinite
  x = x < -800.0 ? -800.0 : x;  // already zero
  const double shifted = x * 0x1.71547652b82fep0 + kRoundToInteger;
  const double n = shifted - kRoundToInteger;
  const double high = x - n * kLn2High;  // exact
  const double rest = n * kLn2Low - low;
  const double r = high - rest;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  const double value = 1.0 + (high + (r * r * p - rest));
  // Two factors, because 2^n itself may lie outside the range of fp64. Unsigned arithmetic: n is noise if x
  // is NaN.
  const auto exponent =
      static_cast<std::int32_t>(static_cast<std::uint32_t>(std::bit_cast<std::uint64_t>(shifted)));
  const std::int64_t half = exponent >> 1;
  return value * power_of_two(half) * power_of_two(exponent - half);
}

/// x = 2^exponent * mantissa with mantissa in [sqrt(1/2), sqrt(2)); x positive, finite and normal.
struct Scaled {
  double mantissa, exponent;
};
DSV41_HOST_DEVICE static inline Scaled split_exponent(double x) {
  // 0x3FE6A09E667F3BCD is sqrt(1/2): the borrow of the subtraction decides between two neighbouring
  // exponents.
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t root_half = 0x3FE6A09E667F3BCDull;
  const auto exponent = static_cast<std::int64_t>(bits - root_half) >> 52;
  return {std::bit_cast<double>(bits - (static_cast<std::uint64_t>(exponent) << 52)),
          static_cast<double>(exponent)};
}

/// x minus the nearest multiple of pi/2 as a sum of two doubles, and that multiple modulo 4. |x| <= 2^32: the
/// first three pieces of pi/2 have at most 21 bits, so that their products with the multiple are exact.
struct Reduced {
  double high, low;
  unsigned quadrant;
};
DSV41_HOST_DEVICE static inline Reduced reduce_quarter_turns(double x) {
  const double shifted = x * 0x1.45f306dc9c883p-1 + kRoundToInteger;
  const double n = shifted - kRoundToInteger;
  const double r = (x - n * 0x1.921fbp0) - n * 0x54442p-40;  // exact
  const double third = n * 0xd1846p-60;                      // exact
  const double sum = r - third;
  const double back = sum - r;
  const double error = (r - (sum - back)) - (third + back);  // what the subtraction rounded away
  const double tail = error - n * 0x9.898cc51701b839ap-64;
  const double high = sum + tail;
  return {high, (sum - high) + tail, static_cast<unsigned>(std::bit_cast<std::uint64_t>(shifted) & 3u)};
}

/// sin(high + low), |high| <= pi/4.
DSV41_HOST_DEVICE static inline double sin_series(double high, double low) {
  const double z = high * high;
  double p = 1.0 / 355687428096000.0;
  p = p * z - 1.0 / 1307674368000.0;
  p = p * z + 1.0 / 6227020800.0;
  p = p * z - 1.0 / 39916800.0;
  p = p * z + 1.0 / 362880.0;
  p = p * z - 1.0 / 5040.0;
  p = p * z + 1.0 / 120.0;
  p = p * z - 1.0 / 6.0;
  return high + (z * high * p + low * (1.0 - 0.5 * z));
}

/// cos(high + low), |high| <= pi/4.
DSV41_HOST_DEVICE static inline double cos_series(double high, double low) {
  const double z = high * high;
  double p = -1.0 / 6402373705728000.0;
  p = p * z + 1.0 / 20922789888000.0;
  p = p * z - 1.0 / 87178291200.0;
  p = p * z + 1.0 / 479001600.0;
  p = p * z - 1.0 / 3628800.0;
  p = p * z + 1.0 / 40320.0;
  p = p * z - 1.0 / 720.0;
  p = p * z + 1.0 / 24.0;
  const double half = 0.5 * z;
  const double value = 1.0 - half;
  return value + (((1.0 - value) - half) + (z * z * p - high * low));
}

/// An unevaluated sum of two doubles (about 106 bits). Only pow needs it, and pow only builds tables.
struct Pair {
  double high, low;
};
DSV41_HOST_DEVICE static inline Pair add_exact(double a, double b) {
  const double sum = a + b;
  const double part = sum - a;
  return {sum, (a - (sum - part)) + (b - part)};
}
DSV41_HOST_DEVICE static inline Pair multiply_exact(double a, double b) {
  // Halves of 26 bits multiply exactly; |a|, |b| < 2^970.
  const double a_scaled = a * 0x1.000001p27 + 0.0, b_scaled = b * 0x1.000001p27 + 0.0;
  const double a_high = a_scaled - (a_scaled - a), b_high = b_scaled - (b_scaled - b);
  const double a_low = a - a_high, b_low = b - b_high;
  const double product = a * b;
  return {product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low};
}
DSV41_HOST_DEVICE static inline Pair add(Pair a, Pair b) {
  const Pair sum = add_exact(a.high, b.high);
  return add_exact(sum.high, sum.low + (a.low + b.low));
}
DSV41_HOST_DEVICE static inline Pair multiply(Pair a, Pair b) {
  const Pair product = multiply_exact(a.high, b.high);
  return add_exact(product.high, product.low + (a.high * b.low + a.low * b.high));
}
DSV41_HOST_DEVICE static inline Pair divide(Pair a, Pair b) {
  const double quotient = a.high / b.high;
  const Pair product = multiply({quotient, 0.0}, b);
  const Pair rest = add(a, {-product.high, -product.low});
  return add_exact(quotient, (rest.high + rest.low) / b.high);
}

/// ln x for positive normal x: exponent * ln 2 + 2 atanh((m-1)/(m+1)).
DSV41_HOST_DEVICE static inline Pair log_pair(double x) {
  const Scaled scaled = split_exponent(x);
  const Pair s = divide({scaled.mantissa - 1.0, 0.0}, add_exact(scaled.mantissa, 1.0));
  const Pair z = multiply(s, s);
  Pair series{0.0, 0.0};
  for (int term = 37; term > 0; term -= 2)  // z <= 0.0295: the first term left out is below 2^-90
    series = add(multiply(series, z), divide({1.0, 0.0}, {static_cast<double>(term), 0.0}));
  series = multiply(series, {2.0 * s.high, 2.0 * s.low});
  return add(multiply({scaled.exponent, 0.0}, {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56}), series);
}

}  // namespace detail

/// e^x for every double; overflow gives infinity, underflow subnormals and 0.
DSV41_HOST_DEVICE static inline double exp(double x) {
  return detail::exp_sum(x, 0.0);
}

/// ln(1 + x), x >= 0 or -1 < x.
/// With 1 + x = 2^n * (1 + f) and s = f / (2 + f): ln(1+f) = f - (f^2/2 - s*(f^2/2 + R)), R = 2/3 s^2 + 2/5
/// s^4 + ...
DSV41_HOST_DEVICE static inline double log1p(double x) {
  if (!(x < 0x1p1023)) return x;  // infinity and NaN
  double f = x, n = 0.0, correction = 0.0;
  if (x < -0.25 || x > 0.4) {
    const double sum = 1.0 + x;
    const double part = sum - 1.0;
    correction = ((1.0 - (sum - part)) + (x - part)) / sum;  // what 1 + x rounded away
    const detail::Scaled scaled = detail::split_exponent(sum);
    f = scaled.mantissa - 1.0;
    n = scaled.exponent;
  }
  const double s = f / (2.0 + f);
  const double z = s * s;
  double series = 2.0 / 23.0;
  series = series * z + 2.0 / 21.0;
  series = series * z + 2.0 / 19.0;
  series = series * z + 2.0 / 17.0;
  series = series * z + 2.0 / 15.0;
  series = series * z + 2.0 / 13.0;
  series = series * z + 2.0 / 11.0;
  series = series * z + 2.0 / 9.0;
  series = series * z + 2.0 / 7.0;
  series = series * z + 2.0 / 5.0;
  series = series * z + 2.0 / 3.0;
  series = series * z;
  const double half_square = 0.5 * f * f;
  const double small = s * (half_square + series) + (n * detail::kLn2Low + correction);
  return n * detail::kLn2High + (f - (half_square - small));
}

/// |x| <= 2^32 (positions times frequencies); the error bound holds for arguments that are fp32 values.
DSV41_HOST_DEVICE static inline double sin(double x) {
  const detail::Reduced r = detail::reduce_quarter_turns(x);
  const double value =
      (r.quadrant & 1u) != 0 ? detail::cos_series(r.high, r.low) : detail::sin_series(r.high, r.low);
  return (r.quadrant & 2u) != 0 ? -value : value;
}

/// As sin.
DSV41_HOST_DEVICE static inline double cos(double x) {
  const detail::Reduced r = detail::reduce_quarter_turns(x);
  const double value =
      (r.quadrant & 1u) != 0 ? detail::sin_series(r.high, r.low) : detail::cos_series(r.high, r.low);
  return ((r.quadrant + 1u) & 2u) != 0 ? -value : value;
}

/// base^exponent for base > 0, normal and finite.
DSV41_HOST_DEVICE static inline double pow(double base, double exponent) {
  const detail::Pair logarithm = detail::log_pair(base);
  const double estimate = logarithm.high * exponent;
  if (!(estimate < 800.0 && estimate > -800.0)) return exp(estimate);
  const detail::Pair product = detail::multiply(logarithm, {exponent, 0.0});
  return detail::exp_sum(product.high, product.low);
}

}  // namespace dsv41::exact
