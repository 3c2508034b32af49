// FP4 weights and the digits that they are multiplied with, shared by the products of a few rows and of many
// (docs/numerics.md 1). Include between target_begin.h and target_end.h only.
#pragma once

#include "kernels/avx2/blocks.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kFewFp4Rows = 8;  // more share tiles of decoded weights

/// Weights of 32 code bytes in half-units plus 12, unsigned as maddubs wants them: even elements, odd
/// elements.
struct Unpacked {
  __m256i even, odd;
};
inline Unpacked unpack(__m256i codes) {
  const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13,
                                         14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m256i nibble = _mm256_set1_epi8(15);
  return {_mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble)),
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble))};
}

/// The lowest eight bits of every lane as a signed digit.
inline __m256i low_digit(__m256i values) {
  return _mm256_srai_epi32(_mm256_slli_epi32(values, 24), 24);
}
/// What is left of the values above their low digit.
inline __m256i above_digit(__m256i values, __m256i digit) {
  return _mm256_srai_epi32(_mm256_sub_epi32(values, digit), 8);
}

/// Bytes of four vectors of small dwords in ascending order, even elements in the lower half, odd in the
/// upper.
inline __m256i even_odd_bytes(const __m256i (&values)[4]) {
  const __m256i bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(values[0], values[1]), _mm256_packs_epi32(values[2], values[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m256i split = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8,
                                         10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(ordered, split), 0xD8);
}

}  // namespace
}  // namespace dsv41::avx2
