// FP8 weights as int16, shared by the products of one row and of many (docs/numerics.md 1). A code is rounded
// down to a multiple of 2^-6, which is exact for all but the few codes below 2^-2; those are found with
// rare_codes() and their remainders added elsewhere. Include between target_begin.h and target_end.h only.
#pragma once

#include "kernels/avx512/blocks.h"

namespace dsv41::avx512 {
namespace {

/// Multiples of 2^-6: of the even and of the odd elements of 64 codes.
struct Words {
  __m512i even, odd;
};

#if defined(DSV41_AVX512_VBMI)
/// An 8 x 8 bit matrix for gf2p8affine: row i gives the bits whose parity is bit i of the result.
constexpr long long bit_matrix(const std::uint8_t (&rows)[8]) {
  std::uint64_t matrix = 0;
  for (const std::uint8_t row : rows) matrix = matrix << 8 | row;
  return static_cast<long long>(matrix);
}
#endif

/// Sign (bit 3) and fraction of every code, as an index for byte shuffles.
inline __m512i sign_and_fraction(__m512i codes) {
#if defined(DSV41_AVX512_VBMI)
  return _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(bit_matrix({1, 2, 4, 128, 0, 0, 0, 0})), 0);
#else
  const __m512i fraction = _mm512_and_si512(codes, _mm512_set1_epi8(7));
  return _mm512_or_si512(fraction, _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(8)));
#endif
}

/// 15 - E of the even codes, as words.
inline __m512i even_shifts(__m512i codes) {
#if defined(DSV41_AVX512_VBMI)
  return _mm512_maskz_gf2p8affine_epi64_epi8(0x5555555555555555, codes,
                                             _mm512_set1_epi64(bit_matrix({8, 16, 32, 64, 0, 0, 0, 0})), 15);
#else
  return _mm512_andnot_si512(_mm512_srli_epi16(codes, 3), _mm512_set1_epi16(15));
#endif
}

/// A code is sign, exponent E (4 bits), fraction f (3 bits): +-(8 + f) in the upper bits of a word, shifted
/// right by 15 - E. Subnormal codes (E = 0) come out as if they had the implied one; they are rare codes.
inline Words words_of(__m512i codes) {
  alignas(16) static constexpr std::int8_t kMantissas[16] = {64,  72,  80,  88,  96,  104,  112,  120,
                                                             -64, -72, -80, -88, -96, -104, -112, -120};
  const __m512i mantissas =
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(kMantissas)), sign_and_fraction(codes));
  // Times 256: shifts and shuffles keep their units busy enough.
  const __m512i even = _mm512_mullo_epi16(mantissas, _mm512_set1_epi16(256));
  const __m512i odd = _mm512_and_si512(mantissas, _mm512_set1_epi16(static_cast<std::int16_t>(0xFF00)));
  const __m512i odd_shifts = _mm512_andnot_si512(_mm512_srli_epi16(codes, 11), _mm512_set1_epi16(15));
  return {_mm512_srav_epi16(even, even_shifts(codes)), _mm512_srav_epi16(odd, odd_shifts)};
}

/// One bit per code that words_of may not give exactly (E < 4, zero among them) or that is NaN.
inline std::uint64_t rare_codes(__m512i codes) {
#if defined(DSV41_AVX512_VBMI)
  // Drops the sign, leaves what is below 32 where it is, brings NaN (127) to 32 and everything else above.
  const __m512i order =
      _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(bit_matrix({33, 34, 36, 40, 48, 32, 96, 0})), 0);
  return _mm512_cmple_epu8_mask(order, _mm512_set1_epi8(32));
#else
  const __m512i twice = _mm512_add_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(2));  // NaN 0, zero 2
  return _mm512_cmple_epu8_mask(twice, _mm512_set1_epi8(64));
#endif
}

/// A code as words_of gives it, in units of 2^-9.
constexpr std::int32_t rounded_value(std::uint8_t code) {
  const std::int32_t mantissa = (8 + (code & 7)) << 11;
  return 8 * ((code > 127 ? -mantissa : mantissa) >> (15 - (code >> 3 & 15)));
}

/// What that leaves out of a code that is not NaN: below 2^4.
constexpr std::int32_t remainder_of(std::uint8_t code) {
  const std::int32_t exponent = code >> 3 & 15, fraction = code & 7;
  const std::int32_t magnitude = exponent == 0 ? fraction : (8 + fraction) << (exponent - 1);
  return (code > 127 ? -magnitude : magnitude) - rounded_value(code);
}

}  // namespace
}  // namespace dsv41::avx512
