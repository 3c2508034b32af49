// FP8 products of one or a few activation rows with AVX-512 VNNI (docs/numerics.md 1): every weight row is
// read once, in order.
//
// In units of 2^-9 an activation is h * 2^s + l, where h is a word with which the block's dot product fits 32
// bits, and the rest l is zero for nearly all elements. A weight is 8 t + r with the word t of fp8_codes.h
// and a remainder r that is zero for nearly all codes. So the exact dot product of a block is 2^(s+3) * sum(h
// t) + sum(8 l t) + sum(a r): the first sum is the vector loop, the others are corrections, and fp64 holds
// the total, which is rounded once. Scales and sums over the blocks follow the contract literally.
#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <vector>

#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/blocks.h"
#include "kernels/avx512/fp8_activations.h"
#include "kernels/avx512/fp8_codes.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kPairs = kGroup / 2;      // a vector of codes is a pair of blocks
constexpr std::size_t kPairCodes = 2 * kBlock;  // 64
constexpr std::size_t kGroupCodes = kGroup * kBlock;
constexpr std::size_t kFewRests = 5;  // of a pair: more are summed as a second word

/// 64 words in the order of words_of: the even elements of two blocks, then the odd ones.
struct alignas(64) PairWords {
  std::int16_t values[kPairCodes];
};
constexpr std::size_t place_of(std::size_t k) {
  return k % 2 * kBlock + k / 2;
}

template <std::int32_t (*Value)(std::uint8_t)>
constexpr std::array<std::int32_t, 256> table_of() {
  std::array<std::int32_t, 256> values{};
  for (std::size_t code = 0; code < 256; ++code) values[code] = Value(static_cast<std::uint8_t>(code));
  return values;
}
// By code, in units of 2^-9; NaN has no meaning in them.
constexpr std::array<std::int32_t, 256> kRounded = table_of<rounded_value>(),
                                        kRemainders = table_of<remainder_of>();

/// Where rows end in the middle of a group, two of them are whole groups again: they are read as one, with
/// the activations standing twice.
constexpr std::size_t copies_for(std::size_t blocks) {
  return blocks % kGroup == kGroup / 2 ? 2 : 1;
}

struct Rest {
  std::uint32_t k;
  std::int32_t value;
};

/// The activation row, prepared. Blocks beyond blocks * copies of the last group are zero.
struct Row {
  std::size_t blocks = 0, copies = 1, groups = 0;
  std::vector<PairWords> words;           // [groups * kPairs]: h
  std::vector<std::int32_t> values;       // [copies * K]: a
  std::vector<double> factor;             // [groups * kGroup]: 2^(s+3)
  std::vector<float> scale;               // [blocks]: s_x
  std::vector<std::uint32_t> places;      // [groups * kGroup]: of a block in TileSums::corrections
  std::vector<Rest> rests;                // of pairs that have few
  std::vector<std::uint32_t> rest_pairs;  // the others
  std::vector<PairWords> rest_words;      // [rest_pairs]

  void set(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k);

 private:
  void set_pair(std::size_t pair, std::size_t count);
};

void Row::set(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k) {
  blocks = k / kBlock;
  copies = copies_for(blocks);
  groups = ceil_div(blocks * copies, kGroup);
  words.resize(groups * kPairs);
  values.resize(groups * kGroupCodes);
  factor.assign(groups * kGroup, 1.0);
  scale.resize(blocks);
  places.resize(groups * kGroup);
  rests.clear(), rest_pairs.clear(), rest_words.clear();
  for (std::size_t i = 0; i < k; i += 16) store(values.data() + i, integers_of(codes + i));
  std::fill(values.begin() + static_cast<std::ptrdiff_t>(k), values.end(), 0);
  if (copies == 2) std::copy_n(values.begin(), k, values.begin() + static_cast<std::ptrdiff_t>(k));
  for (std::size_t b = 0; b < blocks; ++b) scale[b] = decode_e8m0(scales[b]);
  for (std::size_t b = 0; b < groups * kGroup; ++b)
    places[b] = static_cast<std::uint32_t>(b % blocks * kLanes + b / blocks);
  const std::size_t all = blocks * copies;
  for (std::size_t pair = 0; pair < groups * kPairs; ++pair)
    set_pair(pair, std::min<std::size_t>(2, all - std::min(all, 2 * pair)));
}

