// FP8 products of several activation rows with AVX-512 VNNI (docs/numerics.md 1). Up to sixteen activation
// rows are the lanes of a vector, and a weight is broadcast to all of them; where there are fewer rows, two
// or four features share a vector. So nothing is summed across lanes, and weights are read row by row.
//
// Activations are h * 2^s + l (fp8_activations.h), weights 8 t + r (fp8_codes.h), in units of 2^-9. A block's
// exact dot product is 2^(s+3) * sum(h t) + C with the corrections C = sum(8 l t) + sum(a r), which have few
// terms. Scales and sums over the blocks follow the contract literally.
#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/avx512/avx512.h"
#include "kernels/fp8_words.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/fp8_activations.h"
#include "kernels/avx512/fp8_codes.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kVectors = 8;         // of sums, in registers
constexpr std::size_t kTile = kBlock;       // features that are decoded together: they share their scales
constexpr std::size_t kChunk = 8;           // blocks of K that are decoded together: 16 KiB of words
constexpr std::size_t kPairs = kChunk / 2;  // 64 codes are a pair of blocks
constexpr std::size_t kPairCodes = 2 * kBlock;
constexpr std::size_t kSteps = kBlock / 2;  // a step multiplies two elements
constexpr std::int32_t kLargestRests = 36;  // sum of |l|: 8 * 36 * 28672 is half of kLargestCorrection

// ---- where the words of a pair of blocks are: a step takes two neighbouring elements of a block ----

/// `Features` weight rows share a vector: lane r * Features + f is activation row r, feature f.
template <std::size_t Features>
struct Shared {
  static constexpr std::size_t kRows = kLanes / Features;
  static constexpr std::size_t kSubtile = kVectors * Features;  // features whose sums are in registers
  static constexpr __mmask16 kLanesOfFirst = Features == 1 ? 0xFFFF : Features == 2 ? 0x5555 : 0x1111;
};

/// Bytes from the words of a vector's features to those of a step of the pair's first block; the second
/// block's are 32 behind.
template <std::size_t Features>
constexpr std::size_t step_offset(std::size_t step) {
  const std::size_t begin = step / 8 * Features * 64, dword = step % 8;  // of Words::first or Words::last
  if (Features == 1) return begin + dword * 4;
  const std::size_t part = begin + dword / 4 * 16;
  return Features == 2 ? part + dword % 4 / 2 * 64 + dword % 2 * 8 : part + dword % 4 * 64;
}

constexpr std::size_t step_of(std::size_t k) {
  return place_of_word(k % kBlock) % 16 / 2 + place_of_word(k % kBlock) / 32 * 8;
}

/// The words of one step for every feature of a vector, to the lanes of every activation row.
template <std::size_t Features>
inline __m512i broadcast_step(const std::uint8_t* words) {
  if constexpr (Features == 1) return broadcast_dword(words);
  if constexpr (Features == 2) {
    std::int64_t pair;
    std::memcpy(&pair, words, sizeof pair);
    return _mm512_set1_epi64(pair);
  }
  if constexpr (Features == 4) return _mm512_broadcast_i32x4(load16(words));
}

/// The words of a vector's features, their steps interleaved, to 128 * Features bytes.
template <std::size_t Features>
inline void store_interleaved(const Words (&w)[Features], std::uint8_t* to) {
  if constexpr (Features == 1) {
    store(to, w[0].first);
    store(to + 64, w[0].last);
  }
  if constexpr (Features == 2) {
    store(to, _mm512_unpacklo_epi32(w[0].first, w[1].first));
    store(to + 64, _mm512_unpackhi_epi32(w[0].first, w[1].first));
    store(to + 128, _mm512_unpacklo_epi32(w[0].last, w[1].last));
    store(to + 192, _mm512_unpackhi_epi32(w[0].last, w[1].last));
  }
  if constexpr (Features == 4) {
    for (const bool last : {false, true}) {
      const __m512i a = last ? w[0].last : w[0].first, b = last ? w[1].last : w[1].first;
      const __m512i c = last ? w[2].last : w[2].first, d = last ? w[3].last : w[3].first;
      const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
      const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
      store(to, _mm512_unpacklo_epi64(ab0, cd0));
      store(to + 64, _mm512_unpackhi_epi64(ab0, cd0));
      store(to + 128, _mm512_unpacklo_epi64(ab1, cd1));
      store(to + 192, _mm512_unpackhi_epi64(ab1, cd1));
      to += 256;
    }
  }
}

