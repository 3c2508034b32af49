// FP8 linears with AVX-512 VNNI (docs/numerics.md 1). Weights become int16 in units of 2^-6; the few codes
// below 2^-2 have a remainder that a correction adds. An activation block is v * 2^(shift-9) with integers v:
// one int16 limb where the block's dot product fits 32 bits, else two that are combined in fp64. Scales and
// sums follow the contract literally.
#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/blocks.h"
#include "kernels/avx512/fp8_codes.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kFewRows = 7;          // so many rows do not pay for a decoded tile
constexpr std::int32_t kLimb = 4096;         // base of the second limb
constexpr std::int32_t kLargestSum = 74898;  // times 28672, the largest weight, stays below 2^31

/// Sixteen blocks of an activation row. Two blocks share 64 words per limb: the even elements of both, then
/// the odd ones.
struct alignas(64) Group {
  std::int16_t limbs[kGroup / 2][2][64];
  float unit[kGroup];        // 2^(shift-15)
  float scale[kGroup];       // s_x
  std::uint8_t two[kGroup];  // the second limb is in use

  const std::int16_t* limb(std::size_t b, std::size_t l) const { return limbs[b / 2][l] + b % 2 * 16; }
};

struct Limbs {
  std::size_t blocks = 0, groups = 0;  // blocks beyond `blocks` of the last group are zero
  std::vector<Group> storage;

  void set(const QuantizedRows& x);
  const Group* row(std::size_t index) const { return storage.data() + index * groups; }
};

void set_block(Group& group, std::size_t b, const std::uint8_t* codes) {
  __m512i v[2] = {integers_of(codes), integers_of(codes + 16)};
  const auto any = static_cast<std::uint32_t>(_mm512_reduce_or_epi32(_mm512_or_si512(v[0], v[1])));
  const int shift = any != 0 ? std::countr_zero(any) : 0;
  const __m512i count = _mm512_set1_epi32(shift);
  for (__m512i& value : v) value = _mm512_srav_epi32(value, count);
  const __m512i magnitudes[2] = {_mm512_abs_epi32(v[0]), _mm512_abs_epi32(v[1])};
  group.unit[b] = std::bit_cast<float>((127u - 15u + static_cast<std::uint32_t>(shift)) << 23);
  group.two[b] = _mm512_reduce_add_epi32(_mm512_add_epi32(magnitudes[0], magnitudes[1])) > kLargestSum ||
                 _mm512_reduce_or_epi32(_mm512_or_si512(magnitudes[0], magnitudes[1])) > 32767;
  for (std::size_t i = 0; i < 2; ++i) {
    __m512i low = v[i];
    if (group.two[b] != 0) {
      const __m512i half = _mm512_set1_epi32(kLimb / 2);
      low = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(v[i], half), _mm512_set1_epi32(kLimb - 1)),
                             half);
    }
    store_even_odd(group.limbs[b / 2][0] + b % 2 * 16 + i * 8, low);
    store_even_odd(group.limbs[b / 2][1] + b % 2 * 16 + i * 8,
                   _mm512_srai_epi32(_mm512_sub_epi32(v[i], low), 12));
  }
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

// ---- many rows: a tile of 32 features is decoded once per chunk of K, one lane per feature
// ------------------------

constexpr std::size_t kVectors = 2;
constexpr std::size_t kTile = kVectors * kLanes;
constexpr std::size_t kChunk = 8;  // blocks: 16 KiB of decoded weights
constexpr std::size_t kSteps = kBlock / 2;

/// Steps 2 j and 2 j + 1 take elements 4 j, 4 j + 2 and 4 j + 1, 4 j + 3 of a block: where they lie behind
/// limb().
constexpr std::size_t step_offset(std::size_t step) {
  return step % 2 * 32 + step / 2 * 2;
}

struct Remainder {
  std::int16_t values[32];  // pairs as in Tile::weights, units of 2^-9
  std::size_t step;
};

struct Tile {
  alignas(64) std::int16_t
      weights[kChunk][kSteps][kVectors][32];  // [block][pair of k][vector]: two k of sixteen features
  alignas(64) float scales[kChunk][kVectors][kLanes];
  Remainder remainders[kChunk * kVectors * kSteps];
  std::size_t remainder_begin[kChunk * kVectors + 1];  // of each block and vector
};

