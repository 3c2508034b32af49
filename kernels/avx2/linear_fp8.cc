// FP8 linears with AVX2 (docs/numerics.md 1). Weights become int16 in units of 2^-6; the few codes below 2^-3
// have a remainder that a correction adds. An activation block is v * 2^(shift-9) with integers v: one int16
// limb where the block's dot product fits 32 bits, else two that are combined in fp64. Scales and sums follow
// the contract literally.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/avx2/avx2.h"
#include "kernels/fp8_words.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/fp8_codes.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kFewRows = 12;  // more share tiles of decoded weights
constexpr std::int32_t kLimb = 4096;  // base of the second limb

/// Eight blocks of an activation row. The 32 values of a block lie as 0-7, 16-23, 8-15, 24-31: what unpacking
/// the two halves of 32 code bytes gives.
struct alignas(32) Group {
  std::int16_t limbs[kGroup][2][kBlock];
  float unit[kGroup];        // 2^(shift-15)
  float scale[kGroup];       // s_x
  std::uint8_t two[kGroup];  // the second limb is in use
};

struct Limbs {
  std::size_t blocks = 0, groups = 0;  // blocks beyond `blocks` of the last group are zero
  std::vector<Group> storage;

  void set(const QuantizedRows& x);
  const Group* row(std::size_t index) const { return storage.data() + index * groups; }
};

void set_block(Group& group, std::size_t b, const std::uint8_t* codes) {
  __m256i v[4];
  for (std::size_t i = 0; i < 4; ++i) v[i] = integers_of(codes + 8 * i);
  const std::uint32_t any =
      or_lanes(_mm256_or_si256(_mm256_or_si256(v[0], v[1]), _mm256_or_si256(v[2], v[3])));
  const int shift = any != 0 ? std::countr_zero(any) : 0;
  const __m128i count = _mm_cvtsi32_si128(shift);
  __m256i sum = _mm256_setzero_si256(), bits = _mm256_setzero_si256();
  for (__m256i& value : v) {
    value = _mm256_sra_epi32(value, count);
    const __m256i magnitude = _mm256_abs_epi32(value);
    sum = _mm256_add_epi32(sum, magnitude);
    bits = _mm256_or_si256(bits, magnitude);
  }
  group.unit[b] = std::bit_cast<float>((127u - 15u + static_cast<std::uint32_t>(shift)) << 23);
  group.two[b] = sum_lanes(sum) > fp8_words::kLargestSum || or_lanes(bits) > 32767;
  __m256i low[4], high[4];
  for (std::size_t i = 0; i < 4; ++i) {
    low[i] = v[i], high[i] = _mm256_setzero_si256();
    if (group.two[b] != 0) {
      const __m256i half = _mm256_set1_epi32(kLimb / 2);
      low[i] = _mm256_sub_epi32(_mm256_and_si256(_mm256_add_epi32(v[i], half), _mm256_set1_epi32(kLimb - 1)),
                                half);
      high[i] = _mm256_srai_epi32(_mm256_sub_epi32(v[i], low[i]), 12);
    }
  }
  store_words(group.limbs[b][0], low);
  store_words(group.limbs[b][1], high);
}

void Limbs::set(const QuantizedRows& x) {
  blocks = x.k / kBlock;
  groups = ceil_div(blocks, kGroup);
  if (storage.size() < x.rows * groups) storage.resize(x.rows * groups);
  for (std::size_t row = 0; row < x.rows; ++row) {
    for (std::size_t g = 0; g < groups; ++g) {
      Group& group = storage[row * groups + g];
      if ((g + 1) * kGroup > blocks) std::memset(static_cast<void*>(&group), 0, sizeof(Group));
      for (std::size_t b = g * kGroup; b < std::min((g + 1) * kGroup, blocks); ++b) {
        set_block(group, b % kGroup, x.codes + row * x.k + b * kBlock);
        group.scale[b % kGroup] = decode_e8m0(x.scales[row * blocks + b]);
      }
    }
  }
}