// ---- activations ----

/// A block of as many activation rows as a vector has.
struct alignas(64) BlockRows {
  std::int16_t words[kSteps][2 * kLanes];  // h
  std::int32_t shift[kLanes];              // s
  float factor[kLanes];                    // 2^(s+3)
  float scale[kLanes];                     // s_x
  std::size_t rests_begin, rests_end;
  bool wide;  // the rests may add up to more than fp32 holds
};

/// A step with rests.
struct alignas(64) Rests {
  std::int16_t words[2 * kLanes];  // 8 l
  std::size_t block, step;
};

struct Activations {
  std::size_t blocks = 0, groups = 0;  // groups of rows that are lanes together
  std::vector<BlockRows> storage;
  std::vector<Rests> rests;
  PreparedName name;  // of the QuantizedRows

  void set(const QuantizedRows& x, std::size_t features);
  const BlockRows* group(std::size_t index) const { return storage.data() + index * blocks; }

 private:
  void set_block(const QuantizedRows& x, std::size_t first_row, std::size_t rows, std::size_t features,
                 std::size_t block, BlockRows& out);
};

void Activations::set(const QuantizedRows& x, std::size_t features) {
  if (name.is(x.name)) return;
  const std::size_t lane_rows = kLanes / features;
  blocks = x.k / kBlock;
  groups = ceil_div(x.rows, lane_rows);
  if (storage.size() < groups * blocks) storage.resize(groups * blocks);
  rests.clear();
  for (std::size_t g = 0; g < groups; ++g)
    for (std::size_t b = 0; b < blocks; ++b)
      set_block(x, g * lane_rows, std::min(lane_rows, x.rows - g * lane_rows), features, b,
                storage[g * blocks + b]);
  name.set(x.name);
}

void Activations::set_block(const QuantizedRows& x, std::size_t first_row, std::size_t rows,
                            std::size_t features, std::size_t block, BlockRows& out) {
  alignas(64) std::int16_t high[kLanes][kBlock], low[kLanes][kBlock];  // by row, in the order of the steps
  alignas(64) static constexpr std::int16_t kNone[kBlock] = {};
  const std::uint8_t *high_rows[kLanes], *low_rows[kLanes];
  out = {};
  std::fill_n(out.scale, kLanes, 1.0f);
  bool any_low = false;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::size_t r = lane / features;
    const bool present = r < rows;
    high_rows[lane] = reinterpret_cast<const std::uint8_t*>(present ? high[r] : kNone);
    low_rows[lane] = reinterpret_cast<const std::uint8_t*>(present ? low[r] : kNone);
    if (!present) continue;
    const std::size_t row = first_row + r;
    if (lane % features == 0) {
      const std::uint8_t* const codes = x.codes + row * x.k + block * kBlock;
      const SplitBlock split = split_block({integers_of(codes), integers_of(codes + 16)});
      store_words(high[r], split.high, kSteps);
      store_words(low[r], {_mm512_slli_epi32(split.low[0], 3), _mm512_slli_epi32(split.low[1], 3)}, kSteps);
      const __m512i rest = _mm512_add_epi32(_mm512_abs_epi32(split.low[0]), _mm512_abs_epi32(split.low[1]));
      const std::int32_t sum = _mm512_reduce_add_epi32(rest);
      any_low |= sum != 0;
      out.wide |= sum > kLargestRests;
      out.shift[lane] = split.shift;
      out.scale[lane] = decode_e8m0(x.scales[row * blocks + block]);
    } else {
      out.shift[lane] = out.shift[lane - 1];
      out.scale[lane] = out.scale[lane - 1];
    }
    out.factor[lane] = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 3 + out.shift[lane]) << 23);
  }
  for (std::size_t step = 0; step < kSteps; step += 4) {
    __m512i dwords[4];
    transpose_dwords(high_rows, step * 4, dwords);
    for (std::size_t i = 0; i < 4; ++i) store(out.words[step + i], dwords[i]);
  }
  out.rests_begin = rests.size();
  for (std::size_t step = 0; any_low && step < kSteps; step += 4) {
    __m512i dwords[4];
    transpose_dwords(low_rows, step * 4, dwords);
    for (std::size_t i = 0; i < 4; ++i) {
      if (_mm512_test_epi32_mask(dwords[i], dwords[i]) == 0) continue;
      rests.push_back({.words = {}, .block = block, .step = step + i});
      store(rests.back().words, dwords[i]);
    }
  }
  out.rests_end = rests.size();
}

