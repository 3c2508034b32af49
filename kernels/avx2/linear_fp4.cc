// FP4 linears with AVX2 (docs/numerics.md 1): eight weight rows are read beside each other, four blocks at a
// time, and decoded once for up to sixteen activation rows.
//
// In units of 2^-9 an activation is h * 2^s + l with an integer h of two balanced base-256 digits and a rest
// l of another one, which is zero for nearly all elements. A weight w is looked up as half-units plus 12, an
// unsigned byte, so that the exact dot product of a block is sum((h * 2^s + l) * (w + 12)) - 12 * sum(h * 2^s
// + l). Where four blocks have no rests the factor 2^s is left to the scales; everywhere the sum fits 32
// bits.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/avx2/avx2.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kRowsTogether = 16;           // activation rows that share the decoding of a weight
constexpr std::size_t kQuad = 4;                    // blocks that are multiplied together
constexpr std::size_t kQuadBytes = kQuad * 16;      // of weights: a cache line
constexpr std::size_t kPairs = kLanes / 2;          // of weight rows
constexpr std::size_t kQuadsAhead = 16;             // fetched ahead in every row: 8 KiB
constexpr std::int32_t kLargest = 127 * 256 + 127;  // of two balanced digits

/// Scales between these cannot leave the range of normal fp32 numbers, in whatever order they are multiplied
/// with each other and with a block's dot product: then exact factors may be multiplied in any order.
constexpr std::uint8_t kSmallestUsual = 72, kLargestUsual = 180;

/// The lane of a block of a quad in the sums of a pair of weight rows: blocks 0 and 2 of both rows, then
/// blocks 1 and 3.
constexpr std::size_t lane_of(std::size_t block, std::size_t row) {
  return block % 2 * 4 + row * 2 + block / 2;
}
/// The 64-bit part of a vector that belongs to a block.
constexpr std::size_t part_of(std::size_t block) {
  return block % 2 * 2 + block / 2;
}

/// Four blocks of an activation row. Arrays of eight have the lanes of a pair of weight rows, vectors of
/// bytes and words 64 bits for each of blocks 0, 2, 1 and 3.
struct alignas(64) Quad {
  // Of h the low and the high one, then l; even and odd elements of the first half of each block, then of the
  // second half.
  std::int8_t digits[3][4][32];
  std::int16_t factors[2][16];  // of the digits of h, if there are rests: 2^s and 2^(s+8)
  std::int32_t correction[8];   // -12 * sum(h), or, if there are rests, of the activations
  float unit[8];                // 2^(s-10), if there are rests 2^-10
  float scale[8];               // s_x
  float scaled_unit[kQuad];     // by block: unit * scale, for usual scales
  bool has_rests;
};

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

/// What the blocks of a quad have to agree on before it is complete.
struct BlockSums {
  int shift = 0;                 // s
  std::int32_t activations = 0;  // their sum
  bool has_rests = false;
};

/// Writes the digits of one block.
BlockSums set_digits(Quad& quad, std::size_t block, const std::uint8_t* codes) {
  __m256i v[4];
  for (std::size_t i = 0; i < 4; ++i) v[i] = integers_of(codes + 8 * i);
  const std::int32_t largest =
      max_lanes(_mm256_max_epi32(_mm256_max_epi32(_mm256_abs_epi32(v[0]), _mm256_abs_epi32(v[1])),
                                 _mm256_max_epi32(_mm256_abs_epi32(v[2]), _mm256_abs_epi32(v[3]))));
  int s = 0;
  while ((largest + (1 << s >> 1)) >> s > kLargest) ++s;

  const __m128i count = _mm_cvtsi32_si128(s);
  const __m256i half = _mm256_set1_epi32(1 << s >> 1);
  __m256i digit[3][4], sum = _mm256_setzero_si256(), any = _mm256_setzero_si256();
  for (std::size_t i = 0; i < 4; ++i) {
    const __m256i h = _mm256_sra_epi32(_mm256_add_epi32(v[i], half), count);
    digit[0][i] = low_digit(h);
    digit[1][i] = above_digit(h, digit[0][i]);
    digit[2][i] = _mm256_sub_epi32(v[i], _mm256_sll_epi32(h, count));
    sum = _mm256_add_epi32(sum, v[i]);
    any = _mm256_or_si256(any, digit[2][i]);
  }
  for (std::size_t d = 0; d < 3; ++d) {
    alignas(32) std::int8_t bytes[32];  // even elements of both halves, odd elements of both halves
    store(bytes, even_odd_bytes(digit[d]));
    for (std::size_t i = 0; i < 4; ++i)
      std::memcpy(quad.digits[d][i % 2 * 2 + i / 2] + part_of(block) * 8, bytes + i * 8, 8);
  }
  return {s, sum_lanes(sum), _mm256_testz_si256(any, any) == 0};
}