/// False when a weight is NaN.
bool decode_tile(const Fp8Matrix& w, std::size_t n, std::size_t end, std::size_t first, std::size_t count,
                 Tile& tile) {
  const std::uint8_t *codes[kVectors][kLanes], *scales[kLanes];
  for (std::size_t v = 0; v < kVectors; ++v) {
    for (std::size_t r = 0; r < kLanes; ++r) {
      const std::size_t feature =
          std::min(n + v * kLanes + r, end - 1);  // lanes beyond the range repeat its last one
      codes[v][r] = w.codes + feature * w.k + first * kBlock;
      scales[r] = w.scales + feature / kBlock * (w.k / kBlock) + first;
    }
    transpose_scales(scales, count, tile.scales[0][v], kTile);
  }
  std::size_t remainders = 0;
  for (std::size_t b = 0; b < count; ++b) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      tile.remainder_begin[b * kVectors + v] = remainders;
      prefetch_rows<kChunk * kBlock>(codes[v], b, kChunk);
      for (std::size_t half = 0; half < 2; ++half) {
        __m512i dwords[4];
        transpose_dwords(codes[v], b * kBlock + half * 16, dwords);
        for (std::size_t j = 0; j < 4; ++j) {
          const Words words = words_of(dwords[j]);
          const std::size_t step = 2 * (4 * half + j);
          store(tile.weights[b][step][v], words.even);
          store(tile.weights[b][step + 1][v], words.odd);
          std::uint64_t rare = rare_codes(dwords[j]);
          if (rare == 0) continue;
          std::uint8_t bytes[64];
          std::int16_t values[2][32] = {};
          bool present[2] = {};
          store(bytes, dwords[j]);
          for (; rare != 0; rare &= rare - 1) {
            const auto i = static_cast<std::size_t>(std::countr_zero(rare));
            if ((bytes[i] & 0x7F) == 0x7F) return false;
            const std::int32_t value = remainder_of(bytes[i]);
            values[i % 2][i / 4 * 2 + i % 4 / 2] = static_cast<std::int16_t>(value);
            present[i % 2] |= value != 0;
          }
          for (std::size_t side = 0; side < 2; ++side) {
            if (!present[side]) continue;
            std::memcpy(tile.remainders[remainders].values, values[side], sizeof values[side]);
            tile.remainders[remainders++].step = step + side;
          }
        }
      }
    }
  }
  tile.remainder_begin[count * kVectors] = remainders;
  return true;
}

/// Sixteen int32 times a power of two, in fp64.
struct Wide {
  __m512d low, high;
};
inline Wide widen(__m512i value, double factor) {
  const __m512d scale = _mm512_set1_pd(factor);
  return {_mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(value)), scale),
          _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(value, 1)), scale)};
}
inline Wide add(const Wide& a, const Wide& b) {
  return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)};
}

/// RN32 of the block's dot product in units of 2^-6 * 2^(shift-9), with the second limb and the remainders:
/// below 2^53 in units of 2^-9, so that fp64 holds it.
DSV41_OUT_OF_LINE __m512 repaired_dot(__m512i low, const Group& x, std::size_t inside, const Tile& tile,
                                      std::size_t b, std::size_t v) {
  const std::int16_t* const limb[2] = {x.limb(inside, 0), x.limb(inside, 1)};
  __m512i rest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::size_t i = tile.remainder_begin[b * kVectors + v]; i < tile.remainder_begin[b * kVectors + v + 1];
       ++i) {
    const Remainder& remainder = tile.remainders[i];
    for (std::size_t l = 0; l < 2; ++l)
      rest[l] = _mm512_dpwssd_epi32(rest[l], load(remainder.values),
                                    broadcast_dword(limb[l] + step_offset(remainder.step)));
  }
  Wide total = add(widen(low, 1.0), widen(rest[0], 0.125));
  if (x.two[inside] != 0) {
    __m512i high = _mm512_setzero_si512();
    for (std::size_t p = 0; p < kSteps; ++p)
      high =
          _mm512_dpwssd_epi32(high, load(tile.weights[b][p][v]), broadcast_dword(limb[1] + step_offset(p)));
    total = add(total, widen(high, kLimb));
    total = add(total, widen(rest[1], kLimb * 0.125));
  }
  return join_floats(total.low, total.high);
}