/// `count` of the pair's blocks are part of the row.
void Row::set_pair(std::size_t pair, std::size_t count) {
  PairWords& h = words[pair];
  if (count == 0) {
    h = {};
    return;
  }
  PairWords rest;
  std::size_t rest_count = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int32_t* const a = values.data() + (2 * pair + i) * kBlock;
    const SplitBlock block = split_block({load(a), load(a + 16)});
    for (std::size_t part = 0; part < 2; ++part) {
      rest_count += static_cast<std::size_t>(
          std::popcount(static_cast<unsigned>(_mm512_test_epi32_mask(block.low[part], block.low[part]))));
      store_even_odd(h.values + i * 16 + part * 8, block.high[part]);
      store_even_odd(rest.values + i * 16 + part * 8, block.low[part]);
    }
    factor[2 * pair + i] =
        std::bit_cast<double>(std::uint64_t{1023u + 3u + static_cast<unsigned>(block.shift)} << 52);
  }
  if (rest_count > kFewRests) {
    rest_pairs.push_back(static_cast<std::uint32_t>(pair));
    rest_words.push_back(rest);
  } else if (rest_count > 0) {
    for (std::size_t k = 0; k < kPairCodes; ++k)
      if (const std::int32_t value = rest.values[place_of(k)]; value != 0)
        rests.push_back({static_cast<std::uint32_t>(pair * kPairCodes + k), value});
  }
}

/// What is left of a tile of kLanes weight rows when they have been read, for one activation row.
struct TileSums {
  std::vector<std::int32_t> dots;         // [kLanes][distance between rows]: sum(h t)
  std::vector<std::int32_t> corrections;  // [blocks][kLanes]
};
/// Whole groups, or where two rows are read as one, the blocks themselves.
inline std::size_t dots_distance(const Row& x) {
  return x.copies == 1 ? x.groups * kGroup : x.blocks;
}

struct Tile {
  std::vector<TileSums> sums;
  std::vector<std::uint64_t> rare;  // [groups * kPairs]: of what is read as one weight row
  // The pairs of the tile with rare codes: number of that row * groups * kPairs + pair, and which codes. Room
  // for eight more.
  std::vector<std::uint64_t> listed_pairs, listed_codes;

  void reserve(std::size_t rows, std::size_t groups) {
    if (sums.size() < rows) sums.resize(rows);
    for (std::size_t m = 0; m < rows; ++m) {
      if (sums[m].corrections.size() >= kLanes * groups * kGroup) continue;
      sums[m].dots.resize((kLanes + 1) * groups * kGroup),
          sums[m].corrections.resize(kLanes * groups * kGroup);
    }
    if (rare.size() >= groups * kPairs) return;
    rare.resize(groups * kPairs);
    listed_pairs.resize(kLanes * groups * kPairs + 8), listed_codes.resize(kLanes * groups * kPairs + 8);
  }
};

/// Four dwords for each half of a pair's two blocks.
inline __m512i dot(const Words& w, const PairWords& x) {
  return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(_mm512_setzero_si512(), w.even, load(x.values)), w.odd,
                             load(x.values + kBlock));
}

/// Sums of a group, four dwords for each half block.
struct GroupSums {
  __m512i pairs[kPairs];
};

/// Codes of a group that belong to its pair p, if `blocks` of its blocks are part of the row.
inline std::uint64_t pair_mask(std::size_t blocks, std::size_t p) {
  return first_bytes(blocks * kBlock - std::min(blocks * kBlock, p * kPairCodes));
}

/// A whole group, for one activation row.
inline void multiply_group(const PairWords* x, const std::uint8_t* codes, GroupSums& sums,
                           std::uint64_t* rare) {
#pragma GCC unroll 8
  for (std::size_t p = 0; p < kPairs; ++p) {
    const __m512i pair = load(codes + p * kPairCodes);
    rare[p] = rare_codes(pair);
    sums.pairs[p] = dot(words_of(pair), x[p]);
  }
}