// ---- weights ----

/// What the words left out of a weight.
struct Remainder {
  std::uint8_t block, step;  // of the chunk
  std::uint8_t feature;      // of the subtile
  std::int32_t words;        // the remainder in the word of its element, zero in the other
};

struct Tile {
  alignas(64) std::uint8_t words[kPairs][kTile * 128];  // features that share a vector are interleaved
  alignas(64) std::uint64_t rare[kTile][kPairs];        // which codes may have a remainder
  Remainder remainders[kTile * kChunk * kBlock];        // by subtile
  std::size_t remainders_begin[kTile / kVectors + 1];
  alignas(64) std::int32_t corrections[kChunk][kVectors][kLanes];  // zero between uses
};

/// Decodes `count` blocks, from block `first` on, of kTile features; `features` of them are weight rows from
/// `codes` on, the others repeat the last one. Fetches the same of what is `ahead` bytes behind them.
template <std::size_t Features>
DSV41_OUT_OF_LINE void decode(const std::uint8_t* codes, std::size_t k, std::size_t features,
                              std::size_t count, std::size_t ahead, Tile& tile) {
  for (std::size_t f = 0; f < kTile; f += Features) {
    const std::uint8_t* rows[Features];
    for (std::size_t i = 0; i < Features; ++i) rows[i] = codes + std::min(f + i, features - 1) * k;
    for (std::size_t pair = 0; pair < kPairs; ++pair) {
      const std::uint64_t mask = first_bytes(count * kBlock - std::min(count * kBlock, pair * kPairCodes));
      Words words[Features];
#pragma GCC unroll 4
      for (std::size_t i = 0; i < Features; ++i) {
        const std::uint8_t* const from = rows[i] + pair * kPairCodes;
        // To the second-level cache: rows often lie in the same sets of the first-level one.
        _mm_prefetch(reinterpret_cast<const char*>(from + ahead), _MM_HINT_T1);
        const __m512i loaded = load_part(from, mask);
        const Decoded decoded = decode_codes(loaded);
        tile.rare[f + i][pair] = rare_codes(decoded.order) & mask;
        words[i] = decoded.words;
      }
      store_interleaved<Features>(words, tile.words[pair] + f * 128);
    }
  }
}

/// Lists what the decoded codes have left over. False when one of them is NaN.
template <std::size_t Features>
DSV41_OUT_OF_LINE bool list_remainders(const std::uint8_t* codes, std::size_t k, std::size_t features,
                                       Tile& tile) {
  constexpr std::size_t kSubtile = Shared<Features>::kSubtile, kMasks = kSubtile * kPairs;
  std::size_t count = 0;
  bool numbers = true;
  for (std::size_t subtile = 0; subtile < kTile / kSubtile; ++subtile) {
    tile.remainders_begin[subtile] = count;
    const std::uint64_t* const rare = tile.rare[subtile * kSubtile];
    std::uint32_t masks[kMasks + 16];
    const std::size_t listed = list_masks(rare, kMasks, masks);
    for (std::size_t i = 0; i < listed; ++i) {
      const std::size_t f = masks[i] / kPairs, first = masks[i] % kPairs * kPairCodes;
      const std::size_t row = std::min(subtile * kSubtile + f, features - 1);
      for (std::uint64_t left = rare[masks[i]]; left != 0; left &= left - 1) {
        const std::size_t at = first + static_cast<std::size_t>(std::countr_zero(left));
        const std::uint8_t code = codes[row * k + at];
        numbers &= (code & 0x7F) != 0x7F;
        const std::int32_t value = kRemainders[code];
        tile.remainders[count++] = {.block = static_cast<std::uint8_t>(at / kBlock),
                                    .step = static_cast<std::uint8_t>(step_of(at)),
                                    .feature = static_cast<std::uint8_t>(f),
                                    .words = at % 2 == 0 ? value & 0xFFFF : value * 65536};
      }
    }
  }
  tile.remainders_begin[kTile / kSubtile] = count;
  return numbers;
}

// ---- products ----