// ---- many rows: a tile of 16 features is decoded once per chunk of K, one lane per feature
// ------------------------

constexpr std::size_t kOctets = 2;
constexpr std::size_t kTile = kOctets * kLanes;
constexpr std::size_t kChunk = 16;  // blocks: 16 KiB of decoded weights
constexpr std::size_t kSteps = kBlock / 2;

struct Remainder {
  __m256i values;  // int16 pairs as in Tile::weights, units of 2^-9
  std::size_t step;
};

struct Tile {
  alignas(32) std::int16_t
      weights[kChunk][kSteps][kOctets][16];  // [block][pair of k][octet]: two k of eight features
  alignas(32) float scales[kChunk][kOctets][kLanes];
  alignas(32) Remainder remainders[kChunk * kOctets * kSteps];
  std::size_t remainder_begin[kChunk * kOctets + 1];  // of each block and octet
};

/// False when a weight is NaN.
bool decode_tile(const Fp8Matrix& w, std::size_t n, std::size_t end, std::size_t first, std::size_t count,
                 Tile& tile) {
  const std::uint8_t *codes[kOctets][kLanes], *scales[kLanes];
  for (std::size_t o = 0; o < kOctets; ++o) {
    for (std::size_t r = 0; r < kLanes; ++r) {
      const std::size_t feature =
          std::min(n + o * kLanes + r, end - 1);  // lanes beyond the range repeat its last one
      codes[o][r] = w.codes + feature * w.k + first * kBlock;
      scales[r] = w.scales + feature / kBlock * (w.k / kBlock) + first;
    }
    transpose_scales(scales, count, tile.scales[0][o], kTile);
  }
  std::size_t remainders = 0;
  // Brings the codes of two k beside each other for every feature: unpacking then gives pairs of k.
  const __m256i pairs = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8,
                                         9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (std::size_t b = 0; b < count; ++b) {
    for (std::size_t o = 0; o < kOctets; ++o) {
      tile.remainder_begin[b * kOctets + o] = remainders;
      for (std::size_t half = 0; half < 2; ++half) {
        __m256i dwords[4];
        transpose_dwords(codes[o], b * kBlock + half * 16, dwords);
        for (std::size_t j = 0; j < 4; ++j) {
          const __m256i block = _mm256_shuffle_epi8(dwords[j], pairs);
          const Words words = words_of(block);
          const std::size_t step = place_of(half * 16 + j * 4) / 2;
          store(tile.weights[b][step][o], words.low);
          store(tile.weights[b][step + 1][o], words.high);
          std::uint32_t rare = rare_codes(block);
          if (rare == 0) continue;
          alignas(32) std::uint8_t bytes[32];
          alignas(32) std::int16_t values[2][16] = {};
          bool present[2] = {};
          store(bytes, block);
          for (; rare != 0; rare &= rare - 1) {
            const auto i = static_cast<std::size_t>(std::countr_zero(rare));
            if ((bytes[i] & 0x7F) == 0x7F) return false;
            const std::int32_t value = remainder_of(bytes[i]);
            values[i / 8 % 2][i / 16 * 8 + i % 8] = static_cast<std::int16_t>(value);
            present[i / 8 % 2] |= value != 0;
          }
          for (std::size_t side = 0; side < 2; ++side)
            if (present[side]) tile.remainders[remainders++] = {load(values[side]), step + side};
        }
      }
    }
  }
  tile.remainder_begin[count * kOctets] = remainders;
  return true;
}

inline __m256i dot_octet(const std::int16_t* weights, const std::int16_t* x) {
  __m256i sum = _mm256_setzero_si256();
  for (std::size_t p = 0; p < kSteps; ++p)
    sum = _mm256_add_epi32(sum,
                           _mm256_madd_epi16(load(weights + p * kOctets * 16), broadcast_dword(x + 2 * p)));
  return sum;
}

