// Index scores with AVX2 (docs/model.md 3): eight keys at a time, one lane per key. The dot product of a
// block of FP4 codes is a small integer; where the scales of a vector differ little, fp32 holds the sum over
// its blocks exactly and the 16 lanes of docs/numerics.md 2 cannot differ from it. Everything else goes to
// the plain backend.
#include <immintrin.h>

#include <algorithm>

#include "kernels/avx2/avx2.h"
#include "kernels/prepared_query.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/vectors.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kLargestBlocks = 8;  // dim <= 256
constexpr std::size_t kFoldLanes = 16;
// A block's dot product is below 2^13 in quarters; eight of them with scales within 2^8 stay below 24 bits.
constexpr int kLargestSpread = 8;
constexpr std::uint8_t kSmallestScale = 64, kLargestScale = 190;  // products and their bf16 values are normal

struct QueryBlock {
  std::int8_t halves[32];  // codes in halves: even elements, then odd ones
  std::int32_t start;      // two int16: minus 12 times the halves a half-lane meets
  float scale;             // s_q / 4
};

inline __m256i nibble_table(std::int8_t offset) {
  const __m256i halves = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2, 3,
                                          4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return _mm256_add_epi8(halves, _mm256_set1_epi8(offset));
}

/// False when a scale is outside the usual range.
bool prepare_query(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t vectors,
                   std::size_t blocks, QueryBlock* out, int& spread) {
  const __m128i table = _mm256_castsi256_si128(nibble_table(0)), nibble = _mm_set1_epi8(15);
  spread = 0;
  for (std::size_t v = 0; v < vectors; ++v) {
    int smallest = 255, largest = 0;
    for (std::size_t b = 0; b < blocks; ++b, codes += 16, ++scales, ++out) {
      const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
      const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(packed, nibble));
      const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out->halves), even);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out->halves + 16), odd);
      const __m128i twelve = _mm_set1_epi8(12);
      __m128i sum = _mm_add_epi16(_mm_maddubs_epi16(twelve, even), _mm_maddubs_epi16(twelve, odd));
      sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4E));
      sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xB1));
      out->start = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sum));
      out->scale = decode_e8m0(*scales) * 0.25f;
      smallest = std::min<int>(smallest, *scales), largest = std::max<int>(largest, *scales);
    }
    if (smallest < kSmallestScale || largest > kLargestScale) return false;
    spread = std::max(spread, largest - smallest);
  }
  return true;
}

struct KeyTile {
  alignas(32) std::uint8_t
      halves[kLargestBlocks][8][32];  // plus 12; [block][dword step]: four elements of eight keys
  alignas(32) float scales[kLargestBlocks][kLanes];
};

/// Eight keys; false when their scales are too far apart for fp32.
bool prepare_keys(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t blocks, int query_spread,
                  KeyTile& tile) {
  const std::uint8_t* rows[kLanes];
  for (std::size_t r = 0; r < kLanes; ++r) {
    rows[r] = codes + r * blocks * 16;
    int smallest = 255, largest = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::uint8_t scale = scales[r * blocks + b];
      smallest = std::min<int>(smallest, scale), largest = std::max<int>(largest, scale);
      tile.scales[b][r] = decode_e8m0(scale);
    }
    if (smallest < kSmallestScale || largest > kLargestScale ||
        largest - smallest + query_spread > kLargestSpread)
      return false;
  }
  const __m256i table = nibble_table(12), nibble = _mm256_set1_epi8(15);
  for (std::size_t b = 0; b < blocks; ++b) {
    __m256i dwords[4];
    transpose_dwords(rows, b * 16, dwords);
    for (std::size_t j = 0; j < 4; ++j) {
      store(tile.halves[b][j], _mm256_shuffle_epi8(table, _mm256_and_si256(dwords[j], nibble)));
      store(tile.halves[b][4 + j],
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(dwords[j], 4), nibble)));
    }
  }
  return true;
}

