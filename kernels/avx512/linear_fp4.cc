// FP4 linears with AVX-512 VNNI (docs/numerics.md 1). An activation block is v * 2^(shift-9) with integers v
// in balanced base-256 digits, weights are looked up as half-units plus 12 (unsigned, as dpbusd wants them);
// every block's dot product is an exact 32-bit integer. Scales and sums then follow the contract literally,
// subnormals included.
#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/blocks.h"

namespace dsv41::avx512 {
namespace {

/// Sixteen blocks of an activation row. Four blocks share 128 bytes per digit, in the order of the 128-bit
/// parts of 64 weight bytes: even elements of the four blocks, then odd elements.
struct alignas(64) Group {
  float unit[kGroup];               // 2^(shift-10): half-units of weights included
  float scale[kGroup];              // s_x
  std::int32_t correction[kGroup];  // minus 12 times the block's sum of v
  std::int8_t digits[kGroup / 4][3][128];
  std::uint8_t wide[kGroup];  // a third digit is needed
  bool any_wide;
};

struct Digits {
  std::size_t blocks = 0;  // of a row, which is repeated `copies` times:
  std::size_t groups = 0;  // blocks beyond blocks * copies of the last group have digits and scale 0
  std::size_t copies = 1;
  std::vector<Group> storage;
  PreparedName name;  // of the QuantizedRows

  void set(const QuantizedRows& x, std::size_t copies_of_rows);
  const Group* row(std::size_t index) const { return storage.data() + index * groups; }
};

/// Even and odd bytes of 32 values, sixteen in each vector.
inline void store_split(std::int8_t* to, __m512i first, __m512i second) {
  const __m128i a = _mm512_cvtepi32_epi8(first), b = _mm512_cvtepi32_epi8(second);
  const __m128i low_bytes = _mm_set1_epi16(0x00FF);
  const __m128i even = _mm_packus_epi16(_mm_and_si128(a, low_bytes), _mm_and_si128(b, low_bytes));
  const __m128i odd = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), even);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 64), odd);
}

void set_block(Group& group, std::size_t b, const std::uint8_t* codes) {
  __m512i v[2] = {integers_of(codes), integers_of(codes + 16)};
  const auto any = static_cast<std::uint32_t>(_mm512_reduce_or_epi32(_mm512_or_si512(v[0], v[1])));
  const int shift = any != 0 ? std::countr_zero(any) : 0;
  const __m512i count = _mm512_set1_epi32(shift);
  __m512i digit[3][2];
  for (std::size_t i = 0; i < 2; ++i) {
    v[i] = _mm512_srav_epi32(v[i], count);
    digit[0][i] = _mm512_srai_epi32(_mm512_slli_epi32(v[i], 24), 24);
    const __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(v[i], digit[0][i]), 8);
    digit[1][i] = _mm512_srai_epi32(_mm512_slli_epi32(above, 24), 24);
    digit[2][i] = _mm512_srai_epi32(_mm512_sub_epi32(above, digit[1][i]), 8);
  }
  group.wide[b] = _mm512_reduce_or_epi32(_mm512_or_si512(digit[2][0], digit[2][1])) != 0;
  group.any_wide |= group.wide[b] != 0;
  group.correction[b] = -12 * _mm512_reduce_add_epi32(_mm512_add_epi32(v[0], v[1]));
  group.unit[b] = std::bit_cast<float>((127u - 10u + static_cast<std::uint32_t>(shift)) << 23);
  for (std::size_t d = 0; d < 3; ++d)
    store_split(group.digits[b / 4][d] + b % 4 * 16, digit[d][0], digit[d][1]);
}