/// The first `count` blocks of a quad; the others are zero.
void set_quad(Quad& quad, const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count) {
  if (count < kQuad) quad = {};
  BlockSums sums[kQuad];
  quad.has_rests = false;
  for (std::size_t b = 0; b < count; ++b) {
    sums[b] = set_digits(quad, b, codes + b * kBlock);
    quad.has_rests |= sums[b].has_rests;
  }
  for (std::size_t b = 0; b < count; ++b) {
    const int shift = quad.has_rests ? 0 : sums[b].shift;
    const float unit = std::bit_cast<float>(static_cast<std::uint32_t>(127 - 10 + shift) << 23);
    const float scale = decode_e8m0(scales[b]);
    for (std::size_t row = 0; row < 2; ++row) {
      const std::size_t lane = lane_of(b, row);
      quad.correction[lane] = -12 * (sums[b].activations >> shift);
      quad.unit[lane] = unit, quad.scale[lane] = scale;
    }
    quad.scaled_unit[b] = unit * scale;
    for (std::size_t i = 0; i < 4; ++i)
      for (std::size_t d = 0; d < 2; ++d)
        quad.factors[d][part_of(b) * 4 + i] =
            static_cast<std::int16_t>(1 << (sums[b].shift + 8 * static_cast<int>(d)));
  }
}

/// An activation row, prepared.
using Row = std::vector<Quad>;

void set_row(Row& row, const std::uint8_t* codes, const std::uint8_t* scales, std::size_t blocks) {
  row.resize(ceil_div(blocks, kQuad));
  for (std::size_t q = 0; q < row.size(); ++q)
    set_quad(row[q], codes + q * kQuad * kBlock, scales + q * kQuad, std::min(kQuad, blocks - q * kQuad));
}

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

/// Eight weight rows, `stride` bytes apart, and their scales.
struct Weights {
  const std::uint8_t *codes, *scales;
  std::size_t stride, scale_stride;
};

/// Four blocks of a weight row: the first and the second half of each.
struct QuadWeights {
  Unpacked first, second;
};
inline QuadWeights load_quad(const std::uint8_t* codes) {
  const __m256i low = load(codes), high = load(codes + 32);
  return {unpack(_mm256_unpacklo_epi64(low, high)), unpack(_mm256_unpackhi_epi64(low, high))};
}

/// Sums of one digit: at most 8 * 24 * 128 in a 16-bit lane.
inline __m256i digit_sum(const QuadWeights& w, const std::int8_t (&digits)[4][32]) {
  const __m256i first = _mm256_add_epi16(_mm256_maddubs_epi16(w.first.even, load(digits[0])),
                                         _mm256_maddubs_epi16(w.first.odd, load(digits[1])));
  const __m256i second = _mm256_add_epi16(_mm256_maddubs_epi16(w.second.even, load(digits[2])),
                                          _mm256_maddubs_epi16(w.second.odd, load(digits[3])));
  return _mm256_add_epi16(first, second);
}

