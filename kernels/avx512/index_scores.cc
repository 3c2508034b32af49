// Index scores with AVX-512 VNNI (docs/model.md 3): sixteen keys at a time, one lane per key. The dot product
// of a block of FP4 codes is a small integer; where the scales of a vector differ little, fp32 holds the sum
// over its blocks exactly and the 16 lanes of docs/numerics.md 2 cannot differ from it. Everything else goes
// to the plain backend.
#include <algorithm>

#include "kernels/avx512/avx512.h"
#include "kernels/prepared_query.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/vectors.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kLargestBlocks = 8;  // dim <= 256
constexpr std::size_t kHeadTile = 4;
// A block's dot product is below 2^13 in quarters; eight of them with scales within 2^8 stay below 24 bits.
constexpr int kLargestSpread = 8;
constexpr std::uint8_t kSmallestScale = 64, kLargestScale = 190;  // products and their bf16 values are normal

struct QueryBlock {
  std::int8_t halves[32];  // codes in halves: even elements, then odd ones
  std::int32_t start;      // minus 12 times their sum
  float scale;             // s_q / 4
};

inline __m512i halves_of(__m512i codes, std::int8_t offset) {
  const __m128i halves = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_add_epi8(halves, _mm_set1_epi8(offset))),
                             _mm512_and_si512(codes, _mm512_set1_epi8(15)));
}

/// False when a scale is outside the usual range. `spread`: of the scales of one head, at most.
bool prepare_query(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t heads,
                   std::size_t blocks, QueryBlock* out, int& spread) {
  spread = 0;
  for (std::size_t h = 0; h < heads; ++h) {
    int smallest = 255, largest = 0;
    for (std::size_t b = 0; b < blocks; ++b, codes += 16, ++scales, ++out) {
      const __m512i packed = _mm512_castsi128_si512(load16(codes));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out->halves), _mm512_castsi512_si128(halves_of(packed, 0)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out->halves + 16),
                       _mm512_castsi512_si128(halves_of(_mm512_srli_epi16(packed, 4), 0)));
      std::int32_t sum = 0;
      for (const std::int8_t half : out->halves) sum += half;
      out->start = -12 * sum;
      out->scale = decode_e8m0(*scales) * 0.25f;
      smallest = std::min<int>(smallest, *scales), largest = std::max<int>(largest, *scales);
    }
    if (smallest < kSmallestScale || largest > kLargestScale) return false;
    spread = std::max(spread, largest - smallest);
  }
  return true;
}

struct KeyTile {
  alignas(64) std::uint8_t
      halves[kLargestBlocks][8][64];  // plus 12; [block][dword step]: four elements of sixteen keys
  alignas(64) float scales[kLargestBlocks][kLanes];
};

/// Up to sixteen keys, the last one repeated; false when their scales are too far apart for fp32.
bool prepare_keys(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count,
                  std::size_t blocks, int query_spread, KeyTile& tile) {
  const std::uint8_t* rows[kLanes];
  for (std::size_t r = 0; r < kLanes; ++r) rows[r] = codes + std::min(r, count - 1) * blocks * 16;
  __m512i smallest = _mm512_set1_epi32(255), largest = _mm512_setzero_si512();
  for (std::size_t b = 0; b < blocks; ++b) {
    __m512i scale;
    if (blocks == 4 && count == kLanes) {  // a dword is a key's
      scale = _mm512_and_si512(_mm512_srlv_epi32(load(scales), _mm512_set1_epi32(static_cast<int>(8 * b))),
                               _mm512_set1_epi32(255));
    } else {
      std::int32_t lanes[kLanes];
      for (std::size_t r = 0; r < kLanes; ++r) lanes[r] = scales[std::min(r, count - 1) * blocks + b];
      scale = load(lanes);
    }
    smallest = _mm512_min_epi32(smallest, scale), largest = _mm512_max_epi32(largest, scale);
    store(tile.scales[b], _mm512_slli_epi32(scale, 23));  // of those in the range below
  }
  const __m512i spread =
      _mm512_add_epi32(_mm512_sub_epi32(largest, smallest), _mm512_set1_epi32(query_spread));
  if ((_mm512_cmplt_epi32_mask(smallest, _mm512_set1_epi32(kSmallestScale)) |
       _mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(kLargestScale)) |
       _mm512_cmpgt_epi32_mask(spread, _mm512_set1_epi32(kLargestSpread))) != 0)
    return false;
  for (std::size_t b = 0; b < blocks; ++b) {
    __m512i dwords[4];
    transpose_dwords(rows, b * 16, dwords);
    for (std::size_t j = 0; j < 4; ++j) {
      store(tile.halves[b][j], halves_of(dwords[j], 12));
      store(tile.halves[b][4 + j], halves_of(_mm512_srli_epi16(dwords[j], 4), 12));
    }
  }
  return true;
}