void Digits::set(const QuantizedRows& x, std::size_t copies_of_rows) {
  if (name.is(copies == copies_of_rows ? x.name : 0)) return;
  blocks = x.k / kBlock;
  copies = copies_of_rows;
  groups = ceil_div(blocks * copies, kGroup);
  if (storage.size() < x.rows * groups) storage.resize(x.rows * groups);
  for (std::size_t row = 0; row < x.rows; ++row) {
    for (std::size_t g = 0; g < groups; ++g) {
      Group& group = storage[row * groups + g];
      if ((g + 1) * kGroup > blocks * copies) std::memset(static_cast<void*>(&group), 0, sizeof(Group));
      group.any_wide = false;
      for (std::size_t b = g * kGroup; b < std::min((g + 1) * kGroup, blocks * copies); ++b) {
        set_block(group, b % kGroup, x.codes + row * x.k + b % blocks * kBlock);
        group.scale[b % kGroup] = decode_e8m0(x.scales[row * blocks + b % blocks]);
      }
    }
  }
  name.set(x.name);
}

/// Weights of 64 code bytes in half-units plus 12: even elements, odd elements.
struct Unpacked {
  __m512i even, odd;
};
inline Unpacked unpack(__m512i codes) {
  alignas(16) static constexpr std::uint8_t kHalvesPlus12[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                                 12, 11, 10, 9,  8,  6,  4,  0};
  const __m512i table = _mm512_broadcast_i32x4(load16(kHalvesPlus12));
  const __m512i upper = _mm512_srli_epi16(codes, 4);
#if defined(DSV41_AVX512_VBMI)
  // Six bits choose from 64 bytes, which repeat the table: the two bits above a half byte do not matter.
  return {_mm512_permutexvar_epi8(codes, table), _mm512_permutexvar_epi8(upper, table)};
#else
  const __m512i half_byte = _mm512_set1_epi8(15);
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(codes, half_byte)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(upper, half_byte))};
#endif
}

/// Digit sums of four blocks, four dwords each.
inline __m512i digit_sum(const Unpacked& w, const std::int8_t* digits) {
  return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w.even, load(digits)), w.odd,
                             load(digits + 64));
}

// ---- a few rows: each weight row is read once, in order, sixteen blocks at a time
// ----------------------------

constexpr std::size_t kFewRows = 2;  // the digits of more do not fit the first-level cache

// Memory must not rest while the terms of a tile are added up: this part of the weights is fetched ahead
// while weights are read, the rest meanwhile.
constexpr std::size_t kFetchedEighths = 7;
constexpr std::size_t kScalesAhead = 1024;  // bytes; a tile's at once would hold up the codes

/// The weights of a group: four blocks in each.
struct GroupWeights {
  Unpacked quads[kGroup / 4];
  __m512 scales;
};

template <bool Wide>
inline __m512i group_dots(const Group& x, const GroupWeights& w) {
  __m512i dots[4];
#pragma GCC unroll 4
  for (std::size_t q = 0; q < 4; ++q) {
    const __m512i high = digit_sum(w.quads[q], x.digits[q][1]);
    dots[q] = _mm512_add_epi32(digit_sum(w.quads[q], x.digits[q][0]), _mm512_slli_epi32(high, 8));
    if constexpr (Wide)
      dots[q] = _mm512_add_epi32(dots[q], _mm512_slli_epi32(digit_sum(w.quads[q], x.digits[q][2]), 16));
  }
  // Part l of the sums holds blocks l, 4 + l, 8 + l and 12 + l.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i sums = _mm512_permutexvar_epi32(order, sum_quads(dots[0], dots[1], dots[2], dots[3]));
  return _mm512_add_epi32(sums, load(x.correction));
}

inline void group_terms(const Group& x, const GroupWeights& w, float* terms) {
  const __m512i dots = x.any_wide ? group_dots<true>(x, w) : group_dots<false>(x, w);
  const __m512 d = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), _mm512_loadu_ps(x.unit));
  _mm512_storeu_ps(terms, _mm512_mul_ps(d, _mm512_mul_ps(_mm512_loadu_ps(x.scale), w.scales)));
}

/// Weight rows that are read one after another.
struct Stream {
  const std::uint8_t *codes, *scales;
  const std::uint8_t* ahead;    // fetched next
  __m128i largest_scales = {};  // of all codes that were read: 255 is NaN

