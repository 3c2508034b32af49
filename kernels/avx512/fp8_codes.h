// FP8 weights as int16, shared by the products of one row and of several (docs/numerics.md 1). A code is
// rounded down to a multiple of 2^-6, which is exact for all but the few codes below 2^-2; those are found by
// the way, and their remainders added elsewhere. Include between target_begin.h and target_end.h only,
// kernels/fp8_words.h before them.
#pragma once

#include "kernels/avx512/blocks.h"

namespace dsv41::avx512 {
namespace {

/// Multiples of 2^-6: of the first eight and of the last eight of each sixteen elements of 64 codes.
struct Words {
  __m512i first, last;
};
/// Where the word of element k of 64 is, counted over `first` and then `last`; every 16 words are half a
/// block.
constexpr std::size_t place_of_word(std::size_t k) {
  return k % 16 / 8 * 32 + k / 16 * 8 + k % 8;
}

struct Decoded {
  Words words;
  __m512i order;  // a byte for each code, see rare_codes
};

#if defined(DSV41_AVX512_VBMI)
/// An 8 x 8 bit matrix for gf2p8affine: row i gives the bits whose parity is bit i of the result.
constexpr long long bit_matrix(const std::uint8_t (&rows)[8]) {
  std::uint64_t matrix = 0;
  for (const std::uint8_t row : rows) matrix = matrix << 8 | row;
  return static_cast<long long>(matrix);
}
#endif

/// A code is sign, exponent E (4 bits), fraction f (3 bits): +-(8 + f) in the upper bits of a word, shifted
/// right by 15 - E. Subnormal codes (E = 0) come out as if they had the implied one; they are rare codes.
inline Decoded decode_codes(__m512i codes) {
#if defined(DSV41_AVX512_VBMI)
  // From bit 0 on: sign, the complement of f, then e0 + e3, e1 + e3, e2, e2 + e3 (modulo 2). The lower four
  // bits choose the mantissa (the table repeats itself), and as numbers the rare codes come first, then NaN
  // (64, 65).
  const __m512i order = _mm512_gf2p8affine_epi64_epi8(
      codes, _mm512_set1_epi64(bit_matrix({128, 1, 2, 4, 8 | 64, 16 | 64, 32, 32 | 64})), 14);
  alignas(16) static constexpr std::int8_t kMantissas[16] = {120, -120, 112, -112, 104, -104, 96, -96,
                                                             88,  -88,  80,  -80,  72,  -72,  64, -64};
  const __m512i mantissas = _mm512_permutexvar_epi8(order, _mm512_broadcast_i32x4(load16(kMantissas)));
  const __m512i shifts =
      _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(bit_matrix({8, 16, 32, 64, 0, 0, 0, 0})), 15);
#else
  alignas(16) static constexpr std::int8_t kMantissas[16] = {64,  72,  80,  88,  96,  104,  112,  120,
                                                             -64, -72, -80, -88, -96, -104, -112, -120};
  const __m512i sign_and_fraction =
      _mm512_or_si512(_mm512_and_si512(codes, _mm512_set1_epi8(7)),
                      _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(8)));
  const __m512i mantissas =
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(kMantissas)), sign_and_fraction);
  const __m512i shifts = _mm512_andnot_si512(_mm512_srli_epi16(codes, 3), _mm512_set1_epi8(15));
  const __m512i order = _mm512_add_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(2));  // NaN 0, zero 2
#endif
  const __m512i zero = _mm512_setzero_si512();
  return {{_mm512_srav_epi16(_mm512_unpacklo_epi8(zero, mantissas), _mm512_unpacklo_epi8(shifts, zero)),
           _mm512_srav_epi16(_mm512_unpackhi_epi8(zero, mantissas), _mm512_unpackhi_epi8(shifts, zero))},
          order};
}

/// The codes that the words may not give exactly (E < 4, zero among them), or that are NaN. Of several
/// vectors the smaller bytes say where at least one has such a code.
inline std::uint64_t rare_codes(__m512i order) {
#if defined(DSV41_AVX512_VBMI)
  return _mm512_cmple_epu8_mask(order, _mm512_set1_epi8(65));
#else
  return _mm512_cmple_epu8_mask(order, _mm512_set1_epi8(64));
#endif
}

/// A code as its word gives it, in units of 2^-9.
constexpr std::int32_t rounded_value(std::uint8_t code) {
  const std::int32_t mantissa = (8 + (code & 7)) << 11;
  return 8 * ((code > 127 ? -mantissa : mantissa) >> (15 - (code >> 3 & 15)));
}

/// What that leaves out of a code that is not NaN: at most 8 of the same units.
constexpr std::int32_t remainder_of(std::uint8_t code) {
  const std::int32_t exponent = code >> 3 & 15, fraction = code & 7;
  const std::int32_t magnitude = exponent == 0 ? fraction : (8 + fraction) << (exponent - 1);
  return (code > 127 ? -magnitude : magnitude) - rounded_value(code);
}

constexpr std::array<std::int32_t, 256> kRounded = fp8_words::table_by_code<rounded_value>(),
                                        kRemainders = fp8_words::table_by_code<remainder_of>();

/// Lists the indices of the masks that name any code, without a branch: few of those would be predicted.
/// There is room for sixteen more of both. Returns how many.
inline std::size_t list_masks(const std::uint64_t* masks, std::size_t count, std::uint32_t* listed) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  std::size_t length = 0;
  for (std::size_t i = 0; i < count; i += 16) {
    const __m512i first = load(masks + i), second = load(masks + i + 8);
    const auto which = static_cast<__mmask16>(_mm512_test_epi64_mask(first, first) |
                                              _mm512_test_epi64_mask(second, second) << 8);
    const __m512i indices = _mm512_add_epi32(_mm512_set1_epi32(static_cast<std::int32_t>(i)), lanes);
    store(listed + length, _mm512_maskz_compress_epi32(which, indices));
    length += static_cast<std::size_t>(std::popcount(which));
  }
  while (length > 0 && listed[length - 1] >= count) --length;
  return length;
}

}  // namespace
}  // namespace dsv41::avx512