/// Eight int32 times a power of two, in fp64.
struct Wide {
  __m256d low, high;
};
inline Wide widen(__m256i value, double factor) {
  const __m256d scale = _mm256_set1_pd(factor);
  return {_mm256_mul_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(value)), scale),
          _mm256_mul_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(value, 1)), scale)};
}
inline Wide add(const Wide& a, const Wide& b) {
  return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
}

/// RN32 of the block's dot product in units of 2^-6 * 2^(shift-9), with the second limb and the remainders:
/// below 2^53 in units of 2^-9, so that fp64 holds it.
DSV41_OUT_OF_LINE __m256 repaired_dot(__m256i low, const Group& x, std::size_t inside, const Tile& tile,
                                      std::size_t b, std::size_t o) {
  const std::int16_t* const limb[2] = {x.limbs[inside][0], x.limbs[inside][1]};
  __m256i rest[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (std::size_t i = tile.remainder_begin[b * kOctets + o]; i < tile.remainder_begin[b * kOctets + o + 1];
       ++i)
    for (std::size_t l = 0; l < 2; ++l)
      rest[l] = _mm256_add_epi32(rest[l],
                                 _mm256_madd_epi16(tile.remainders[i].values,
                                                   broadcast_dword(limb[l] + 2 * tile.remainders[i].step)));
  Wide total = add(widen(low, 1.0), widen(rest[0], 0.125));
  if (x.two[inside] != 0) {
    total = add(total, widen(dot_octet(tile.weights[b][0][o], limb[1]), kLimb));
    total = add(total, widen(rest[1], kLimb * 0.125));
  }
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(total.low)), _mm256_cvtpd_ps(total.high),
                              1);
}

/// The same for a block of one limb, in 32 bits where the sum in units of 2^-9 fits them: nearly always.
inline __m256 with_remainders(__m256i low, const Group& x, std::size_t inside, const Tile& tile,
                              std::size_t b, std::size_t o) {
  const __m256i bound = _mm256_set1_epi32((1 << 28) - (1 << 20));  // remainders add less than 2^23
  const __m256i large = _mm256_cmpgt_epi32(_mm256_abs_epi32(low), bound);
  if (_mm256_testz_si256(large, large) == 0) [[unlikely]]
    return repaired_dot(low, x, inside, tile, b, o);
  __m256i total = _mm256_slli_epi32(low, 3);
  for (std::size_t i = tile.remainder_begin[b * kOctets + o]; i < tile.remainder_begin[b * kOctets + o + 1];
       ++i)
    total = _mm256_add_epi32(
        total, _mm256_madd_epi16(tile.remainders[i].values,
                                 broadcast_dword(x.limbs[inside][0] + 2 * tile.remainders[i].step)));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(total), _mm256_set1_ps(0.125f));
}