  /// The next `blocks` blocks; nothing beyond them is read, and the others are zero.
  GroupWeights next(std::size_t blocks) {
    GroupWeights w;
    prefetch_bytes(ahead, blocks * 2 * kFetchedEighths);
    prefetch_bytes(scales + kScalesAhead, 1);
#pragma GCC unroll 4
    for (std::size_t q = 0; q < 4; ++q) {
      const std::uint8_t* const from = codes + q * 64;
      w.quads[q] = unpack(blocks == kGroup
                              ? load(from)
                              : load_part(from, first_bytes(blocks * 16 - std::min(blocks * 16, q * 64))));
    }
    const __m128i scale_codes =
        blocks == kGroup ? load16(scales)
                         : _mm_maskz_loadu_epi8(static_cast<__mmask16>(first_bytes(blocks)), scales);
    largest_scales = _mm_max_epu8(largest_scales, scale_codes);
    w.scales = scales_of(scale_codes);
    codes += blocks * 16, scales += blocks, ahead += blocks * 2 * kFetchedEighths;
    return w;
  }
};

/// The scaled block products of the next `blocks` blocks, which are one weight row, or two of them where the
/// activations are there twice, with `rows` activation rows: fp32, from terms + m * distance on for
/// activation row m.
DSV41_OUT_OF_LINE void row_terms(const Digits& x, std::size_t rows, Stream& weights, std::size_t blocks,
                                 float* terms, std::size_t distance) {
  Stream stream = weights;
  const std::size_t whole = blocks / kGroup;
  if (rows == 1) {  // by far the most frequent case: a loop less
    const Group* const row = x.row(0);
    for (std::size_t g = 0; g < whole; ++g) group_terms(row[g], stream.next(kGroup), terms + g * kGroup);
  } else {
    for (std::size_t g = 0; g < whole; ++g) {
      const GroupWeights w = stream.next(kGroup);
      for (std::size_t m = 0; m < rows; ++m) group_terms(x.row(m)[g], w, terms + m * distance + g * kGroup);
    }
  }
  if (whole * kGroup != blocks) {
    const GroupWeights w = stream.next(blocks % kGroup);
    for (std::size_t m = 0; m < rows; ++m)
      group_terms(x.row(m)[whole], w, terms + m * distance + whole * kGroup);
  }
  weights = stream;
}

/// One lane per weight row: the terms of rows 0..15 for `count` blocks, added in ascending order; terms
/// [16][stride], readable up to a multiple of four blocks. Weights are fetched from `ahead` on.
__m512 add_terms(const float* terms, std::size_t stride, std::size_t count, const std::uint8_t* ahead) {
  constexpr std::size_t kFetched = (8 - kFetchedEighths) * kLanes * 2;  // bytes for a block
  __m512 sum = _mm512_setzero_ps();
  const std::uint8_t* rows[kLanes];
  for (std::size_t r = 0; r < kLanes; ++r)
    rows[r] = reinterpret_cast<const std::uint8_t*>(terms + r * stride);
  for (std::size_t b = 0; b < count; b += 4) {
    __m512i blocks[4];
    transpose_dwords(rows, b * sizeof(float), blocks);
    prefetch_bytes(ahead + b * kFetched, 4 * kFetched);
    for (std::size_t i = 0; i < 4 && b + i < count; ++i)
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(blocks[i]));
  }
  return sum;
}

/// Where rows end in the middle of a group, two of them are whole groups again.
constexpr std::size_t copies_for(std::size_t blocks) {
  return blocks % kGroup == kGroup / 2 ? 2 : 1;
}

void few_rows(const QuantizedRows& rows, const Digits& x, const Fp4Matrix& w, Range range,
              std::vector<float>& terms, BFloat16* out) {
  const std::size_t stride = x.copies == 1 ? x.groups * kGroup : x.blocks;
  const std::size_t distance = kLanes * stride + kGroup;  // a single last row may fill half a group more
  terms.resize(std::max(terms.size(), rows.rows * distance));
  // The terms of a tile are behind the weights by what is fetched while they are added up.
  const std::size_t added_up = x.blocks * kLanes * (8 - kFetchedEighths) * 2;
  for (std::size_t n = range.begin; n < range.end; n += kLanes) {
    const std::size_t count = std::min(kLanes, range.end - n);
    Stream weights{w.codes + n * (w.k / 2), w.scales + n * x.blocks, nullptr};
    weights.ahead = weights.codes + kPrefetch + added_up;
    for (std::size_t r = 0; r < count; r += x.copies)
      row_terms(x, rows.rows, weights, std::min(x.copies, count - r) * x.blocks, terms.data() + r * stride,
                distance);
    if (_mm_movemask_epi8(_mm_cmpeq_epi8(weights.largest_scales, _mm_set1_epi8(-1))) != 0) {
      plain_ops().linear_fp4(rows, w, {n, n + count}, out);  // NaN spreads as the definition says
      continue;
    }
    for (std::size_t m = 0; m < rows.rows; ++m)
      store_bfloat16(out + m * w.n + n, count,
                     add_terms(terms.data() + m * distance, stride, x.blocks, weights.ahead));
  }
}

