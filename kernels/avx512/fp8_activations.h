// FP8 activations as words, shared by the products of one row and of several (docs/numerics.md 1). In units
// of 2^-9 an activation is h * 2^s + l, with one s for a block, a word h with which a block's dot product
// fits 32 bits, and a rest l that is zero for nearly all elements. Include between target_begin.h and
// target_end.h only.
#pragma once

#include "kernels/avx512/blocks.h"

namespace dsv41::avx512 {
namespace {

constexpr std::int32_t kLargestSum = 74898;  // of |h|; times 28672, the largest weight, stays below 2^31

/// The elements 0..15 and 16..31 of a block.
struct SplitBlock {
  __m512i high[2], low[2];  // h and l, |l| <= 2^(s-1)
  int shift;                // s <= 7
};

inline SplitBlock split_block(const __m512i (&values)[2]) {
  const __m512i magnitudes[2] = {_mm512_abs_epi32(values[0]), _mm512_abs_epi32(values[1])};
  const std::int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(magnitudes[0], magnitudes[1]));
  const std::int32_t largest = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitudes[0], magnitudes[1]));
  // Rounding to nearest adds a half at most to each of the 32 magnitudes.
  SplitBlock block{.high = {}, .low = {}, .shift = 0};
  while (sum >> block.shift >= kLargestSum - 16 || largest >> block.shift >= 32767) ++block.shift;
  const __m512i shift = _mm512_set1_epi32(block.shift);
  const __m512i half = _mm512_set1_epi32(block.shift == 0 ? 0 : 1 << (block.shift - 1));
  for (std::size_t i = 0; i < 2; ++i) {
    block.high[i] = _mm512_srav_epi32(_mm512_add_epi32(values[i], half), shift);
    block.low[i] = _mm512_sub_epi32(values[i], _mm512_sllv_epi32(block.high[i], shift));
  }
  return block;
}

constexpr float kUnit = 0x1p-18f;  // of the products of activations and weights in units of 2^-9

/// True where every block product in those units, |d| < 2^44, is scaled exactly: s_x*s_w is a power of two,
/// and neither it nor the scaled product leaves the normal range. One fused addition is the contract's two
/// roundings then.
inline bool scales_exactly(__m512 scale) {
  const __m512i bits = _mm512_castps_si512(scale);  // positive numbers and infinity are ordered by their bits
  constexpr std::int32_t kSmallest = 27 << 23, kLargest = 207 << 23;  // 2^-100, 2^80
  return (_mm512_cmpgt_epi32_mask(_mm512_set1_epi32(kSmallest), bits) |
          _mm512_cmpgt_epi32_mask(bits, _mm512_set1_epi32(kLargest))) == 0;
}

}  // namespace
}  // namespace dsv41::avx512
