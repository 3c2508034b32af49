// Pieces shared by the block linears (docs/numerics.md 1): E8M0 scales of sixteen features, E4M3 codes as
// integers, sums over the blocks of a row. Include between target_begin.h and target_end.h only.
#pragma once

#include <cstring>

#include "kernels/formats.h"
#include "kernels/views.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kLanes = 16;       // output features per vector
constexpr std::size_t kGroup = 16;       // blocks whose results share a vector
constexpr std::size_t kPrefetch = 8192;  // bytes of weights fetched ahead of their use

inline __m512i load(const void* from) {
  return _mm512_loadu_si512(from);
}
inline void store(void* to, __m512i value) {
  _mm512_storeu_si512(to, value);
}
inline __m128i load16(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

/// One bit for each of the first `bytes` bytes of 64.
constexpr std::uint64_t first_bytes(std::size_t bytes) {
  return bytes >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bytes) - 1;
}
/// The bytes that `mask` names; the others are zero and not read.
inline __m512i load_part(const void* from, std::uint64_t mask) {
  return _mm512_maskz_loadu_epi8(mask, from);
}
inline __m256i load32(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

inline __m512i broadcast_dword(const void* from) {
  std::int32_t value;
  std::memcpy(&value, from, 4);
  return _mm512_set1_epi32(value);
}

/// 2^(code-127) of sixteen E8M0 codes; code 255 (NaN) is sorted out before.
inline __m512 scales_of(__m128i codes) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
  return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x00400000)));
}

/// The sixteen E4M3 codes at `codes` as multiples of 2^-9, |value| < 2^18. Not for NaN codes.
inline __m512i integers_of(const std::uint8_t* codes) {
  const __m512i code = _mm512_cvtepu8_epi32(load16(codes));
  const __m512i exponent = _mm512_and_si512(_mm512_srli_epi32(code, 3), _mm512_set1_epi32(15));
  const __m512i normal = _mm512_min_epi32(exponent, _mm512_set1_epi32(1));  // 0 for subnormal codes
  const __m512i mantissa =
      _mm512_or_si512(_mm512_and_si512(code, _mm512_set1_epi32(7)), _mm512_slli_epi32(normal, 3));
  const __m512i magnitude = _mm512_sllv_epi32(mantissa, _mm512_sub_epi32(exponent, normal));
  const __m512i sign = _mm512_srai_epi32(_mm512_slli_epi32(code, 24), 31);
  return _mm512_sub_epi32(_mm512_xor_si512(magnitude, sign), sign);
}

/// Sixteen fp64 values rounded to fp32.
inline __m512 join_floats(__m512d low, __m512d high) {
  const __m512d halves = _mm512_castpd256_pd512(_mm256_castps_pd(_mm512_cvtpd_ps(low)));
  return _mm512_castpd_ps(_mm512_insertf64x4(halves, _mm256_castps_pd(_mm512_cvtpd_ps(high)), 1));
}

/// True when one of the `count` codes is an E4M3 NaN (0x7F, 0xFF).
inline bool holds_e4m3_nan(const std::uint8_t* codes, std::size_t count) {
  __mmask64 found = 0;
  std::size_t i = 0;
  for (; i + 64 <= count; i += 64)
    found |= _mm512_cmpeq_epi8_mask(_mm512_or_si512(load(codes + i), _mm512_set1_epi8(-128)),
                                    _mm512_set1_epi8(-1));
  bool result = found != 0;
  for (; i < count; ++i) result |= (codes[i] & 0x7F) == 0x7F;
  return result;
}

/// True when one of the `count` E8M0 codes is 255.
inline bool holds_e8m0_nan(const std::uint8_t* codes, std::size_t count) {
  __mmask64 found = 0;
  std::size_t i = 0;
  for (; i + 64 <= count; i += 64) found |= _mm512_cmpeq_epi8_mask(load(codes + i), _mm512_set1_epi8(-1));
  bool result = found != 0;
  for (; i < count; ++i) result |= codes[i] == 0xFF;
  return result;
}