/// RNbf16 of values that are not NaN, widened again.
inline __m256 round_number(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

/// `Heads` heads against eight keys: bf16(relu(bf16(dot)) * weight), added to the lanes of the heads.
template <std::size_t Heads>
inline void add_heads(const QueryBlock* query, const float* weights, std::size_t blocks, const KeyTile& tile,
                      std::size_t head, double (*lanes)[kLanes]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 match[Heads];
  for (std::size_t h = 0; h < Heads; ++h) match[h] = _mm256_setzero_ps();
  for (std::size_t b = 0; b < blocks; ++b) {
    const QueryBlock* const block = query + b;
    __m256i sum[Heads];
    for (std::size_t h = 0; h < Heads; ++h) sum[h] = _mm256_set1_epi32(block[h * blocks].start);
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      const __m256i key = load(tile.halves[b][j]);
      for (std::size_t h = 0; h < Heads; ++h) {
        sum[h] = _mm256_add_epi16(
            sum[h], _mm256_maddubs_epi16(key, broadcast_dword(block[h * blocks].halves + 4 * j)));
        keep(sum[h]);
      }
    }
    const __m256 key_scale = _mm256_load_ps(tile.scales[b]);
    for (std::size_t h = 0; h < Heads; ++h) {
      const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(block[h * blocks].scale), key_scale);
      match[h] =
          _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(sum[h], ones)), scale, match[h]);  // exact
    }
  }
  for (std::size_t h = 0; h < Heads; ++h) {
    const __m256 positive = _mm256_max_ps(round_number(match[h]), _mm256_setzero_ps());
    const __m256 term = round_number(_mm256_mul_ps(positive, _mm256_set1_ps(weights[h])));
    double* const lane = lanes[(head + h) % kFoldLanes];
    _mm256_store_pd(lane, _mm256_add_pd(_mm256_load_pd(lane), low_half(term)));
    _mm256_store_pd(lane + 4, _mm256_add_pd(_mm256_load_pd(lane + 4), high_half(term)));
  }
}

void score_tile(const QueryBlock* query, const float* weights, std::size_t heads, std::size_t blocks,
                const KeyTile& tile, BFloat16* scores) {
  alignas(32) double lanes[kFoldLanes][kLanes] = {};
  std::size_t head = 0;
  for (; head + 4 <= heads; head += 4)
    add_heads<4>(query + head * blocks, weights + head, blocks, tile, head, lanes);
  for (; head < heads; ++head) add_heads<1>(query + head * blocks, weights + head, blocks, tile, head, lanes);
  for (std::size_t half = kFoldLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane)
      for (std::size_t part = 0; part < kLanes; part += 4)
        _mm256_store_pd(lanes[lane] + part, _mm256_add_pd(_mm256_load_pd(lanes[lane] + part),
                                                          _mm256_load_pd(lanes[lane + half] + part)));
  store8(scores, narrow(_mm256_load_pd(lanes[0]), _mm256_load_pd(lanes[0] + 4)));
}

}  // namespace

void index_scores(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                  std::size_t keys, BFloat16* scores) {
  static thread_local PreparedQuery<QueryBlock> prepared;
  static thread_local KeyTile tile;
  prepared.set(query, kLargestBlocks, prepare_query);
  const std::size_t blocks = query.dim / kBlock;
  const auto plainly = [&](std::size_t first, std::size_t count) {
    plain_ops().index_scores(query, key_codes + first * (query.dim / 2), key_scales + first * blocks, count,
                             scores + first);
  };
  if (!prepared.usual) return plainly(0, keys);
  std::size_t key = 0;
  for (; key + kLanes <= keys; key += kLanes) {
    if (prepare_keys(key_codes + key * (query.dim / 2), key_scales + key * blocks, blocks, prepared.spread,
                     tile))
      score_tile(prepared.blocks.data(), prepared.weights.data(), query.heads, blocks, tile, scores + key);
    else
      plainly(key, kLanes);
  }
  if (key < keys) plainly(key, keys - key);
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