/// sum(a r) of a subtile, to the corrections. False when one of them may be too
/// large.
template <std::size_t Features>
DSV41_OUT_OF_LINE bool add_remainders(const BlockRows* x, const Rests* rests, std::size_t subtile,
                                      Tile& tile) {
  __m512i largest = _mm512_setzero_si512();
  for (std::size_t i = tile.remainders_begin[subtile]; i < tile.remainders_begin[subtile + 1]; ++i) {
    const Remainder& remainder = tile.remainders[i];
    const BlockRows& block = x[remainder.block];
    const __m512i words = _mm512_set1_epi32(remainder.words);
    __m512i product = _mm512_sllv_epi32(
        _mm512_dpwssd_epi32(_mm512_setzero_si512(), load(block.words[remainder.step]), words),
        load(block.shift));
    for (std::size_t j = block.rests_begin; j < block.rests_end; ++j) {
      if (rests[j].step != remainder.step) continue;
      product = _mm512_add_epi32(
          product,
          _mm512_srai_epi32(_mm512_dpwssd_epi32(_mm512_setzero_si512(), load(rests[j].words), words), 3));
    }
    const auto lanes =
        static_cast<__mmask16>(Shared<Features>::kLanesOfFirst << remainder.feature % Features);
    std::int32_t* const to = tile.corrections[remainder.block][remainder.feature / Features];
    const __m512i sum = _mm512_mask_add_epi32(load(to), lanes, load(to), product);
    largest = _mm512_max_epi32(largest, _mm512_abs_epi32(sum));
    store(to, sum);
  }
  return _mm512_reduce_max_epi32(largest) <= kLargestCorrection / 2;
}

/// sum(8 l t) of `count` blocks, to the corrections.
template <std::size_t Features>
DSV41_OUT_OF_LINE void add_rests(const BlockRows* x, const Rests* rests, std::size_t first, std::size_t count,
                                 const std::uint8_t* words, Tile& tile) {
  for (std::size_t i = x[0].rests_begin; i < x[count - 1].rests_end; ++i) {
    const std::size_t block = rests[i].block - first;
    const std::uint8_t* const step =
        words + block / 2 * sizeof tile.words[0] + block % 2 * 32 + step_offset<Features>(rests[i].step);
    const __m512i rest = load(rests[i].words);
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) {
      std::int32_t* const to = tile.corrections[block][v];
      store(to, _mm512_dpwssd_epi32(load(to), broadcast_step<Features>(step + v * Features * 128), rest));
    }
  }
}

/// `count` blocks of a group of activation rows times a subtile's words; sums [kVectors][kLanes].
template <std::size_t Features>
DSV41_OUT_OF_LINE void multiply(const BlockRows* x, std::size_t count, const std::uint8_t* words,
                                const float* scales, bool wide, Tile& tile, float* sums) {
  __m512 sum[kVectors];
#pragma GCC unroll 8
  for (std::size_t v = 0; v < kVectors; ++v) sum[v] = _mm512_loadu_ps(sums + v * kLanes);
  for (std::size_t b = 0; b < count; ++b) {
    const BlockRows& block = x[b];
    const std::uint8_t* const weights = words + b / 2 * sizeof tile.words[0] + b % 2 * 32;
    __m512i dot[kVectors], other[kVectors];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) dot[v] = other[v] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (std::size_t step = 0; step < kSteps; step += 2) {
      const __m512i first = load(block.words[step]), second = load(block.words[step + 1]);
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        const std::uint8_t* const from = weights + v * Features * 128;
        dot[v] =
            _mm512_dpwssd_epi32(dot[v], first, broadcast_step<Features>(from + step_offset<Features>(step)));
        other[v] = _mm512_dpwssd_epi32(other[v], second,
                                       broadcast_step<Features>(from + step_offset<Features>(step + 1)));
      }
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) dot[v] = _mm512_add_epi32(dot[v], other[v]);
    const __m512 factor = _mm512_loadu_ps(block.factor);
    const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(block.scale), _mm512_set1_ps(scales[b]));
    const __m512i shift = _mm512_add_epi32(load(block.shift), _mm512_set1_epi32(3));
    if (!wide && !block.wide && scales_exactly(scale)) {
      const __m512 unit_scale = _mm512_mul_ps(scale, _mm512_set1_ps(kUnit));
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        const __m512 d = rounded_dot(dot[v], load(tile.corrections[b][v]), shift, factor);
        sum[v] = _mm512_fmadd_ps(d, unit_scale, sum[v]);
      }
    } else {
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        const __m512 d = rounded_dot_wide(dot[v], load(tile.corrections[b][v]), factor);
        sum[v] = _mm512_add_ps(sum[v], _mm512_mul_ps(_mm512_mul_ps(d, _mm512_set1_ps(kUnit)), scale));
      }
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) store(tile.corrections[b][v], _mm512_setzero_si512());
  }