/// The last group, of which only some blocks are part of the row.
inline void multiply_last(const PairWords* x, const std::uint8_t* codes, std::size_t blocks, GroupSums& sums,
                          std::uint64_t* rare) {
#pragma GCC unroll 8
  for (std::size_t p = 0; p < kPairs; ++p) {
    rare[p] = 0;
    sums.pairs[p] = _mm512_setzero_si512();
    if (2 * p >= blocks) continue;
    const std::uint64_t mask = pair_mask(blocks, p);
    const __m512i pair = load_part(codes + p * kPairCodes, mask);
    rare[p] = rare_codes(pair) & mask;
    sums.pairs[p] = dot(words_of(pair), x[p]);
  }
}

/// One dword for each block.
inline void add_up_group(const GroupSums& sums, std::int32_t* dots) {
  const auto& p = sums.pairs;
  // The sums of a pair's blocks lie in the lower and in the upper half.
  const __m512i halves = sum_parts(sum_quads(p[0], p[1], p[2], p[3]), sum_quads(p[4], p[5], p[6], p[7]));
  const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  store(dots, _mm512_permutexvar_epi32(order, halves));
}

/// `blocks` blocks of weights, which are one weight row or two.
void row_dots(const Row& x, const std::uint8_t* codes, std::size_t blocks, std::int32_t* dots,
              std::uint64_t* rare) {
  const std::size_t whole = blocks / kGroup, rest = blocks % kGroup;
  const PairWords* words = x.words.data();
  GroupSums sums;
  // A group is added up while the next one is multiplied: one after the other would wait for the last
  // products.
  for (std::size_t g = 0; g < whole; ++g, words += kPairs, codes += kGroupCodes, rare += kPairs) {
    if (g > 0) add_up_group(sums, dots + (g - 1) * kGroup);
    prefetch_bytes(codes + kPrefetch, kGroupCodes);
    multiply_group(words, codes, sums, rare);
  }
  if (whole > 0) add_up_group(sums, dots + (whole - 1) * kGroup);
  if (rest == 0) return;
  prefetch_bytes(codes + kPrefetch, rest * kBlock);
  multiply_last(words, codes, rest, sums, rare);
  add_up_group(sums, dots + whole * kGroup);
}

/// Several activation rows: a group's words are kept in the first-level cache for all of them. `at` is the
/// weight row's place in the dots.
void rows_dots(std::span<const Row> x, const std::uint8_t* codes, std::size_t blocks, std::size_t at,
               Tile& tile) {
  std::uint64_t* rare = tile.rare.data();
  for (std::size_t g = 0; g * kGroup < blocks; ++g, codes += kGroupCodes, rare += kPairs) {
    const std::size_t here = std::min(kGroup, blocks - g * kGroup);
    prefetch_bytes(codes + kPrefetch, here * kBlock);
    Words words[kPairs];
    for (std::size_t p = 0; p < kPairs; ++p) {
      const std::uint64_t mask = pair_mask(here, p);
      const __m512i pair = load_part(codes + p * kPairCodes, mask);
      rare[p] = rare_codes(pair) & mask;
      words[p] = words_of(pair);
    }
    for (std::size_t m = 0; m < x.size(); ++m) {
      const PairWords* const row = x[m].words.data() + g * kPairs;
      GroupSums sums;
#pragma GCC unroll 8
      for (std::size_t p = 0; p < kPairs; ++p) sums.pairs[p] = dot(words[p], row[p]);
      add_up_group(sums, tile.sums[m].dots.data() + at + g * kGroup);
    }
  }
}

