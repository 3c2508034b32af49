// Pieces shared by the block linears (docs/numerics.md 1): E8M0 scales of eight features, E4M3 codes as
// integers, sums over the blocks of a row. Include between target_begin.h and target_end.h only.
#pragma once

#include <cstring>

#include "kernels/formats.h"
#include "kernels/views.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kLanes = 8;        // output features per vector
constexpr std::size_t kGroup = 8;        // blocks whose results share a vector
constexpr std::size_t kPrefetch = 8192;  // bytes of weights fetched ahead of their use

inline __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline void store(void* to, __m256i value) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), value);
}

/// Makes the compiler compute `value` here: it would otherwise re-associate long chains of integer sums into
/// trees that do not fit the registers.
inline void keep(__m256i& value) {
  asm("" : "+x"(value));
}

inline void keep(__m256& value) {
  asm("" : "+x"(value));
}
inline __m256i kept(__m256i value) {
  asm("" : "+x"(value));
  return value;
}
inline __m256d kept(__m256d value) {
  asm("" : "+x"(value));
  return value;
}

/// Makes the compiler load again what `from` points to: it would otherwise hold it in registers that sums
/// need.
template <class T>
inline void load_again(const T*& from) {
  asm("" : "+r"(from));
}

/// 2^(code-127) of eight dwords holding E8M0 codes; code 255 (NaN) is sorted out before.
inline __m256 scales_of(__m256i codes) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(codes, 23), _mm256_set1_epi32(0x00400000)));
}
inline __m256 load_scales(const std::uint8_t* codes) {
  return scales_of(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}

/// The eight E4M3 codes at `codes` as multiples of 2^-9, |value| < 2^18. Not for NaN codes.
inline __m256i integers_of(const std::uint8_t* codes) {
  const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(code, 3), _mm256_set1_epi32(15));
  const __m256i fraction = _mm256_and_si256(code, _mm256_set1_epi32(7));
  const __m256i normal = _mm256_cmpgt_epi32(exponent, _mm256_setzero_si256());
  const __m256i mantissa = _mm256_or_si256(fraction, _mm256_and_si256(normal, _mm256_set1_epi32(8)));
  const __m256i magnitude =
      _mm256_sllv_epi32(mantissa, _mm256_add_epi32(exponent, normal));  // exponent - 1, at least 0
  const __m256i sign = _mm256_srai_epi32(_mm256_slli_epi32(code, 24), 31);
  return _mm256_sub_epi32(_mm256_xor_si256(magnitude, sign), sign);
}

inline std::uint32_t or_lanes(__m256i value) {
  __m128i half = _mm_or_si128(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
  half = _mm_or_si128(half, _mm_shuffle_epi32(half, 0x4E));
  half = _mm_or_si128(half, _mm_shuffle_epi32(half, 0xB1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(half));
}

inline std::int32_t sum_lanes(__m256i value) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1));
  return _mm_cvtsi128_si32(half);
}

inline std::int32_t max_lanes(__m256i value) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
  return _mm_cvtsi128_si32(half);
}

/// True when a code of the `count` codes is an E4M3 NaN (0x7F, 0xFF).
inline bool holds_e4m3_nan(const std::uint8_t* codes, std::size_t count) {
  __m256i found = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32)
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(_mm256_or_si256(load(codes + i), _mm256_set1_epi8(-128)),
                                                     _mm256_set1_epi8(-1)));
  bool result = _mm256_movemask_epi8(found) != 0;
  for (; i < count; ++i) result |= (codes[i] & 0x7F) == 0x7F;
  return result;
}

/// True when one of the `count` E8M0 codes is 255.
inline bool holds_e8m0_nan(const std::uint8_t* codes, std::size_t count) {
  __m256i found = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32)
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(load(codes + i), _mm256_set1_epi8(-1)));
  bool result = _mm256_movemask_epi8(found) != 0;
  for (; i < count; ++i) result |= codes[i] == 0xFF;
  return result;
}

/// Scales of eight features (one pointer each) over `blocks` blocks as fp32 [blocks][stride], stride >= 8.
inline void transpose_scales(const std::uint8_t* const* rows, std::size_t blocks, float* out,
                             std::size_t stride) {
  std::size_t b = 0;
  for (; b + 8 <= blocks; b += 8) {
    __m128i row[8];
    for (std::size_t r = 0; r < 8; ++r)
      row[r] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[r] + b));
    const __m128i a0 = _mm_unpacklo_epi8(row[0], row[1]), a1 = _mm_unpacklo_epi8(row[2], row[3]);
    const __m128i a2 = _mm_unpacklo_epi8(row[4], row[5]), a3 = _mm_unpacklo_epi8(row[6], row[7]);
    const __m128i c0 = _mm_unpacklo_epi16(a0, a1), c1 = _mm_unpackhi_epi16(a0, a1);
    const __m128i c2 = _mm_unpacklo_epi16(a2, a3), c3 = _mm_unpackhi_epi16(a2, a3);
    const __m128i pairs[4] = {_mm_unpacklo_epi32(c0, c2), _mm_unpackhi_epi32(c0, c2),
                              _mm_unpacklo_epi32(c1, c3), _mm_unpackhi_epi32(c1, c3)};
    for (std::size_t p = 0; p < 4; ++p) {
      _mm256_storeu_ps(out + (b + 2 * p) * stride, scales_of(_mm256_cvtepu8_epi32(pairs[p])));
      _mm256_storeu_ps(out + (b + 2 * p + 1) * stride,
                       scales_of(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(pairs[p], pairs[p]))));
    }
  }
  for (; b < blocks; ++b)
    for (std::size_t r = 0; r < 8; ++r) out[b * stride + r] = decode_e8m0(rows[r][b]);
}

/// Four dwords at `offset` of each of eight rows: out[j] holds dword j of rows 0..7.
inline void transpose_dwords(const std::uint8_t* const* rows, std::size_t offset, __m256i (&out)[4]) {
  __m256i row[4];  // row r beside row r + 4
  for (std::size_t r = 0; r < 4; ++r)
    row[r] = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + 4] + offset)), 1);
  const __m256i t0 = _mm256_unpacklo_epi32(row[0], row[1]), t1 = _mm256_unpackhi_epi32(row[0], row[1]);
  const __m256i t2 = _mm256_unpacklo_epi32(row[2], row[3]), t3 = _mm256_unpackhi_epi32(row[2], row[3]);
  out[0] = _mm256_unpacklo_epi64(t0, t2);
  out[1] = _mm256_unpackhi_epi64(t0, t2);
  out[2] = _mm256_unpacklo_epi64(t1, t3);
  out[3] = _mm256_unpackhi_epi64(t1, t3);
}

inline __m256i broadcast_dword(const void* from) {
  std::int32_t value;
  std::memcpy(&value, from, 4);
  return _mm256_set1_epi32(value);
}

/// [a0+a1+a2+a3, b0+.., c0+.., d0+..] in each 128-bit half. Not with horizontal additions: each of them costs
/// more than the two shuffles and the addition that it stands for.
inline __m256i sum_quads(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

inline void store_bfloat16(BFloat16* out, std::size_t count, __m256 values) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, values);
  for (std::size_t i = 0; i < count; ++i) out[i] = to_bfloat16(lanes[i]);
}

}  // namespace
}  // namespace dsv41::avx2
