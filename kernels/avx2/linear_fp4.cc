// FP4 linears with AVX2 (docs/numerics.md 1). An activation block is v * 2^(shift-9) with integers v in
// balanced base-256 digits, weights are looked up as half-units plus 12 (unsigned, as maddubs wants them);
// every block's dot product is an exact 32-bit integer. Scales and sums then follow the contract literally,
// subnormals included.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/avx2/avx2.h"

#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/fp4_codes.h"

namespace dsv41::avx2 {
namespace {

/// Eight blocks of an activation row. Two blocks share 64 bytes per digit, in the order of the two 128-bit
/// halves of 32 weight bytes: even elements of both blocks, then odd elements of both.
struct alignas(32) Group {
  float unit[kGroup];               // 2^(shift-10): half-units of weights included
  float scale[kGroup];              // s_x
  std::int32_t correction[kGroup];  // minus 12 times the block's sum of v
  std::int32_t start[3][kGroup];    // per digit two int16: minus 12 times the digits a half-lane meets
  std::int8_t digits[kGroup / 2][3][64];
  std::uint8_t wide[kGroup];  // a third digit is needed
  bool any_wide;
};

struct Digits {
  std::size_t blocks = 0, groups = 0;  // blocks beyond `blocks` of the last group have digits and scale 0
  std::vector<Group> storage;

  void set(const QuantizedRows& x);
  const Group* row(std::size_t index) const { return storage.data() + index * groups; }
};

inline std::int32_t start_of(__m256i digits) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(12), digits);
  __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xB1));
  return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sum));
}

void set_block(Group& group, std::size_t b, const std::uint8_t* codes) {
  __m256i v[4];
  for (std::size_t i = 0; i < 4; ++i) v[i] = integers_of(codes + 8 * i);
  const std::uint32_t any =
      or_lanes(_mm256_or_si256(_mm256_or_si256(v[0], v[1]), _mm256_or_si256(v[2], v[3])));
  const int shift = any != 0 ? std::countr_zero(any) : 0;
  const __m128i count = _mm_cvtsi32_si128(shift);
  __m256i digit[3][4];
  __m256i rest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < 4; ++i) {
    v[i] = _mm256_sra_epi32(v[i], count);
    digit[0][i] = low_digit(v[i]);
    const __m256i above = above_digit(v[i], digit[0][i]);
    digit[1][i] = low_digit(above);
    digit[2][i] = above_digit(above, digit[1][i]);
    rest = _mm256_or_si256(rest, digit[2][i]);
  }
  group.wide[b] = _mm256_testz_si256(rest, rest) == 0;
  group.any_wide |= group.wide[b] != 0;
  group.correction[b] =
      -12 * sum_lanes(_mm256_add_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3])));
  group.unit[b] = std::bit_cast<float>((127u - 10u + static_cast<std::uint32_t>(shift)) << 23);
  for (std::size_t d = 0; d < 3; ++d) {
    const __m256i bytes = even_odd_bytes(digit[d]);
    std::int8_t* const to = group.digits[b / 2][d] + b % 2 * 16;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32), _mm256_extracti128_si256(bytes, 1));
    group.start[d][b] = start_of(bytes);
  }
}

void Digits::set(const QuantizedRows& x) {
  blocks = x.k / kBlock;
  groups = ceil_div(blocks, kGroup);
  if (storage.size() < x.rows * groups) storage.resize(x.rows * groups);
  for (std::size_t row = 0; row < x.rows; ++row) {
    for (std::size_t g = 0; g < groups; ++g) {
      Group& group = storage[row * groups + g];
      if ((g + 1) * kGroup > blocks) std::memset(static_cast<void*>(&group), 0, sizeof(Group));
      group.any_wide = false;
      for (std::size_t b = g * kGroup; b < std::min((g + 1) * kGroup, blocks); ++b) {
        set_block(group, b % kGroup, x.codes + row * x.k + b * kBlock);
        group.scale[b % kGroup] = decode_e8m0(x.scales[row * blocks + b]);
      }
    }
  }
}

