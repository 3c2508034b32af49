// BF16 and fp64 vectors with AVX-512: widening, rounding, the 16 lanes of docs/numerics.md 2 and exp of
// numerics.md 7. Include between target_begin.h and target_end.h only.
#pragma once

#include "kernels/avx512/blocks.h"
#include "kernels/exact_math.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kWidth = 16;  // lanes of a sum

/// Sixteen fp64 values, eight in each part.
struct Sixteen {
  __m512d part[2];
};

/// A sum in sixteen lanes. The alignment is spelled out for std::vector (kernels/avx2/vectors.h).
struct alignas(64) Lanes {
  __m512d part[2] = {};
};
/// j + (j+8), then 4, 2, 1.
inline double fold(__m512d first, __m512d second) {
  const __m512d eight = _mm512_add_pd(first, second);
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
inline double fold(const Lanes& lanes) {
  return fold(lanes.part[0], lanes.part[1]);
}

inline __mmask16 first_values(std::size_t count) {
  return static_cast<__mmask16>(count >= kWidth ? 0xFFFF : (1u << count) - 1);
}
inline Sixteen widen(__m512 values) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(values)),
          _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1))};
}
/// Bf16 values: the mask says which are there, the others are zero and not read.
inline Sixteen widen(const BFloat16* from, __mmask16 mask) {
  const __m256i words = _mm256_maskz_loadu_epi16(mask, from);
  return widen(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)));
}
inline void store_sixteen(double* to, const Sixteen& values) {
  _mm512_storeu_pd(to, values.part[0]);
  _mm512_storeu_pd(to + 8, values.part[1]);
}

/// RNbf16 of sixteen fp32 values that are not NaN, in the upper halves of dwords; the lower ones are rubbish.
inline __m512i bfloat16_bits_of_numbers(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}
/// The same for all values. NaN becomes the quiet NaN that to_bfloat16 gives.
inline __m512i bfloat16_bits(__m512 values) {
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(bfloat16_bits_of_numbers(values), nan, _mm512_castps_si512(values),
                              _mm512_set1_epi32(0x400000));
}
inline void store_sixteen(BFloat16* to, __m512 values) {
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bfloat16_bits(values), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}

/// 2^exponent for exponents within [-1022, 1023].
inline __m512d power_of_two(__m256i exponent) {
  const __m512i biased = _mm512_add_epi64(_mm512_cvtepi32_epi64(exponent), _mm512_set1_epi64(1023));
  return _mm512_castsi512_pd(_mm512_slli_epi64(biased, 52));
}

/// exact::exp in every lane of N vectors: the same operations in the same order. One vector alone would be a
/// single chain of some forty operations, and few such chains fit what the CPU looks ahead.
template <std::size_t N>
inline void exponential(__m512d (&x)[N]) {
  __m512d shifted[N], high[N], rest[N], r[N], p[N];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < N; ++i) {
    x[i] = _mm512_max_pd(_mm512_set1_pd(-800.0),
                         _mm512_min_pd(_mm512_set1_pd(800.0), x[i]));  // NaN, the second operand, stays
    shifted[i] = _mm512_add_pd(_mm512_mul_pd(x[i], _mm512_set1_pd(0x1.71547652b82fep0)),
                               _mm512_set1_pd(exact::detail::kRoundToInteger));
    const __m512d n = _mm512_sub_pd(shifted[i], _mm512_set1_pd(exact::detail::kRoundToInteger));
    high[i] = _mm512_sub_pd(x[i], _mm512_mul_pd(n, _mm512_set1_pd(exact::detail::kLn2High)));
    rest[i] = _mm512_mul_pd(n, _mm512_set1_pd(exact::detail::kLn2Low));
    r[i] = _mm512_sub_pd(high[i], rest[i]);
    p[i] = _mm512_set1_pd(1.0 / 6227020800.0);
  }
  constexpr double kTerms[] = {1.0 / 479001600.0,
                               1.0 / 39916800.0,
                               1.0 / 3628800.0,
                               1.0 / 362880.0,
                               1.0 / 40320.0,
                               1.0 / 5040.0,
                               1.0 / 720.0,
                               1.0 / 120.0,
                               1.0 / 24.0,
                               1.0 / 6.0,
                               0.5};
#pragma GCC unroll 11
  for (const double term : kTerms)
#pragma GCC unroll 4
    for (std::size_t i = 0; i < N; ++i) p[i] = _mm512_add_pd(_mm512_mul_pd(p[i], r[i]), _mm512_set1_pd(term));
#pragma GCC unroll 4
  for (std::size_t i = 0; i < N; ++i) {
    const __m512d tail = _mm512_sub_pd(_mm512_mul_pd(_mm512_mul_pd(r[i], r[i]), p[i]), rest[i]);
    const __m512d value = _mm512_add_pd(_mm512_set1_pd(1.0), _mm512_add_pd(high[i], tail));
    const __m256i exponent = _mm512_cvtepi64_epi32(_mm512_castpd_si512(shifted[i]));
    const __m256i half = _mm256_srai_epi32(exponent, 1);
    x[i] = _mm512_mul_pd(_mm512_mul_pd(value, power_of_two(half)),
                         power_of_two(_mm256_sub_epi32(exponent, half)));
  }
}

}  // namespace
}  // namespace dsv41::avx512
