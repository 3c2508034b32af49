// FP8 activations as words, shared by the products of one row and of several (docs/numerics.md 1). In units
// of 2^-9 an activation is h * 2^s + l, with one s for a block, a word h with which a block's dot product
// fits 32 bits, and a rest l that is zero for nearly all elements. Include between target_begin.h and
// target_end.h only, kernels/fp8_words.h before them.
#pragma once

#include "kernels/avx512/blocks.h"

namespace dsv41::avx512 {
namespace {

/// The elements 0..15 and 16..31 of a block.
struct SplitBlock {
  __m512i high[2], low[2];  // h and l, |l| <= 2^(s-1)
  int shift;                // s <= 7
};

inline SplitBlock split_block(const __m512i (&values)[2]) {
  const __m512i magnitudes[2] = {_mm512_abs_epi32(values[0]), _mm512_abs_epi32(values[1])};
  const std::int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(magnitudes[0], magnitudes[1]));
  const std::int32_t largest = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitudes[0], magnitudes[1]));
  SplitBlock block{.high = {}, .low = {}, .shift = fp8_words::shift_for(sum, largest)};
  const __m512i shift = _mm512_set1_epi32(block.shift);
  const __m512i half = _mm512_set1_epi32(block.shift == 0 ? 0 : 1 << (block.shift - 1));
  for (std::size_t i = 0; i < 2; ++i) {
    block.high[i] = _mm512_srav_epi32(_mm512_add_epi32(values[i], half), shift);
    block.low[i] = _mm512_sub_epi32(values[i], _mm512_sllv_epi32(block.high[i], shift));
  }
  return block;
}

/// The words of a block in the order of Words: those that go with `first` at `to`, the others `distance`
/// words further.
inline void store_words(std::int16_t* to, const __m512i (&values)[2], std::size_t distance) {
  for (std::size_t i = 0; i < 2; ++i) {
    const __m256i words = _mm512_cvtepi32_epi16(values[i]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * 8), _mm256_castsi256_si128(words));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + distance + i * 8), _mm256_extracti128_si256(words, 1));
  }
}

/// RN32 of factor * dot + correction, factor = 2^shift: two fp32 values hold it exactly if the correction is
/// small, so that their sum is rounded once.
constexpr std::int32_t kLargestCorrection = (1 << 24) - (1 << 17);
inline __m512 rounded_dot(__m512i dot, __m512i correction, __m512i shift, __m512 factor) {
  const __m512 high = _mm512_cvtepi32_ps(dot);
  const __m512i left = _mm512_sub_epi32(dot, _mm512_cvtps_epi32(high));  // at most 64
  const __m512i low = _mm512_add_epi32(_mm512_sllv_epi32(left, shift), correction);
  return _mm512_fmadd_ps(high, factor, _mm512_cvtepi32_ps(low));
}
/// The same for any correction, in fp64.
inline __m512 rounded_dot_wide(__m512i dot, __m512i correction, __m512 factor) {
  const __m512d first = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(dot)),
                                        _mm512_cvtps_pd(_mm512_castps512_ps256(factor)),
                                        _mm512_cvtepi32_pd(_mm512_castsi512_si256(correction)));
  const __m512d second = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(dot, 1)),
                                         _mm512_cvtps_pd(_mm512_extractf32x8_ps(factor, 1)),
                                         _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(correction, 1)));
  return join_floats(first, second);
}

constexpr float kUnit = 0x1p-18f;  // of the products of activations and weights in units of 2^-9

/// True where every block product in those units, |d| < 2^44, is scaled exactly: s_x*s_w is a power of two,
/// and neither it nor the scaled product leaves the normal range. One fused addition is the contract's two
/// roundings then.
inline bool scales_exactly(__m512 scales, __mmask16 lanes = 0xFFFF) {
  constexpr std::int32_t kSmallest = 27 << 23, kLargest = 207 << 23;  // 2^-100, 2^80
  const __m512i bits = _mm512_castps_si512(scales);                   // not negative: ordered as numbers are
  return (lanes & (_mm512_cmpgt_epi32_mask(_mm512_set1_epi32(kSmallest), bits) |
                   _mm512_cmpgt_epi32_mask(bits, _mm512_set1_epi32(kLargest)))) == 0;
}

}  // namespace
}  // namespace dsv41::avx512