/// RNbf16 of values that are not NaN, widened again.
inline __m512 round_number(__m512 values) {
  return _mm512_castsi512_ps(_mm512_and_si512(bfloat16_bits_of_numbers(values), _mm512_set1_epi32(~0xFFFF)));
}

/// `Heads` heads against sixteen keys: bf16(relu(bf16(dot)) * weight), added to the lanes of the heads.
template <std::size_t Heads>
DSV41_OUT_OF_LINE void add_heads(const QueryBlock* query, const float* weights, std::size_t blocks,
                                 const KeyTile& tile, std::size_t head, double (*lanes)[kLanes]) {
  __m512 match[Heads];
  for (std::size_t h = 0; h < Heads; ++h) match[h] = _mm512_setzero_ps();
  for (std::size_t b = 0; b < blocks; ++b) {
    const QueryBlock* const block = query + b;
    __m512i sum[Heads];
#pragma GCC unroll 4
    for (std::size_t h = 0; h < Heads; ++h) sum[h] = _mm512_set1_epi32(block[h * blocks].start);
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      const __m512i key = load(tile.halves[b][j]);
#pragma GCC unroll 4
      for (std::size_t h = 0; h < Heads; ++h)
        sum[h] = _mm512_dpbusd_epi32(sum[h], key, broadcast_dword(block[h * blocks].halves + 4 * j));
    }
    const __m512 key_scale = _mm512_load_ps(tile.scales[b]);
#pragma GCC unroll 4
    for (std::size_t h = 0; h < Heads; ++h) {
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(block[h * blocks].scale), key_scale);
      match[h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[h]), scale, match[h]);  // exact
    }
  }
#pragma GCC unroll 4
  for (std::size_t h = 0; h < Heads; ++h) {
    const __m512 positive = _mm512_max_ps(round_number(match[h]), _mm512_setzero_ps());
    const __m512 term = round_number(_mm512_mul_ps(positive, _mm512_set1_ps(weights[h])));
    double* const lane = lanes[(head + h) % kWidth];
    const Sixteen wide = widen(term);
    _mm512_store_pd(lane, _mm512_add_pd(_mm512_load_pd(lane), wide.part[0]));
    _mm512_store_pd(lane + 8, _mm512_add_pd(_mm512_load_pd(lane + 8), wide.part[1]));
  }
}

void score_tile(const QueryBlock* query, const float* weights, std::size_t heads, std::size_t blocks,
                const KeyTile& tile, BFloat16* scores) {
  alignas(64) double lanes[kWidth][kLanes] = {};
  std::size_t head = 0;
  for (; head + kHeadTile <= heads; head += kHeadTile)
    add_heads<kHeadTile>(query + head * blocks, weights + head, blocks, tile, head, lanes);
  for (; head < heads; ++head) add_heads<1>(query + head * blocks, weights + head, blocks, tile, head, lanes);
  for (std::size_t half = kWidth / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane)
      for (std::size_t part = 0; part < kLanes; part += 8)
        _mm512_store_pd(lanes[lane] + part, _mm512_add_pd(_mm512_load_pd(lanes[lane] + part),
                                                          _mm512_load_pd(lanes[lane + half] + part)));
  store_sixteen(scores, join_floats(_mm512_load_pd(lanes[0]), _mm512_load_pd(lanes[0] + 8)));
}

}  // namespace

void index_scores(const IndexQuery& query, const std::uint8_t* key_codes, const std::uint8_t* key_scales,
                  std::size_t keys, BFloat16* scores) {
  static thread_local PreparedQuery<QueryBlock> prepared;
  static thread_local KeyTile tile;
  prepared.set(query, kLargestBlocks, prepare_query);
  const std::size_t blocks = query.dim / kBlock;
  for (std::size_t key = 0, count; key < keys; key += count) {
    count = prepared.usual ? std::min(kLanes, keys - key) : keys;
    const std::uint8_t* const codes = key_codes + key * (query.dim / 2);
    const std::uint8_t* const key_scale_codes = key_scales + key * blocks;
    if (prepared.usual && prepare_keys(codes, key_scale_codes, count, blocks, prepared.spread, tile)) {
      BFloat16 results[kLanes];
      score_tile(prepared.blocks.data(), prepared.weights.data(), query.heads, blocks, tile, results);
      std::copy_n(results, count, scores + key);
    } else {
      plain_ops().index_scores(query, codes, key_scale_codes, count, scores + key);
    }
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