// ---- many rows: a tile of 16 features is decoded once per chunk of K, one lane per feature
// ------------------------

constexpr std::size_t kTile = 16;
constexpr std::size_t kChunk = 32;  // blocks: 16 KiB of decoded weights

struct Tile {
  alignas(32) std::uint8_t
      weights[kChunk][8][kTile / kLanes][32];  // [block][dword step][octet]: four k of eight features
  alignas(32) float scales[kChunk][kTile / kLanes][kLanes];
};

void decode_octet(const Fp4Matrix& w, const std::size_t (&features)[kLanes], std::size_t first,
                  std::size_t count, std::size_t octet, Tile& tile) {
  const std::uint8_t *codes[kLanes], *scales[kLanes];
  for (std::size_t r = 0; r < kLanes; ++r) {
    codes[r] = w.codes + features[r] * (w.k / 2) + first * 16;
    scales[r] = w.scales + features[r] * (w.k / kBlock) + first;
  }
  transpose_scales(scales, count, tile.scales[0][octet], kTile);
  for (std::size_t b = count; b % kGroup != 0; ++b)
    std::memset(tile.scales[b][octet], 0, sizeof tile.scales[b][octet]);
  for (std::size_t b = 0; b < count; ++b) {
    __m256i dwords[4];
    transpose_dwords(codes, b * 16, dwords);
    for (std::size_t j = 0; j < 4; ++j) {
      const Unpacked bytes = unpack(dwords[j]);
      store(tile.weights[b][j][octet], bytes.even);
      store(tile.weights[b][4 + j][octet], bytes.odd);
    }
  }
}