/// Two dwords for each block, which are to be added.
template <bool Rests>
inline __m256i multiply(const QuadWeights& w, const Quad& x) {
  const __m256i low = digit_sum(w, x.digits[0]), high = digit_sum(w, x.digits[1]);
  if constexpr (Rests) {
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(low, load(x.factors[0])),
                                         _mm256_madd_epi16(high, load(x.factors[1])));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(digit_sum(w, x.digits[2]), _mm256_set1_epi16(1)));
  }
  return _mm256_add_epi32(_mm256_madd_epi16(low, _mm256_set1_epi16(1)),
                          _mm256_madd_epi16(high, _mm256_set1_epi16(256)));
}

/// The even fp32 lanes of a and those of b, in each 128-bit half; the odd ones.
inline __m256 even_lanes(__m256 a, __m256 b) {
  return _mm256_shuffle_ps(a, b, 0x88);
}
inline __m256 odd_lanes(__m256 a, __m256 b) {
  return _mm256_shuffle_ps(a, b, 0xDD);
}

/// The dot products of a pair of weight rows, rounded, in units of the quad.
inline __m256 pair_totals(__m256i first, __m256i second, const Quad& x) {
  const __m256 a = _mm256_castsi256_ps(first), b = _mm256_castsi256_ps(second);
  const __m256i sums =
      _mm256_add_epi32(_mm256_castps_si256(even_lanes(a, b)), _mm256_castps_si256(odd_lanes(a, b)));
  return _mm256_cvtepi32_ps(_mm256_add_epi32(sums, load(x.correction)));
}

/// s_w of a pair of weight rows.
template <bool Usual>
inline __m256 pair_scales(const std::uint8_t* first, const std::uint8_t* second) {
  const __m256i codes = _mm256_blend_epi32(broadcast_dword(first), broadcast_dword(second), 0xAA);
  const __m256i to_highest = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6, -1,
                                              -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 5, -1, -1, -1, 7);
  const __m256i bits = _mm256_srli_epi32(_mm256_shuffle_epi8(codes, to_highest), 1);
  return _mm256_castsi256_ps(Usual ? bits : _mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000)));
}

/// Adds the scaled products of a quad to the sums of eight weight rows, in ascending order of its blocks.
template <bool Usual>
inline __m256 add_quad(__m256 sum, const __m256 (&totals)[kPairs], const __m256 (&scales)[kPairs],
                       const Quad& x) {
  __m256 terms[kPairs];
#pragma GCC unroll 4
  for (std::size_t p = 0; p < kPairs; ++p) {
    if constexpr (Usual) {
      terms[p] = _mm256_mul_ps(totals[p], scales[p]);
    } else {
      const __m256 d = _mm256_mul_ps(totals[p], _mm256_load_ps(x.unit));
      terms[p] = _mm256_mul_ps(d, _mm256_mul_ps(_mm256_load_ps(x.scale), scales[p]));
    }
  }
  const __m256 low[2] = {even_lanes(terms[0], terms[1]), odd_lanes(terms[0], terms[1])};
  const __m256 high[2] = {even_lanes(terms[2], terms[3]), odd_lanes(terms[2], terms[3])};
#pragma GCC unroll 4
  for (std::size_t b = 0; b < kQuad; ++b) {
    const __m256 rows = b % 2 == 0 ? _mm256_permute2f128_ps(low[b / 2], high[b / 2], 0x20)
                                   : _mm256_permute2f128_ps(low[b / 2], high[b / 2], 0x31);
    sum = Usual ? _mm256_fmadd_ps(rows, _mm256_set1_ps(x.scaled_unit[b]), sum) : _mm256_add_ps(sum, rows);
  }
  return sum;
}

inline void prefetch_rows(const std::uint8_t* codes, std::size_t stride) {
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kLanes; ++r)
    _mm_prefetch(reinterpret_cast<const char*>(codes + r * stride), _MM_HINT_T0);
}

/// Fetches what is read kQuadsAhead quads later; behind the end of the rows come those of the next tile.
inline void prefetch_ahead(const Weights& w, std::size_t quad, std::size_t quads) {
  const std::size_t next = quad + kQuadsAhead < quads ? 0 : (kLanes - 1) * w.stride;
  prefetch_rows(w.codes + kQuadsAhead * kQuadBytes + next, w.stride);
}

