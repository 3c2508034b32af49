// The decoding of compressed key/values with AVX-512 (docs/model.md 1): what attention reads for every
// selected group. Scales that are NaN take the plain way.
#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/blocks.h"

namespace dsv41::avx512 {

void dequantize_group(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k, float* out) {
  if (k % kGroupBlock != 0 || holds_e4m3_nan(scales, k / kGroupBlock))
    return plain_ops().dequantize_group(codes, scales, k, out);
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                       -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  for (std::size_t i = 0; i < k; i += kGroupBlock) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2));
    // Four bits choose from sixteen values: those above do not matter.
    const __m512i index = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(packed, _mm_srli_epi16(packed, 4)));
    // A product has six significant bits: rounding it to bf16 would change nothing.
    const __m512 scale = _mm512_set1_ps(decode_e4m3(scales[i / kGroupBlock]));
    _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_permutexvar_ps(index, values), scale));
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
