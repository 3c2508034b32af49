// BF16 and fp64 vectors: widening, rounding, the 16 lanes of docs/numerics.md 2 and exp of numerics.md 7.
// Include between target_begin.h and target_end.h only.
#pragma once

#include <cstring>

#include "kernels/exact_math.h"
#include "kernels/formats.h"

namespace dsv41::avx2 {
namespace {

inline __m256 widen8(const BFloat16* from) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
}
inline __m256d low_half(__m256 values) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(values));
}
inline __m256d high_half(__m256 values) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
}

/// RNbf16, widened again. NaN becomes the quiet NaN that to_bfloat16 gives.
inline __m256 round_to_bfloat16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i chosen =
      _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)));
  return _mm256_castsi256_ps(_mm256_and_si256(chosen, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
/// RNbf16 of eight values; `values` holds RN32 of the wider ones.
inline void store8(BFloat16* to, __m256 values) {
  const __m256i words = _mm256_srli_epi32(_mm256_castps_si256(round_to_bfloat16(values)), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
inline __m256 narrow(__m256d low, __m256d high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
}

/// Sixteen fp64 lanes; lane j is element j % 4 of part j / 4. The alignment is spelled out for std::vector: its
/// code is compiled without AVX, where GCC thinks that 16 bytes will do.
struct alignas(32) Lanes {
  __m256d part[4] = {};
};
/// j + (j+8), then 4, 2, 1.
inline double fold(const Lanes& lanes) {
  const __m256d four =
      _mm256_add_pd(_mm256_add_pd(lanes.part[0], lanes.part[2]), _mm256_add_pd(lanes.part[1], lanes.part[3]));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

inline __m256d constant(double value) {
  return _mm256_set1_pd(value);
}

/// 2^exponent for exponents within [-1022, 1023].
inline __m256d power_of_two(__m128i exponent) {
  const __m256i biased = _mm256_add_epi64(_mm256_cvtepi32_epi64(exponent), _mm256_set1_epi64x(1023));
  return _mm256_castsi256_pd(_mm256_slli_epi64(biased, 52));
}

/// exact::exp in every lane: the same operations in the same order.
inline __m256d exponential(__m256d x) {
  x = _mm256_max_pd(constant(-800.0), _mm256_min_pd(constant(800.0), x));  // NaN, the second operand, stays
  const __m256d shifted = _mm256_add_pd(_mm256_mul_pd(x, constant(0x1.71547652b82fep0)),
                                        constant(exact::detail::kRoundToInteger));
  const __m256d n = _mm256_sub_pd(shifted, constant(exact::detail::kRoundToInteger));
  const __m256d high = _mm256_sub_pd(x, _mm256_mul_pd(n, constant(exact::detail::kLn2High)));
  const __m256d rest = _mm256_mul_pd(n, constant(exact::detail::kLn2Low));
  const __m256d r = _mm256_sub_pd(high, rest);
  __m256d p = constant(1.0 / 6227020800.0);
  for (const double term :
       {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
        1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5})
    p = _mm256_add_pd(_mm256_mul_pd(p, r), constant(term));
  const __m256d tail = _mm256_sub_pd(_mm256_mul_pd(_mm256_mul_pd(r, r), p), rest);
  const __m256d value = _mm256_add_pd(constant(1.0), _mm256_add_pd(high, tail));
  const __m128i exponent = _mm256_castsi256_si128(
      _mm256_permutevar8x32_epi32(_mm256_castpd_si256(shifted), _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
  const __m128i half = _mm_srai_epi32(exponent, 1);
  return _mm256_mul_pd(_mm256_mul_pd(value, power_of_two(half)), power_of_two(_mm_sub_epi32(exponent, half)));
}

}  // namespace
}  // namespace dsv41::avx2
