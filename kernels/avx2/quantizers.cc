// act_quant and the decoding of stored key/values with AVX2 (docs/model.md 1). Scales that are NaN, or values
// that are, take the plain way.
#include <immintrin.h>

#include <algorithm>
#include <bit>

#include "kernels/avx2/avx2.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/vectors.h"

namespace dsv41::avx2 {
namespace {

/// The largest |x| of a block of 32 as bf16 bits; above 0x7F7F it is infinite or NaN.
inline std::uint32_t largest_bits(const BFloat16* x) {
  const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
  const __m256i both =
      _mm256_max_epu16(_mm256_and_si256(load(x), magnitude), _mm256_and_si256(load(x + 16), magnitude));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  // minpos finds the smallest: of the complements here.
  const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return 0xFFFFu ^ (static_cast<std::uint32_t>(_mm_cvtsi128_si32(smallest)) & 0xFFFFu);
}

/// E4M3 codes (dwords) of values within +-448.
inline __m256i encode8(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7FFFF)), odd);
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
  // Below 2^-6: adding 2^14 (ulp 2^-9) leaves the rounded multiple of 2^-9 in the low mantissa bits.
  const __m256 shifted = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p14f));
  const __m256i subnormal = _mm256_and_si256(_mm256_castps_si256(shifted), _mm256_set1_epi32(15));
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), magnitude);
  const __m256i code =
      _mm256_min_epi32(_mm256_blendv_epi8(normal, subnormal, small), _mm256_set1_epi32(0x7E));
  return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
}

}  // namespace

void quantize_rows(const BFloat16* x, std::size_t rows, std::size_t k, std::uint8_t* codes,
                   std::uint8_t* scales) {
  const __m256 limit = _mm256_set1_ps(448.0f), lower_limit = _mm256_set1_ps(-448.0f);
  for (std::size_t block = 0; block < rows * k / kBlock; ++block, x += kBlock, codes += kBlock) {
    const std::uint32_t largest = largest_bits(x);
    if (largest > 0x7F7F) {
      plain_ops().quantize_rows(x, 1, kBlock, codes, scales + block);
      continue;
    }
    const float value = std::max(std::bit_cast<float>(largest << 16), 1e-4f) * (1.0f / 448.0f);
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t code = (bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u);  // between 2^-22 and 2^120
    scales[block] = static_cast<std::uint8_t>(code);
    const __m256 inverse =
        _mm256_set1_ps(std::bit_cast<float>((254u - code) << 23));  // exact, as the division would be
    __m256i dwords[4];
    for (std::size_t i = 0; i < 4; ++i)
      dwords[i] = encode8(
          _mm256_max_ps(lower_limit, _mm256_min_ps(limit, _mm256_mul_ps(widen8(x + 8 * i), inverse))));
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(dwords[0], dwords[1]),
                                              _mm256_packus_epi32(dwords[2], dwords[3]));
    store(codes, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
}

void dequantize_window(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out) {
  if (k % kBlock != 0 || holds_e4m3_nan(codes, k) || holds_e8m0_nan(scales, k / kBlock))
    return plain_ops().dequantize_window(codes, scales, k, out);
  const __m256 lift = _mm256_set1_ps(0x1p120f);
  const __m256i places =
      _mm256_set1_epi32(static_cast<int>(0x87F00000u));  // sign, exponent and fraction of E4M3
  for (std::size_t i = 0; i < k; i += 8) {
    const __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256 value =
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(code, 20), places)), lift);
    _mm256_storeu_ps(
        out + i, round_to_bfloat16(_mm256_mul_ps(value, _mm256_set1_ps(decode_e8m0(scales[i / kBlock])))));
  }
}

void dequantize_group(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out) {
  if (k % kGroupBlock != 0 || holds_e4m3_nan(scales, k / kGroupBlock))
    return plain_ops().dequantize_group(codes, scales, k, out);
  // Upper bytes of the bf16 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and lower bytes.
  const __m128i upper = _mm_setr_epi8(0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41,
                                      -0x41, -0x40, -0x40, -0x40, -0x40);
  const __m128i lower =
      _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40);
  for (std::size_t i = 0; i < k; i += kGroupBlock) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i index =
        _mm_unpacklo_epi8(_mm_and_si128(packed, nibble), _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
    const __m128i high = _mm_shuffle_epi8(upper, index), low = _mm_shuffle_epi8(lower, index);
    const __m256 scale = _mm256_set1_ps(decode_e4m3(scales[i / kGroupBlock]));
    const __m128i words[2] = {_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high)};
    for (std::size_t half = 0; half < 2; ++half) {
      // A product has six significant bits: rounding it to bf16 would change nothing.
      const __m256 value = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words[half]), 16));
      _mm256_storeu_ps(out + i + 8 * half, _mm256_mul_ps(value, scale));
    }
  }
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