template <bool Rests>
inline void quad_totals(const Quad& quad, const Weights& w, __m256 (&totals)[kPairs]) {
  const std::uint8_t* codes = w.codes;
  for (std::size_t p = 0; p < kPairs; ++p, codes += 2 * w.stride) {
    const __m256i first = kept(multiply<Rests>(load_quad(codes), quad));
    const Quad* again = &quad;
    load_again(again);
    const __m256i second = kept(multiply<Rests>(load_quad(codes + w.stride), *again));
    totals[p] = pair_totals(first, second, quad);
  }
}

template <bool Usual>
inline void quad_scales(const Weights& w, __m256 (&scales)[kPairs]) {
  const std::uint8_t* row = w.scales;
  for (std::size_t p = 0; p < kPairs; ++p, row += 2 * w.scale_stride)
    scales[p] = pair_scales<Usual>(row, row + w.scale_stride);
}

/// The sums of eight weight rows with one activation row over `quads` quads.
template <bool Usual>
DSV41_OUT_OF_LINE __m256 sum_quads_of_row(const Row& x, Weights w, std::size_t quads) {
  __m256 sum = _mm256_setzero_ps();
  for (std::size_t q = 0; q < quads; ++q, w.codes += kQuadBytes, w.scales += kQuad) {
    prefetch_ahead(w, q, quads);
    __m256 totals[kPairs], scales[kPairs];
    if (x[q].has_rests)
      quad_totals<true>(x[q], w, totals);
    else
      quad_totals<false>(x[q], w, totals);
    quad_scales<Usual>(w, scales);
    sum = add_quad<Usual>(sum, totals, scales, x[q]);
  }
  return sum;
}

template <bool Rests>
inline void quad_totals(const Quad& quad, const QuadWeights (&weights)[kLanes], __m256 (&totals)[kPairs]) {
  for (std::size_t p = 0; p < kPairs; ++p)
    totals[p] =
        pair_totals(multiply<Rests>(weights[2 * p], quad), multiply<Rests>(weights[2 * p + 1], quad), quad);
}

/// Adds a quad of several activation rows: the weights are kept in the first-level cache for all of them.
template <bool Usual>
DSV41_OUT_OF_LINE void add_quad_of_rows(std::span<const Row> x, std::size_t q, const Weights& w,
                                        __m256* sums) {
  QuadWeights weights[kLanes];
  for (std::size_t r = 0; r < kLanes; ++r) weights[r] = load_quad(w.codes + r * w.stride);
  __m256 totals[kPairs], scales[kPairs];
  quad_scales<Usual>(w, scales);
  for (std::size_t m = 0; m < x.size(); ++m) {
    if (x[m][q].has_rests)
      quad_totals<true>(x[m][q], weights, totals);
    else
      quad_totals<false>(x[m][q], weights, totals);
    sums[m] = add_quad<Usual>(sums[m], totals, scales, x[m][q]);
  }
}

/// Eight features, one in each lane of the sums [rows].
template <bool Usual>
void add_tile(std::span<const Row> x, Weights w, std::size_t blocks, __m256* sums) {
  const std::size_t whole = blocks / kQuad;
  if (x.size() == 1) {
    sums[0] = sum_quads_of_row<Usual>(x[0], w, whole);
    w.codes += whole * kQuadBytes, w.scales += whole * kQuad;
  } else {
    for (std::size_t m = 0; m < x.size(); ++m) sums[m] = _mm256_setzero_ps();
    for (std::size_t q = 0; q < whole; ++q, w.codes += kQuadBytes, w.scales += kQuad) {
      prefetch_ahead(w, q, whole);
      add_quad_of_rows<Usual>(x, q, w, sums);
    }
  }
  if (whole * kQuad == blocks) return;
  std::uint8_t codes[kLanes * kQuadBytes] = {}, scales[kLanes * kQuad] = {};
  for (std::size_t r = 0; r < kLanes; ++r) {  // nothing beyond the rows may be read
    std::memcpy(codes + r * kQuadBytes, w.codes + r * w.stride, blocks % kQuad * 16);
    std::memcpy(scales + r * kQuad, w.scales + r * w.scale_stride, blocks % kQuad);
  }
  add_quad_of_rows<Usual>(x, whole, {codes, scales, kQuadBytes, kQuad}, sums);
}

