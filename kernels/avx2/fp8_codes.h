// FP8 weights as int16, shared by the products of a few rows and of many (docs/numerics.md 1). A code is a
// multiple of 2^-6 for all but the few codes below 2^-3; those become zero, are found with rare_codes() and
// added elsewhere. Include between target_begin.h and target_end.h only.
#pragma once

#include "kernels/avx2/blocks.h"

namespace dsv41::avx2 {
namespace {

/// Multiples of 2^-6: of the first and of the second eight codes of each 128-bit half.
struct Words {
  __m256i low, high;
};

/// Where element k of a block lies in the words of its 32 codes, which are 0-7, 16-23, 8-15, 24-31.
constexpr std::size_t place_of(std::size_t k) {
  const std::size_t eight = k / 8;
  return (eight == 1 ? 16 : eight == 2 ? 8 : eight * 8) + k % 8;
}

/// The words of 32 dwords, which fit them, in that order.
inline void store_words(std::int16_t* to, const __m256i (&values)[4]) {
  store(to, _mm256_permute4x64_epi64(_mm256_packs_epi32(values[0], values[2]), 0xD8));
  store(to + 16, _mm256_permute4x64_epi64(_mm256_packs_epi32(values[1], values[3]), 0xD8));
}

/// A code is sign, E/2 (3 bits) | E%2, fraction (3 bits): (8 + fraction) << E%2 comes from the lower half
/// byte, the signed power of four from the upper one.
inline Words words_of(__m256i codes) {
  const __m256i mantissas = _mm256_setr_epi8(8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 8,
                                             9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m256i powers_low = _mm256_setr_epi8(0, 0, 1, 4, 16, 64, 0, 0, 0, 0, -1, -4, -16, -64, 0, 0, 0, 0, 1,
                                              4, 16, 64, 0, 0, 0, 0, -1, -4, -16, -64, 0, 0);
  const __m256i powers_high = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 1, 4, 0, 0, -1, -1, -1, -1, -1, -4, 0, 0, 0,
                                               0, 0, 0, 1, 4, 0, 0, -1, -1, -1, -1, -1, -4);
  const __m256i half_byte = _mm256_set1_epi8(15);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), half_byte);
  const __m256i mantissa = _mm256_shuffle_epi8(mantissas, _mm256_and_si256(codes, half_byte));
  const __m256i low = _mm256_shuffle_epi8(powers_low, upper), high = _mm256_shuffle_epi8(powers_high, upper);
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_mullo_epi16(_mm256_unpacklo_epi8(mantissa, zero), _mm256_unpacklo_epi8(low, high)),
          _mm256_mullo_epi16(_mm256_unpackhi_epi8(mantissa, zero), _mm256_unpackhi_epi8(low, high))};
}

/// One bit per code that words_of does not give exactly (E < 4) or that is zero or NaN.
inline std::uint32_t rare_codes(__m256i codes) {
  const __m256i twice = _mm256_add_epi8(_mm256_add_epi8(codes, codes), _mm256_set1_epi8(2 - 128));
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(_mm256_set1_epi8(-63), twice)));
}

/// A code that is not NaN, as words_of gives it, in units of 2^-9.
constexpr std::int32_t rounded_value(std::uint8_t code) {
  const std::int32_t exponent = code >> 3 & 15, fraction = code & 7;
  const std::int32_t magnitude = exponent < 4 ? 0 : (8 + fraction) << (exponent - 1);
  return code > 127 ? -magnitude : magnitude;
}

/// What words_of leaves out of it, in units of 2^-9: below 2^6.
constexpr std::int32_t remainder_of(std::uint8_t code) {
  const std::int32_t exponent = code >> 3 & 15, fraction = code & 7;
  if (exponent > 3) return 0;
  const std::int32_t magnitude = exponent == 0 ? fraction : (8 + fraction) << (exponent - 1);
  return code > 127 ? -magnitude : magnitude;
}

inline __m256i dot(const Words& w, const std::int16_t* x) {
  return _mm256_add_epi32(_mm256_madd_epi16(w.low, load(x)), _mm256_madd_epi16(w.high, load(x + 16)));
}

}  // namespace
}  // namespace dsv41::avx2