#pragma GCC unroll 8
  for (std::size_t v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + v * kLanes, sum[v]);
}

/// The sums of a group of activation rows and the features of a tile, [kTile / Features][kLanes].
template <std::size_t Features>
void store_tile(const float* sums, std::size_t rows, std::size_t features, BFloat16* out,
                std::size_t stride) {
  for (std::size_t v = 0; v * Features < features; ++v) {
    BFloat16 values[kLanes];
    store_bfloat16(values, kLanes, _mm512_loadu_ps(sums + v * kLanes));
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t f = 0; f < std::min(Features, features - v * Features); ++f)
        out[r * stride + v * Features + f] = values[r * Features + f];
  }
}

template <std::size_t Features>
void multiply_rows(const QuantizedRows& rows, const Fp8Matrix& w, Range range, BFloat16* out) {
  constexpr std::size_t kSubtile = Shared<Features>::kSubtile, kRows = Shared<Features>::kRows;
  static thread_local Activations x;
  static thread_local Tile tile;
  static thread_local std::vector<float> sums;    // [groups][kTile / Features][kLanes]
  static thread_local std::vector<float> scales;  // [blocks]: s_w
  constexpr std::size_t kSums = kTile / Features * kLanes;
  x.set(rows, Features);
  sums.resize(x.groups * kSums);
  scales.resize(x.blocks);
  for (std::size_t n = range.begin, features; n < range.end; n += features) {
    features = std::min(range.end - n, kTile - n % kTile);
    const std::uint8_t* const codes = w.codes + n * w.k;
    const std::uint8_t* const scale_codes = w.scales + n / kBlock * x.blocks;
    bool numbers = !holds_e8m0_nan(scale_codes, x.blocks);
    for (std::size_t b = 0; b < x.blocks; ++b) scales[b] = decode_e8m0(scale_codes[b]);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (std::size_t first = 0; first < x.blocks && numbers; first += kChunk) {
      const std::size_t count = std::min(kChunk, x.blocks - first);
      constexpr std::size_t kAhead = 2 * kChunk * kBlock;
      const std::size_t ahead = first * kBlock + kAhead < w.k ? kAhead : (kTile - 1) * w.k + kAhead;
      decode<Features>(codes + first * kBlock, w.k, features, count, ahead, tile);
      numbers = list_remainders<Features>(codes + first * kBlock, w.k, features, tile);
      if (!numbers) break;
      for (std::size_t g = 0; g < x.groups; ++g) {
        const BlockRows* const group = x.group(g) + first;
        for (std::size_t f = 0; f < kTile; f += kSubtile) {
          const std::uint8_t* const words = tile.words[0] + f * 128;
          const bool exact = add_remainders<Features>(group, x.rests.data(), f / kSubtile, tile);
          add_rests<Features>(group, x.rests.data(), first, count, words, tile);
          multiply<Features>(group, count, words, scales.data() + first, !exact, tile,
                             sums.data() + g * kSums + f / Features * kLanes);
        }
      }
    }
    if (!numbers) {
      plain_ops().linear_fp8(rows, w, {n, n + features}, out);  // NaN spreads as the definition says
      continue;
    }
    for (std::size_t g = 0; g < x.groups; ++g)
      store_tile<Features>(sums.data() + g * kSums, std::min(kRows, rows.rows - g * kRows), features,
                           out + g * kRows * w.n + n, w.n);
  }
}

}  // namespace

void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out) {
  if (x.rows == 0 || range.size() == 0) return;
  const QuantizedRows rows{x.codes, x.scales, x.rows, w.k, x.name};
  if (holds_e8m0_nan(x.scales, x.rows * (w.k / kBlock)) || holds_e4m3_nan(x.codes, x.rows * w.k))
    plain_ops().linear_fp8(rows, w, range, out);
  else if (x.rows <= kFewFp8Rows)
    linear_fp8_few_rows(rows, w, range, out);
  else if (x.rows <= Shared<4>::kRows)
    multiply_rows<4>(rows, w, range, out);
  else if (x.rows <= Shared<2>::kRows)
    multiply_rows<2>(rows, w, range, out);
  else
    multiply_rows<1>(rows, w, range, out);
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