// ---- many rows: a tile of 32 features is decoded once per chunk of K, one lane per feature
// ------------------------

constexpr std::size_t kVectors = 2;
constexpr std::size_t kTile = kVectors * kLanes;
constexpr std::size_t kChunk = 16;  // blocks: 16 KiB of decoded weights

struct Tile {
  alignas(64) std::uint8_t
      weights[kChunk][8][kVectors][64];  // [block][dword step][vector]: four k of sixteen features
  alignas(64) float scales[kChunk][kVectors][kLanes];
};

void decode_vector(const Fp4Matrix& w, const std::size_t (&features)[kLanes], std::size_t first,
                   std::size_t count, std::size_t vector, Tile& tile) {
  const std::uint8_t *codes[kLanes], *scales[kLanes];
  for (std::size_t r = 0; r < kLanes; ++r) {
    codes[r] = w.codes + features[r] * (w.k / 2) + first * 16;
    scales[r] = w.scales + features[r] * (w.k / kBlock) + first;
  }
  transpose_scales(scales, count, tile.scales[0][vector], kTile);
  for (std::size_t b = 0; b < count; ++b) {
    prefetch_rows<kChunk * 16>(codes, b, kChunk);
    __m512i dwords[4];
    transpose_dwords(codes, b * 16, dwords);
    for (std::size_t j = 0; j < 4; ++j) {
      const Unpacked bytes = unpack(dwords[j]);
      store(tile.weights[b][j][vector], bytes.even);
      store(tile.weights[b][4 + j][vector], bytes.odd);
    }
  }
}

/// The sums of all rows and vectors must be registers, hence the unrolling: GCC would index them in memory.
/// `Rows` activation rows, row_stride bytes apart, times the decoded chunk; acc [Rows][kTile] keeps the sums.
template <std::size_t Rows>
DSV41_OUT_OF_LINE void rows_times_tile(const Group* x, std::size_t row_stride, std::size_t count,
                                       const Tile& tile, float* acc) {
  const auto row = [&](const auto* of_first, std::size_t m) {
    return reinterpret_cast<decltype(of_first)>(reinterpret_cast<const char*>(of_first) + m * row_stride);
  };
  for (std::size_t b = 0; b < count; ++b) {
    const std::int8_t* const digits = x->digits[b / 4][0] + b % 4 * 16;
    const std::uint8_t* const weights = tile.weights[b][0][0];
    __m512i low[Rows][kVectors], high[Rows][kVectors];
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m)
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        low[m][v] = _mm512_set1_epi32(*row(&x->correction[b], m));
        high[m][v] = _mm512_setzero_si512();
      }
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      const std::size_t at = j / 4 * 64 + j % 4 * 4;
      const __m512i w0 = load(weights + j * 128), w1 = load(weights + j * 128 + 64);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m512i low_digit = broadcast_dword(row(digits, m) + at);
        low[m][0] = _mm512_dpbusd_epi32(low[m][0], w0, low_digit);
        low[m][1] = _mm512_dpbusd_epi32(low[m][1], w1, low_digit);
        const __m512i high_digit = broadcast_dword(row(digits, m) + at + 128);
        high[m][0] = _mm512_dpbusd_epi32(high[m][0], w0, high_digit);
        high[m][1] = _mm512_dpbusd_epi32(high[m][1], w1, high_digit);
      }
    }
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m512 unit = _mm512_set1_ps(*row(&x->unit[b], m)), scale = _mm512_set1_ps(*row(&x->scale[b], m));
      const bool wide = *row(&x->wide[b], m) != 0;
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        __m512i dot = _mm512_add_epi32(low[m][v], _mm512_slli_epi32(high[m][v], 8));
        if (wide) [[unlikely]] {
          __m512i top = _mm512_setzero_si512();
          for (std::size_t j = 0; j < 8; ++j)
            top = _mm512_dpbusd_epi32(top, load(weights + j * 128 + v * 64),
                                      broadcast_dword(row(digits, m) + 256 + j / 4 * 64 + j % 4 * 4));
          dot = _mm512_add_epi32(dot, _mm512_slli_epi32(top, 16));
        }
        const __m512 d = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), unit);
        const __m512 s = _mm512_mul_ps(scale, _mm512_loadu_ps(tile.scales[b][v]));
        float* const lanes = acc + m * kTile + v * kLanes;
        _mm512_storeu_ps(lanes, _mm512_add_ps(_mm512_loadu_ps(lanes), _mm512_mul_ps(d, s)));
      }
    }
  }
}