/// sum(8 l t) of `blocks` blocks of weights, to their lanes of the corrections.
void add_rests(const Row& x, const std::uint8_t* codes, std::size_t blocks, std::int32_t* corrections) {
  for (const Rest& rest : x.rests) {
    if (rest.k >= blocks * kBlock) break;
    corrections[x.places[rest.k / kBlock]] += rest.value * kRounded[codes[rest.k]];
  }
  for (std::size_t i = 0; i < x.rest_pairs.size() && 2 * x.rest_pairs[i] < blocks; ++i) {
    const std::size_t pair = x.rest_pairs[i];
    const __m512i weights = load_part(codes + pair * kPairCodes, first_bytes((blocks - 2 * pair) * kBlock));
    const __m512i sums = dot(words_of(weights), x.rest_words[i]);
    corrections[x.places[2 * pair]] += 8 * _mm512_mask_reduce_add_epi32(0x00FF, sums);
    corrections[x.places[2 * pair + 1]] += 8 * _mm512_mask_reduce_add_epi32(0xFF00, sums);
  }
}

/// Appends a row's pairs with rare codes to the tile's; without a branch, which few would be predicted.
inline std::size_t list_rare_pairs(std::size_t pairs, std::size_t first, std::size_t listed, Tile& tile) {
  for (std::size_t pair = 0; pair < pairs; pair += 8) {
    const __m512i found = load(tile.rare.data() + pair);
    const __mmask8 which = _mm512_test_epi64_mask(found, found);
    const __m512i numbers = _mm512_add_epi64(
        _mm512_set1_epi64(static_cast<std::int64_t>(first) + static_cast<std::int64_t>(pair)),
        _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    store(tile.listed_pairs.data() + listed, _mm512_maskz_compress_epi64(which, numbers));
    store(tile.listed_codes.data() + listed, _mm512_maskz_compress_epi64(which, found));
    listed += static_cast<std::size_t>(std::popcount(which));
  }
  return listed;
}

/// sum(a r) of the listed pairs. False when a code is NaN.
bool add_remainders(std::span<const Row> x, const std::uint8_t* codes, std::size_t k, std::size_t listed,
                    Tile& tile) {
  const std::size_t pairs = x[0].groups * kPairs;
  bool numbers = true;
  for (std::size_t i = 0; i < listed; ++i) {
    const std::size_t row = tile.listed_pairs[i] / pairs * x[0].copies, pair = tile.listed_pairs[i] % pairs;
    for (std::uint64_t rare = tile.listed_codes[i]; rare != 0; rare &= rare - 1) {
      const std::size_t at = pair * kPairCodes + static_cast<std::size_t>(std::countr_zero(rare));
      const std::uint8_t code = codes[row * k + at];
      numbers &= (code & 0x7F) != 0x7F;
      const std::size_t place = x[0].places[at / kBlock] + row;
      for (std::size_t m = 0; m < x.size(); ++m)
        tile.sums[m].corrections[place] += x[m].values[at] * kRemainders[code];
    }
  }
  return numbers;
}

/// Reads `count` <= kLanes weight rows. False when a weight is NaN.
DSV41_OUT_OF_LINE bool read_tile(std::span<const Row> x, const std::uint8_t* codes, std::size_t k,
                                 std::size_t count, Tile& tile) {
  const std::size_t pairs = x[0].groups * kPairs, copies = x[0].copies, distance = dots_distance(x[0]);
  for (std::size_t m = 0; m < x.size(); ++m)
    std::fill_n(tile.sums[m].corrections.begin(), x[0].blocks * kLanes, 0);
  std::size_t listed = 0;
  for (std::size_t r = 0; r < count; r += copies) {
    const std::uint8_t* const row = codes + r * k;
    const std::size_t blocks = std::min(copies, count - r) * x[0].blocks;
    if (x.size() == 1)
      row_dots(x[0], row, blocks, tile.sums[0].dots.data() + r * distance, tile.rare.data());
    else
      rows_dots(x, row, blocks, r * distance, tile);
    listed = list_rare_pairs(ceil_div(blocks, kGroup) * kPairs, r / copies * pairs, listed, tile);
    for (std::size_t m = 0; m < x.size(); ++m)
      add_rests(x[m], row, blocks, tile.sums[m].corrections.data() + r);
  }
  return add_remainders(x, codes, k, listed, tile);
}

/// Adds a block of sixteen weight rows: RN32 of the exact dot products, times their scale.
inline __m512 add_block(__m512 sum, __m512i dots, const std::int32_t* corrections, double factor,
                        float scale) {
  const __m512d wide_factor = _mm512_set1_pd(factor);
  const __m512d low = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(dots)), wide_factor,
                                      _mm512_cvtepi32_pd(load32(corrections)));
  const __m512d high = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(dots, 1)), wide_factor,
                                       _mm512_cvtepi32_pd(load32(corrections + 8)));
  const __m512 d = _mm512_mul_ps(join_floats(low, high), _mm512_set1_ps(0x1p-18f));
  return _mm512_add_ps(sum, _mm512_mul_ps(d, _mm512_set1_ps(scale)));
}