/// The sums of all rows and vectors must be registers, hence the unrolling: GCC would index them in memory.
/// `Rows` activation rows, row_stride bytes apart, times the decoded chunk; acc [Rows][kTile] keeps the sums.
template <std::size_t Rows>
DSV41_OUT_OF_LINE void rows_times_tile(const Group* x, std::size_t row_stride, std::size_t first,
                                       std::size_t count, const Tile& tile, float* acc) {
  const auto row = [&](const auto* of_first, std::size_t m) {
    return reinterpret_cast<decltype(of_first)>(reinterpret_cast<const char*>(of_first) + m * row_stride);
  };
  for (std::size_t b = 0; b < count; ++b) {
    const Group* const group = x + (first + b) / kGroup;
    const std::size_t inside = (first + b) % kGroup;
    const std::int16_t* const limb = group->limbs[inside][0];
    const std::int16_t* const weights = tile.weights[b][0][0];
    __m256i sum[Rows][kOctets];
    for (auto& octets : sum)
      for (__m256i& lanes : octets) lanes = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (std::size_t p = 0; p < kSteps; ++p) {
      const __m256i w0 = load(weights + p * 32), w1 = load(weights + p * 32 + 16);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256i pair = broadcast_dword(row(limb, m) + 2 * p);
        sum[m][0] = _mm256_add_epi32(sum[m][0], _mm256_madd_epi16(w0, pair));
        sum[m][1] = _mm256_add_epi32(sum[m][1], _mm256_madd_epi16(w1, pair));
        keep(sum[m][0]), keep(sum[m][1]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m256 unit = _mm256_set1_ps(*row(&group->unit[inside], m));
      const __m256 scale = _mm256_set1_ps(*row(&group->scale[inside], m));
      const bool two = *row(&group->two[inside], m) != 0;
#pragma GCC unroll 2
      for (std::size_t o = 0; o < kOctets; ++o) {
        const std::size_t* const begin = tile.remainder_begin + b * kOctets + o;
        __m256 d = _mm256_cvtepi32_ps(sum[m][o]);
        if (two)
          d = repaired_dot(sum[m][o], *row(group, m), inside, tile, b, o);
        else if (begin[0] != begin[1])
          d = with_remainders(sum[m][o], *row(group, m), inside, tile, b, o);
        const __m256 s = _mm256_mul_ps(scale, _mm256_load_ps(tile.scales[b][o]));
        float* const lanes = acc + m * kTile + o * kLanes;
        _mm256_storeu_ps(lanes,
                         _mm256_add_ps(_mm256_loadu_ps(lanes), _mm256_mul_ps(_mm256_mul_ps(d, unit), s)));
      }
    }
  }
}

void many_rows(const QuantizedRows& rows, const Limbs& x, const Fp8Matrix& w, Range range, BFloat16* out) {
  static thread_local Tile tile;
  static thread_local std::vector<float> sums;
  sums.resize(std::max(sums.size(), rows.rows * kTile));
  for (std::size_t n = range.begin; n < range.end; n += kTile) {
    const std::size_t count = std::min(kTile, range.end - n);
    const std::uint8_t *const first_scales = w.scales + n / kBlock * x.blocks, *const last_scales =
                                                                                   w.scales +
                                                                                   (n + count - 1) / kBlock *
                                                                                       x.blocks;
    bool numbers = !holds_e8m0_nan(first_scales, x.blocks) && !holds_e8m0_nan(last_scales, x.blocks);
    std::fill_n(sums.begin(), rows.rows * kTile, 0.0f);
    for (std::size_t first = 0; first < x.blocks && numbers; first += kChunk) {
      const std::size_t blocks = std::min(kChunk, x.blocks - first), stride = x.groups * sizeof(Group);
      numbers = decode_tile(w, n, range.end, first, blocks, tile);
      if (!numbers) break;
      std::size_t m = 0;
      for (; m + 4 <= rows.rows; m += 4)
        rows_times_tile<4>(x.row(m), stride, first, blocks, tile, sums.data() + m * kTile);
      for (; m < rows.rows; ++m)
        rows_times_tile<1>(x.row(m), stride, first, blocks, tile, sums.data() + m * kTile);
    }
    if (!numbers) {
      plain_ops().linear_fp8(rows, w, {n, n + count}, out);
      continue;
    }
    for (std::size_t m = 0; m < rows.rows; ++m)
      for (std::size_t f = 0; f < count; ++f) out[m * w.n + n + f] = to_bfloat16(sums[m * kTile + f]);
  }
}

}  // namespace

void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out) {
  if (x.rows == 0 || range.size() == 0) return;
  if (holds_e8m0_nan(x.scales, x.rows * (w.k / kBlock)) || holds_e4m3_nan(x.codes, x.rows * w.k)) {
    plain_ops().linear_fp8(x, w, range, out);
    return;
  }
  if (x.rows <= kFewRows) {
    linear_fp8_few(x, w, range, out);
    return;
  }
  static thread_local Limbs limbs;
  limbs.set({x.codes, x.scales, x.rows, w.k});
  many_rows(x, limbs, w, range, out);
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