void many_rows(const QuantizedRows& rows, const Digits& x, const Fp4Matrix& w, Range range,
               std::vector<float>& acc, BFloat16* out) {
  static thread_local Tile tile;
  acc.resize(std::max(acc.size(), rows.rows * kTile));
  for (std::size_t n = range.begin; n < range.end; n += kTile) {
    const std::size_t count = std::min(kTile, range.end - n);
    if (holds_e8m0_nan(w.scales + n * x.blocks, count * x.blocks)) {
      plain_ops().linear_fp4(rows, w, {n, n + count}, out);
      continue;
    }
    std::fill_n(acc.begin(), rows.rows * kTile, 0.0f);
    for (std::size_t first = 0; first < x.blocks; first += kChunk) {
      const std::size_t blocks = std::min(kChunk, x.blocks - first), stride = x.groups * sizeof(Group);
      for (std::size_t v = 0; v < kVectors; ++v) {
        std::size_t features[kLanes];  // lanes beyond the range repeat its last feature and are not stored
        for (std::size_t r = 0; r < kLanes; ++r) features[r] = std::min(n + v * kLanes + r, range.end - 1);
        decode_vector(w, features, first, blocks, v, tile);
      }
      const std::size_t group = first / kGroup;  // a chunk is a group
      std::size_t m = 0;
      for (; m + 4 <= rows.rows; m += 4)
        rows_times_tile<4>(x.row(m) + group, stride, blocks, tile, acc.data() + m * kTile);
      const Group* const left = x.row(m) + group;
      float* const left_acc = acc.data() + m * kTile;
      switch (rows.rows - m) {
        case 3:
          rows_times_tile<3>(left, stride, blocks, tile, left_acc);
          break;
        case 2:
          rows_times_tile<2>(left, stride, blocks, tile, left_acc);
          break;
        case 1:
          rows_times_tile<1>(left, stride, blocks, tile, left_acc);
      }
    }
    for (std::size_t m = 0; m < rows.rows; ++m)
      for (std::size_t f = 0; f < count; ++f) out[m * w.n + n + f] = to_bfloat16(acc[m * kTile + f]);
  }
}
static_assert(kChunk == kGroup);

}  // namespace

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out) {
  if (x.rows == 0 || range.size() == 0) return;
  if (holds_e8m0_nan(x.scales, x.rows * (w.k / kBlock)) || holds_e4m3_nan(x.codes, x.rows * w.k)) {
    plain_ops().linear_fp4(x, w, range, out);
    return;
  }
  static thread_local Digits digits;
  static thread_local std::vector<float> sums;
  if (x.rows <= kFewRows) {
    digits.set({x.codes, x.scales, x.rows, w.k, x.name}, copies_for(w.k / kBlock));
    few_rows(x, digits, w, range, sums, out);
  } else {
    digits.set({x.codes, x.scales, x.rows, w.k, x.name}, 1);
    many_rows(x, digits, w, range, sums, out);
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