/// The sums of all rows and vectors must be registers, hence the unrolling: GCC would index them in memory.
/// `Rows` activation rows, row_stride bytes apart, times the decoded chunk; acc [Rows][kTile] keeps the sums
/// between chunks.
template <std::size_t Rows>
DSV41_OUT_OF_LINE void rows_times_tile(const Group* x, std::size_t row_stride, std::size_t groups,
                                       const Tile& tile, float* acc) {
  const __m256i ones = _mm256_set1_epi16(1), base = _mm256_set1_epi16(256);
  __m256 sum[Rows][2];
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m)
#pragma GCC unroll 2
    for (std::size_t o = 0; o < 2; ++o) sum[m][o] = _mm256_loadu_ps(acc + m * kTile + o * kLanes);
  const std::uint8_t* weights = tile.weights[0][0][0];
  const float* scales = tile.scales[0][0];
  for (std::size_t b = 0; b < groups * kGroup; ++b, weights += sizeof tile.weights[0], scales += kTile) {
    const Group* const group = x + b / kGroup;
    const std::size_t inside = b % kGroup;
    const std::int8_t* const digits = group->digits[inside / 2][0] + inside % 2 * 16;
    const auto row = [&](const auto* first, std::size_t m) {
      return reinterpret_cast<decltype(first)>(reinterpret_cast<const char*>(first) + m * row_stride);
    };
    __m256i low[Rows][2], high[Rows][2];
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m)
#pragma GCC unroll 2
      for (std::size_t o = 0; o < 2; ++o) {
        low[m][o] = _mm256_set1_epi32(*row(&group->start[0][inside], m));
        high[m][o] = _mm256_set1_epi32(*row(&group->start[1][inside], m));
      }
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      const std::size_t at = j / 4 * 32 + j % 4 * 4;
      const __m256i w0 = load(weights + j * 64), w1 = load(weights + j * 64 + 32);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256i low_digit = broadcast_dword(row(digits, m) + at);
        low[m][0] = _mm256_add_epi16(low[m][0], _mm256_maddubs_epi16(w0, low_digit));
        low[m][1] = _mm256_add_epi16(low[m][1], _mm256_maddubs_epi16(w1, low_digit));
        const __m256i high_digit = broadcast_dword(row(digits, m) + at + 64);
        high[m][0] = _mm256_add_epi16(high[m][0], _mm256_maddubs_epi16(w0, high_digit));
        high[m][1] = _mm256_add_epi16(high[m][1], _mm256_maddubs_epi16(w1, high_digit));
        keep(low[m][0]), keep(low[m][1]), keep(high[m][0]), keep(high[m][1]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256 unit = _mm256_set1_ps(*row(&group->unit[inside], m));
      const __m256 scale = _mm256_set1_ps(*row(&group->scale[inside], m));
      __m256i dot[2];
#pragma GCC unroll 2
      for (std::size_t o = 0; o < 2; ++o)
        dot[o] = _mm256_add_epi32(_mm256_madd_epi16(low[m][o], ones), _mm256_madd_epi16(high[m][o], base));
      if (*row(&group->wide[inside], m) != 0) [[unlikely]] {
#pragma GCC unroll 2
        for (std::size_t o = 0; o < 2; ++o) {
          __m256i top = _mm256_set1_epi32(*row(&group->start[2][inside], m));
          for (std::size_t j = 0; j < 8; ++j)
            top = _mm256_add_epi16(
                top, _mm256_maddubs_epi16(load(weights + j * 64 + o * 32),
                                          broadcast_dword(row(digits, m) + 128 + j / 4 * 32 + j % 4 * 4)));
          dot[o] = _mm256_add_epi32(dot[o], _mm256_slli_epi32(_mm256_madd_epi16(top, ones), 16));
        }
      }
#pragma GCC unroll 2
      for (std::size_t o = 0; o < 2; ++o) {
        const __m256 d = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[o]), unit);
        const __m256 s = _mm256_mul_ps(scale, _mm256_load_ps(scales + o * kLanes));
        sum[m][o] = _mm256_add_ps(sum[m][o], _mm256_mul_ps(d, s));
      }
    }
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < Rows; ++m)
#pragma GCC unroll 2
    for (std::size_t o = 0; o < 2; ++o) _mm256_storeu_ps(acc + m * kTile + o * kLanes, sum[m][o]);
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
      const std::size_t blocks = std::min(kChunk, x.blocks - first);
      for (std::size_t o = 0; o < 2; ++o) {
        std::size_t features[kLanes];  // lanes beyond the range repeat its last feature and are not stored
        for (std::size_t r = 0; r < kLanes; ++r) features[r] = std::min(n + o * kLanes + r, range.end - 1);
        decode_octet(w, features, first, blocks, o, tile);
      }
      const std::size_t groups = ceil_div(blocks, kGroup), stride = x.groups * sizeof(Group);
      std::size_t m = 0;
      for (; m + 2 <= rows.rows; m += 2)
        rows_times_tile<2>(x.row(m) + first / kGroup, stride, groups, tile, acc.data() + m * kTile);
      if (m < rows.rows)
        rows_times_tile<1>(x.row(m) + first / kGroup, stride, groups, tile, acc.data() + m * kTile);
    }
    for (std::size_t m = 0; m < rows.rows; ++m)
      for (std::size_t f = 0; f < count; ++f) out[m * w.n + n + f] = to_bfloat16(acc[m * kTile + f]);
  }
}

}  // namespace

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out) {
  if (x.rows == 0 || range.size() == 0) return;
  const std::size_t blocks = w.k / kBlock;
  if (holds_e8m0_nan(x.scales, x.rows * blocks) || holds_e4m3_nan(x.codes, x.rows * w.k)) {
    plain_ops().linear_fp4(x, w, range, out);  // NaN spreads as the definition says
    return;
  }
  if (x.rows <= kFewFp4Rows && range.size() >= kLanes) {
    linear_fp4_few(x, w, range, out);
    return;
  }
  static thread_local Digits digits;
  static thread_local std::vector<float> sums;
  digits.set({x.codes, x.scales, x.rows, w.k});
  many_rows(x, digits, w, range, sums, out);
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