/// Whether all of the `count` scales are usual ones. NaN is not.
inline bool usual_scales(const std::uint8_t* scales, std::size_t count) {
  const __m256i bounds[2] = {_mm256_set1_epi8(static_cast<char>(kSmallestUsual)),
                             _mm256_set1_epi8(static_cast<char>(kLargestUsual))};
  __m256i smallest = bounds[0], largest = bounds[1];
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i codes = load(scales + i);
    smallest = _mm256_min_epu8(smallest, codes), largest = _mm256_max_epu8(largest, codes);
  }
  const __m256i changed =
      _mm256_or_si256(_mm256_xor_si256(smallest, bounds[0]), _mm256_xor_si256(largest, bounds[1]));
  return _mm256_testz_si256(changed, changed) != 0 &&
         std::all_of(scales + i, scales + count,
                     [](std::uint8_t code) { return code >= kSmallestUsual && code <= kLargestUsual; });
}

/// Up to kRowsTogether activation rows, of which none is NaN; a matrix of at least kLanes features.
void add_rows(const QuantizedRows& rows, const Fp4Matrix& w, Range range, BFloat16* out) {
  static thread_local std::vector<Row> storage(kRowsTogether);
  static thread_local PreparedName prepared;  // of what is in storage
  const std::span<const Row> x(storage.data(), rows.rows);
  const std::size_t blocks = w.k / kBlock;
  if (!prepared.is(rows.name)) {
    for (std::size_t m = 0; m < rows.rows; ++m)
      set_row(storage[m], rows.codes + m * w.k, rows.scales + m * blocks, blocks);
    prepared.set(rows.name);
  }
  const bool usual_rows = usual_scales(rows.scales, rows.rows * blocks);
  for (std::size_t n = range.begin; n < range.end; n += kLanes) {
    const std::size_t count = std::min(kLanes, range.end - n);
    const std::size_t first = std::min(n, w.n - kLanes);  // the last tile also holds features before n
    const Weights tile = {w.codes + first * (w.k / 2), w.scales + first * blocks, w.k / 2, blocks};
    const bool usual = usual_rows && usual_scales(tile.scales, kLanes * blocks);
    if (!usual && holds_e8m0_nan(tile.scales, kLanes * blocks)) {
      plain_ops().linear_fp4(rows, w, {n, n + count}, out);  // NaN spreads as the definition says
      continue;
    }
    for (std::size_t line = 0; line < kLanes * blocks; line += 64)  // of the next tile, looked at first
      _mm_prefetch(reinterpret_cast<const char*>(tile.scales + kLanes * blocks + line), _MM_HINT_T0);
    __m256 sums[kRowsTogether];
    const auto add = usual ? add_tile<true> : add_tile<false>;
    add(x, tile, blocks, sums);
    for (std::size_t m = 0; m < rows.rows; ++m) {
      BFloat16 features[kLanes];
      store_bfloat16(features, kLanes, sums[m]);
      std::copy_n(features + (n - first), count, out + m * w.n + n);
    }
  }
}

}  // namespace

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out) {
  const std::size_t blocks = w.k / kBlock;
  if (w.n < kLanes || holds_e8m0_nan(x.scales, x.rows * blocks) || holds_e4m3_nan(x.codes, x.rows * w.k)) {
    plain_ops().linear_fp4(x, w, range, out);  // NaN spreads as the definition says
    return;
  }
  for (std::size_t m = 0; m < x.rows; m += kRowsTogether) {
    const std::size_t rows = std::min(kRowsTogether, x.rows - m);
    const std::uint64_t name = rows == x.rows ? x.name : 0;
    add_rows({x.codes + m * w.k, x.scales + m * blocks, rows, w.k, name}, w, range, out + m * w.n);
  }
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