/// The features of a tile, one in each lane: their scaled block products, added in ascending order.
DSV41_OUT_OF_LINE __m512 add_blocks(const Row& x, const TileSums& tile, const float* scale,
                                    std::size_t count) {
  const std::uint8_t* rows[kLanes];  // lanes beyond the tile repeat its last row
  for (std::size_t r = 0; r < kLanes; ++r)
    rows[r] =
        reinterpret_cast<const std::uint8_t*>(tile.dots.data() + std::min(r, count - 1) * dots_distance(x));
  __m512 sum = _mm512_setzero_ps();
  const double* const factor = x.factor.data();
  const std::int32_t* const corrections = tile.corrections.data();
  const auto whole = x.blocks / 4 * 4;
  __m512i dots[4];
  for (std::size_t b = 0; b < whole; b += 4) {
    transpose_dwords(rows, b * sizeof(std::int32_t), dots);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i)
      sum = add_block(sum, dots[i], corrections + (b + i) * kLanes, factor[b + i], scale[b + i]);
  }
  if (whole < x.blocks) transpose_dwords(rows, whole * sizeof(std::int32_t), dots);
  for (std::size_t b = whole; b < x.blocks; ++b)
    sum = add_block(sum, dots[b - whole], corrections + b * kLanes, factor[b], scale[b]);
  return sum;
}

}  // namespace

void linear_fp8_few(const QuantizedRows& rows, const Fp8Matrix& w, Range range, BFloat16* out) {
  static thread_local std::vector<Row> storage;
  static thread_local std::vector<float> scale;  // [rows][blocks]: RN32(s_x * s_w)
  static thread_local Tile tile;
  if (storage.size() < rows.rows) storage.resize(rows.rows);
  const std::span<const Row> x(storage.data(), rows.rows);
  const std::size_t blocks = w.k / kBlock;
  for (std::size_t m = 0; m < rows.rows; ++m)
    storage[m].set(rows.codes + m * w.k, rows.scales + m * blocks, w.k);
  scale.resize(rows.rows * blocks);
  tile.reserve(rows.rows, x[0].groups);
  std::size_t scale_row = ~std::size_t{0};
  bool numbers = true;
  for (std::size_t n = range.begin, count; n < range.end; n += count) {
    count = std::min({kLanes, range.end - n, kBlock - n % kBlock});  // features that share their scales
    if (scale_row != n / kBlock) {
      scale_row = n / kBlock;
      const std::uint8_t* const scales = w.scales + scale_row * blocks;
      numbers = !holds_e8m0_nan(scales, blocks);
      for (std::size_t m = 0; m < rows.rows; ++m)
        for (std::size_t b = 0; b < blocks; ++b)
          scale[m * blocks + b] = x[m].scale[b] * decode_e8m0(scales[b]);
    }
    if (!numbers || !read_tile(x, w.codes + n * w.k, w.k, count, tile)) {
      plain_ops().linear_fp8(rows, w, {n, n + count}, out);  // NaN spreads as the definition says
      continue;
    }
    for (std::size_t m = 0; m < rows.rows; ++m)
      store_bfloat16(out + m * w.n + n, count,
                     add_blocks(x[m], tile.sums[m], scale.data() + m * blocks, count));
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