/// Sixteen bytes at `offset` of rows r, r + 4, r + 8 and r + 12, r = 0..3, with their dwords transposed:
/// out[j] holds dword j of rows 0..15.
inline void transpose_dwords(const std::uint8_t* const* rows, std::size_t offset, __m512i (&out)[4]) {
  __m512i row[4];
  for (std::size_t r = 0; r < 4; ++r) {
    row[r] = _mm512_castsi128_si512(load16(rows[r] + offset));
    row[r] = _mm512_inserti32x4(row[r], load16(rows[r + 4] + offset), 1);
    row[r] = _mm512_inserti32x4(row[r], load16(rows[r + 8] + offset), 2);
    row[r] = _mm512_inserti32x4(row[r], load16(rows[r + 12] + offset), 3);
  }
  const __m512i t0 = _mm512_unpacklo_epi32(row[0], row[1]), t1 = _mm512_unpackhi_epi32(row[0], row[1]);
  const __m512i t2 = _mm512_unpacklo_epi32(row[2], row[3]), t3 = _mm512_unpackhi_epi32(row[2], row[3]);
  out[0] = _mm512_unpacklo_epi64(t0, t2);
  out[1] = _mm512_unpackhi_epi64(t0, t2);
  out[2] = _mm512_unpacklo_epi64(t1, t3);
  out[3] = _mm512_unpackhi_epi64(t1, t3);
}

inline void prefetch_bytes(const std::uint8_t* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T0);
}

/// Step `step` of `steps` that fetch, for each of sixteen rows, the `Bytes` bytes behind the first ones.
template <std::size_t Bytes>
inline void prefetch_rows(const std::uint8_t* const* rows, std::size_t step, std::size_t steps) {
  constexpr std::size_t kLines = kLanes * Bytes / 64;
  for (std::size_t line = step * kLines / steps; line < (step + 1) * kLines / steps; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(rows[line % kLanes] + Bytes + line / kLanes * 64),
                 _MM_HINT_T0);
}

/// In every 128-bit part: [a0+a1+a2+a3, b0+.., c0+.., d0+..].
inline __m512i sum_quads(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/// Sums of neighbouring 128-bit parts: a0 + a1, b0 + b1, a2 + a3, b2 + b3.
inline __m512i sum_parts(__m512i a, __m512i b) {
  const __m512i kept = _mm512_mask_blend_epi32(0xF0F0, a, b), moved = _mm512_mask_blend_epi32(0xF0F0, b, a);
  return _mm512_add_epi32(kept, _mm512_shuffle_i32x4(moved, moved, 0xB1));
}

/// Scales of sixteen features (one pointer each) over `blocks` blocks as fp32 [blocks][stride], stride >= 16.
inline void transpose_scales(const std::uint8_t* const* rows, std::size_t blocks, float* out,
                             std::size_t stride) {
  std::size_t b = 0;
  for (; b + 16 <= blocks; b += 16) {
    __m512i dwords[4];  // dword j of every row: its blocks 4 j .. 4 j + 3
    transpose_dwords(rows, b, dwords);
    for (std::size_t j = 0; j < 4; ++j)
      for (std::size_t i = 0; i < 4; ++i) {
        const __m512i code = _mm512_and_si512(
            _mm512_srlv_epi32(dwords[j], _mm512_set1_epi32(static_cast<int>(8 * i))), _mm512_set1_epi32(255));
        const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(code, 23), _mm512_set1_epi32(0x00400000));
        store(out + (b + 4 * j + i) * stride, bits);
      }
  }
  for (; b < blocks; ++b)
    for (std::size_t r = 0; r < kLanes; ++r) out[b * stride + r] = decode_e8m0(rows[r][b]);
}

inline void store_bfloat16(BFloat16* out, std::size_t count, __m512 values) {
  float lanes[kLanes];
  _mm512_storeu_ps(lanes, values);
  for (std::size_t i = 0; i < count; ++i) out[i] = to_bfloat16(lanes[i]);
}

}  // namespace
}  // namespace dsv41::avx512