/// The same for a block of one limb, in 32 bits where the sum in units of 2^-9 fits them: nearly always.
inline __m512 with_remainders(__m512i low, const Group& x, std::size_t inside, const Tile& tile,
                              std::size_t b, std::size_t v) {
  const __m512i bound = _mm512_set1_epi32((1 << 28) - (1 << 20));  // remainders add less than 2^23
  if (_mm512_cmpgt_epi32_mask(_mm512_abs_epi32(low), bound) != 0) [[unlikely]]
    return repaired_dot(low, x, inside, tile, b, v);
  __m512i total = _mm512_slli_epi32(low, 3);
  for (std::size_t i = tile.remainder_begin[b * kVectors + v]; i < tile.remainder_begin[b * kVectors + v + 1];
       ++i) {
    const Remainder& remainder = tile.remainders[i];
    total = _mm512_dpwssd_epi32(total, load(remainder.values),
                                broadcast_dword(x.limb(inside, 0) + step_offset(remainder.step)));
  }
  return _mm512_mul_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(0.125f));
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
    const std::int16_t* const limb = group->limb(inside, 0);
    const std::int16_t* const weights = tile.weights[b][0][0];
    __m512i sum[Rows][kVectors];
    for (auto& vectors : sum)
      for (__m512i& lanes : vectors) lanes = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kSteps; ++p) {
      const __m512i w0 = load(weights + p * 64), w1 = load(weights + p * 64 + 32);
#pragma GCC unroll 4
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m512i pair = broadcast_dword(row(limb, m) + step_offset(p));
        sum[m][0] = _mm512_dpwssd_epi32(sum[m][0], w0, pair);
        sum[m][1] = _mm512_dpwssd_epi32(sum[m][1], w1, pair);
      }
    }
#pragma GCC unroll 4
    for (std::size_t m = 0; m < Rows; ++m) {
      const __m512 unit = _mm512_set1_ps(*row(&group->unit[inside], m));
      const __m512 scale = _mm512_set1_ps(*row(&group->scale[inside], m));
      const bool two = *row(&group->two[inside], m) != 0;
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t* const begin = tile.remainder_begin + b * kVectors + v;
        __m512 d = _mm512_cvtepi32_ps(sum[m][v]);
        if (two)
          d = repaired_dot(sum[m][v], *row(group, m), inside, tile, b, v);
        else if (begin[0] != begin[1])
          d = with_remainders(sum[m][v], *row(group, m), inside, tile, b, v);
        const __m512 s = _mm512_mul_ps(scale, _mm512_loadu_ps(tile.scales[b][v]));
        float* const lanes = acc + m * kTile + v * kLanes;
        _mm512_storeu_ps(lanes,
                         _mm512_add_ps(_mm512_loadu_ps(lanes), _mm512_mul_ps(_mm512_mul_ps(d, unit), s)));
      }
    }
  }
}

void many_rows(const QuantizedRows& rows, const Limbs& x, const Fp8Matrix& w, Range range, BFloat16* out) {
  static thread_local Tile tile;
  static thread_local std::vector<float> sums;
  sums.resize(std::max(sums.size(), rows.rows * kTile));
  for (std::size_t n = range.begin; n < range.end; n += kTile) {
    const std::size_t count = std::min(kTile, range.end - n), stride = x.groups * sizeof(Group);
    const std::uint8_t* const first_scales = w.scales + n / kBlock * x.blocks;
    const std::uint8_t* const last_scales = w.scales + (n + count - 1) / kBlock * x.blocks;
    bool numbers = !holds_e8m0_nan(first_scales, x.blocks) && !holds_e8m0_nan(last_scales, x.blocks);
    std::fill_n(sums.begin(), rows.rows * kTile, 0.0f);
    for (std::size_t first = 0; first < x.blocks && numbers; first += kChunk) {
      const std::size_t blocks = std::min(kChunk, x.blocks - first);
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
  if (x.rows <= kFewRows) return linear_fp8_few(x, w, range, out);
  static thread_local Limbs limbs;
  limbs.set({x.codes, x.scales, x.rows, w.k});
  many_rows(x, limbs, w, range, out);
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
