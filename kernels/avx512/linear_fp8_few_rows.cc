// FP8 products of one or two activation rows with AVX-512 VNNI (docs/numerics.md 1): every weight row is
// read once, in order, and decoded once for both.
//
// Activations are h * 2^s + l (fp8_activations.h), weights 8 t + r (fp8_codes.h), in units of 2^-9. A block's
// exact dot product is 2^(s+3) * sum(h t) + C with the corrections C = sum(8 l t) + sum(a r), which have few
// terms: the sum is the vector loop, the corrections are added up aside. Sixteen weight rows, a tile, are
// rounded, scaled and added up together, one in each lane.
#include <algorithm>
#include <array>
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

constexpr std::size_t kPairs = kGroup / 2;      // a vector of codes is a pair of blocks
constexpr std::size_t kPairCodes = 2 * kBlock;  // 64
constexpr std::size_t kGroupCodes = kGroup * kBlock;
constexpr std::size_t kQuads = kGroup / 4;  // four blocks share a mask of rare codes
// Memory must not rest while a tile is corrected and added up: weights are fetched ahead in proportion to
// time, this part of them while they are read, an eighth with each of the others.
constexpr std::size_t kFetchedLines = 6;  // of eight
constexpr std::size_t kFewRests = 5;      // of a pair: more are summed as a second word

/// 64 words in the order of Words.
struct alignas(64) PairWords {
  std::int16_t values[kPairCodes];
};

struct Rest {
  std::uint32_t k, place;  // place: of the block in Tile::corrections
  std::int32_t value;
};

/// An activation row, prepared. Blocks beyond blocks * copies of the last group are zero.
struct Row {
  std::vector<PairWords> words;           // [groups * kPairs]: h
  std::vector<std::int32_t> values;       // [copies * K]: a
  std::vector<std::int32_t> shift;        // [groups * kGroup]: s + 3
  std::vector<float> scale;               // [blocks, to whole vectors]: s_x
  std::vector<Rest> rests;                // of pairs that have few
  std::vector<std::uint32_t> rest_pairs;  // the others
  std::vector<PairWords> rest_words;      // [rest_pairs]
};

/// The activation rows. Where they end in the middle of a group, two weight rows are whole groups again: they
/// are read as one, with the activations standing twice (copies = 2).
struct Activations {
  std::size_t blocks = 0, copies = 1, groups = 0;
  std::vector<std::uint32_t> places;  // [groups * kGroup]: of a block in Tile::corrections
  std::array<Row, kFewFp8Rows> rows;
  PreparedName name;  // of the QuantizedRows

  void set(const QuantizedRows& x);
  /// From the dots of a weight row of a tile to those of the next.
  std::size_t distance() const { return copies == 1 ? groups * kGroup : blocks; }

 private:
  void set_row(const std::uint8_t* codes, const std::uint8_t* scales, Row& row) const;
  void set_pair(std::size_t pair, std::size_t count, Row& row) const;
};

void Activations::set(const QuantizedRows& x) {
  if (name.is(x.name)) return;
  blocks = x.k / kBlock;
  copies = blocks % kGroup == kGroup / 2 ? 2 : 1;
  groups = ceil_div(blocks * copies, kGroup);
  places.resize(groups * kGroup);
  for (std::size_t b = 0; b < places.size(); ++b)
    places[b] = static_cast<std::uint32_t>(b % blocks * kLanes + b / blocks);
  for (std::size_t r = 0; r < x.rows; ++r) set_row(x.codes + r * x.k, x.scales + r * blocks, rows[r]);
  name.set(x.name);
}

void Activations::set_row(const std::uint8_t* codes, const std::uint8_t* scales, Row& row) const {
  const std::size_t k = blocks * kBlock, all = blocks * copies;
  row.words.resize(groups * kPairs);
  row.values.resize(groups * kGroupCodes);
  row.shift.assign(groups * kGroup, 3);
  row.scale.resize(ceil_div(blocks, kLanes) * kLanes);
  row.rests.clear(), row.rest_pairs.clear(), row.rest_words.clear();
  const auto behind = row.values.begin() + static_cast<std::ptrdiff_t>(k);
  for (std::size_t i = 0; i < k; i += 16) store(row.values.data() + i, integers_of(codes + i));
  std::fill(behind, row.values.end(), 0);
  if (copies == 2) std::copy_n(row.values.begin(), k, behind);
  for (std::size_t b = 0; b < blocks; ++b) row.scale[b] = decode_e8m0(scales[b]);
  for (std::size_t pair = 0; pair < groups * kPairs; ++pair)
    set_pair(pair, std::min<std::size_t>(2, all - std::min(all, 2 * pair)), row);
}

/// `count` of the pair's blocks are part of the row.
void Activations::set_pair(std::size_t pair, std::size_t count, Row& row) const {
  row.words[pair] = {};
  if (count == 0) return;
  PairWords rest;
  std::size_t rest_count = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int32_t* const a = row.values.data() + (2 * pair + i) * kBlock;
    const SplitBlock block = split_block({load(a), load(a + 16)});
    for (const __m512i& low : block.low)
      rest_count +=
          static_cast<std::size_t>(std::popcount(static_cast<unsigned>(_mm512_test_epi32_mask(low, low))));
    store_words(row.words[pair].values + i * 16, block.high, kBlock);
    store_words(rest.values + i * 16, block.low, kBlock);
    row.shift[2 * pair + i] = block.shift + 3;
  }
  if (rest_count > kFewRests) {
    row.rest_pairs.push_back(static_cast<std::uint32_t>(pair));
    row.rest_words.push_back(rest);
  } else if (rest_count > 0) {
    for (std::size_t i = 0; i < kPairCodes; ++i)
      if (const std::int32_t value = rest.values[place_of_word(i)]; value != 0)
        row.rests.push_back(
            {static_cast<std::uint32_t>(pair * kPairCodes + i), places[2 * pair + i / kBlock], value});
  }
}

/// What is left of sixteen weight rows when they have been read.
struct Tile {
  struct Sums {                             // with one activation row
    std::vector<std::int32_t> dots;         // [kLanes][distance between rows]: sum(h t)
    std::vector<std::int32_t> corrections;  // [blocks][kLanes]; zero between uses
  };
  std::array<Sums, kFewFp8Rows> sums;
  std::vector<std::uint64_t> rare;    // [weight rows, as they are read][groups * kQuads]
  std::vector<std::uint32_t> listed;  // indices of the masks that name any code

  void reserve(const Activations& x, std::size_t rows) {
    const std::size_t quads = kLanes * x.groups * kQuads + kLanes;
    if (rare.size() < quads) rare.resize(quads), listed.resize(quads);
    for (std::size_t r = 0; r < rows; ++r) {
      if (sums[r].corrections.size() >= kLanes * x.groups * kGroup) continue;
      sums[r].dots.resize((kLanes + 1) * x.groups * kGroup);
      sums[r].corrections.resize(kLanes * x.groups * kGroup);
    }
  }
};

/// Four dwords for each half of a pair's two blocks.
inline __m512i dot(const Words& w, const PairWords& x) {
  return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(_mm512_setzero_si512(), w.first, load(x.values)), w.last,
                             load(x.values + kBlock));
}

/// Sums of a group, four dwords for each half block.
struct GroupSums {
  __m512i pairs[kPairs];
};

/// A whole group.
template <std::size_t Rows>
inline void multiply_group(const PairWords* const (&x)[Rows], std::size_t first, const std::uint8_t* codes,
                           GroupSums (&sums)[Rows], std::uint64_t* rare) {
#pragma GCC unroll 4
  for (std::size_t p = 0; p < kPairs; p += 2) {
    const Decoded a = decode_codes(load(codes + p * kPairCodes));
    const Decoded b = decode_codes(load(codes + (p + 1) * kPairCodes));
    rare[p / 2] = rare_codes(_mm512_min_epu8(a.order, b.order));
#pragma GCC unroll 4
    for (std::size_t r = 0; r < Rows; ++r) {
      sums[r].pairs[p] = dot(a.words, x[r][first + p]);
      sums[r].pairs[p + 1] = dot(b.words, x[r][first + p + 1]);
    }
  }
}

/// The last group, of which only some blocks are part of the row.
template <std::size_t Rows>
inline void multiply_last(const PairWords* const (&x)[Rows], std::size_t first, const std::uint8_t* codes,
                          std::size_t blocks, GroupSums (&sums)[Rows], std::uint64_t* rare) {
  std::fill_n(rare, kQuads, 0);
#pragma GCC unroll 8
  for (std::size_t p = 0; p < kPairs; ++p) {
    const std::uint64_t mask = first_bytes(blocks * kBlock - std::min(blocks * kBlock, p * kPairCodes));
    const Decoded decoded = decode_codes(load_part(codes + p * kPairCodes, mask));
    rare[p / 2] |= rare_codes(decoded.order) & mask;
#pragma GCC unroll 4
    for (std::size_t r = 0; r < Rows; ++r) sums[r].pairs[p] = dot(decoded.words, x[r][first + p]);
  }
}

/// One dword for each block.
template <std::size_t Rows>
inline void add_up_group(const GroupSums (&sums)[Rows], std::int32_t* const (&dots)[Rows],
                         std::size_t group) {
  const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
#pragma GCC unroll 4
  for (std::size_t r = 0; r < Rows; ++r) {
    const auto& p = sums[r].pairs;
    // The sums of a pair's blocks lie in the lower and in the upper half.
    const __m512i halves = sum_parts(sum_quads(p[0], p[1], p[2], p[3]), sum_quads(p[4], p[5], p[6], p[7]));
    store(dots[r] + group * kGroup, _mm512_permutexvar_epi32(order, halves));
  }
}

/// `blocks` blocks of weights, which are one weight row or two; the sums go to `place` of the tile's dots.
template <std::size_t Rows>
DSV41_OUT_OF_LINE void row_dots(const Activations& x, const std::uint8_t* codes, std::size_t blocks,
                                Tile& tile, std::size_t place, std::uint64_t* rare,
                                const std::uint8_t* ahead) {
  const std::size_t whole = blocks / kGroup, rest = blocks % kGroup;
  const PairWords* words[Rows];
  std::int32_t* dots[Rows];
  for (std::size_t r = 0; r < Rows; ++r)
    words[r] = x.rows[r].words.data(), dots[r] = tile.sums[r].dots.data() + place;
  GroupSums sums[Rows];
  // A group is added up while the next one is multiplied: one after the other would wait for the last
  // products.
  for (std::size_t g = 0; g < whole; ++g, codes += kGroupCodes, rare += kQuads) {
    if (g > 0) add_up_group(sums, dots, g - 1);
    prefetch_bytes(ahead, kFetchedLines * 64);
    ahead += kFetchedLines * 64;
    multiply_group(words, g * kPairs, codes, sums, rare);
  }
  if (whole > 0) add_up_group(sums, dots, whole - 1);
  if (rest == 0) return;
  prefetch_bytes(ahead, rest * kBlock / 8 * kFetchedLines);
  multiply_last(words, whole * kPairs, codes, rest, sums, rare);
  add_up_group(sums, dots, whole);
}

/// sum(8 l t) of `blocks` blocks of weights, to their lanes of the corrections.
void add_rests(const Activations& x, const Row& row, const std::uint8_t* codes, std::size_t blocks,
               std::int32_t* corrections) {
  for (const Rest& rest : row.rests) {
    if (rest.k >= blocks * kBlock) break;
    corrections[rest.place] += rest.value * kRounded[codes[rest.k]];
  }
  for (std::size_t i = 0; i < row.rest_pairs.size() && 2 * row.rest_pairs[i] < blocks; ++i) {
    const std::size_t pair = row.rest_pairs[i];
    const __m512i weights = load_part(codes + pair * kPairCodes, first_bytes((blocks - 2 * pair) * kBlock));
    const __m512i sums = dot(decode_codes(weights).words, row.rest_words[i]);
    corrections[x.places[2 * pair]] += 8 * _mm512_mask_reduce_add_epi32(0x00FF, sums);
    corrections[x.places[2 * pair + 1]] += 8 * _mm512_mask_reduce_add_epi32(0xFF00, sums);
  }
}

/// Lines of memory that are still to be fetched.
struct Ahead {
  const std::uint8_t *next, *end;

  std::size_t lines() const { return static_cast<std::size_t>(end - next) / 64; }
  void fetch(std::size_t lines) {
    if (next >= end) return;
    prefetch_bytes(next, lines * 64);
    next += lines * 64;
  }
  void fetch_rest() {
    while (next < end) fetch(1);
  }
};

/// sum(a r) of the rare codes of `count` weight rows. False when one is NaN.
template <std::size_t Rows>
bool add_remainders(const Activations& x, const std::uint8_t* codes, std::size_t count, Tile& tile,
                    Ahead ahead) {
  const std::size_t quads = x.groups * kQuads, row_codes = x.copies * x.blocks * kBlock;
  const std::size_t all_codes = count * x.blocks * kBlock;
  const std::uint64_t reciprocal = (std::uint64_t{1} << 40) / quads + 1;  // divides less than 2^20 exactly
  const std::size_t listed =
      list_masks(tile.rare.data(), ceil_div(count, x.copies) * quads, tile.listed.data());
  const std::size_t step = ceil_div(ahead.lines(), std::max<std::size_t>(listed, 1));
  bool numbers = true;
  for (std::size_t i = 0; i < listed; ++i) {
    ahead.fetch(step);
    const std::size_t index = tile.listed[i], row = index * reciprocal >> 40;
    const std::size_t first = (index - row * quads) * 2 * kPairCodes;
    for (std::uint64_t rare = tile.rare[index]; rare != 0; rare &= rare - 1) {
      // In one pair of blocks or in both; what is not rare has no remainder.
      std::size_t k = first + static_cast<std::size_t>(std::countr_zero(rare));
      for (std::size_t pair = 0; pair < 2 && row * row_codes + k < all_codes; ++pair, k += kPairCodes) {
        const std::uint8_t code = codes[row * row_codes + k];
        numbers &= (code & 0x7F) != 0x7F;
        const std::size_t place = x.places[k / kBlock] + row * x.copies;
#pragma GCC unroll 4
        for (std::size_t r = 0; r < Rows; ++r)
          tile.sums[r].corrections[place] += x.rows[r].values[k] * kRemainders[code];
      }
    }
  }
  ahead.fetch_rest();
  return numbers;
}

/// From a tile to what is fetched ahead when it is begun: kPrefetch is left of that when it has been read.
inline std::size_t first_ahead(const Activations& x) {
  constexpr std::size_t kShortest = 14336;
  return std::max(kShortest, kPrefetch + x.blocks * (8 - kFetchedLines) * 64);
}

/// Reads `count` <= kLanes weight rows. False when a weight is NaN.
template <std::size_t Rows>
bool read_tile(const Activations& x, const std::uint8_t* codes, std::size_t count, Tile& tile) {
  const std::size_t quads = x.groups * kQuads;
  for (std::size_t w = 0; w < count; w += x.copies) {
    const std::uint8_t* const row = codes + w * x.blocks * kBlock;
    const std::size_t blocks = std::min(x.copies, count - w) * x.blocks;
    std::uint64_t* const rare = tile.rare.data() + w / x.copies * quads;
    row_dots<Rows>(x, row, blocks, tile, w * x.distance(), rare,
                   codes + first_ahead(x) + w * x.blocks * (kBlock / 8) * kFetchedLines);
    std::fill(rare + ceil_div(blocks, kGroup) * kQuads, rare + quads, 0);
    for (std::size_t r = 0; r < Rows; ++r)
      add_rests(x, x.rows[r], row, blocks, tile.sums[r].corrections.data() + w);
  }
  const std::size_t eighth = count * x.blocks * (kBlock / 8);  // bytes
  const std::uint8_t* const ahead = codes + first_ahead(x) + kFetchedLines * eighth;
  return add_remainders<Rows>(x, codes, count, tile, {ahead, ahead + eighth});
}

/// The features of a tile, one in each lane: their scaled block products with activation row `r`, added in
/// ascending order. scale: s_x * s_w, or in the fast case, where scales_exactly() of all of them, that times
/// kUnit. `largest` takes the magnitudes of the corrections in. Four blocks fetch `lines` of what is ahead.
template <bool Fast>
DSV41_OUT_OF_LINE __m512 add_blocks(const Activations& x, std::size_t r, const Tile& tile, const float* scale,
                                    std::size_t count, Ahead& ahead, std::size_t lines, __m512i& largest) {
  const Tile::Sums& sums = tile.sums[r];
  const std::uint8_t* rows[kLanes];  // lanes beyond the tile repeat its last row
  for (std::size_t w = 0; w < kLanes; ++w)
    rows[w] = reinterpret_cast<const std::uint8_t*>(sums.dots.data() + std::min(w, count - 1) * x.distance());
  __m512 sum = _mm512_setzero_ps();
  __m512i dots[4];
  for (std::size_t first = 0; first < x.blocks; first += 4) {
    transpose_dwords(rows, first * sizeof(std::int32_t), dots);
    ahead.fetch(lines);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t b = first + i;
      if (b >= x.blocks) break;
      const __m512i correction = load(sums.corrections.data() + b * kLanes);
      const __m512i shift = _mm512_set1_epi32(x.rows[r].shift[b]);
      const __m512 factor =
          _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(shift, _mm512_set1_epi32(127)), 23));
      if constexpr (Fast) {
        largest = _mm512_max_epi32(largest, _mm512_abs_epi32(correction));
        sum = _mm512_fmadd_ps(rounded_dot(dots[i], correction, shift, factor), _mm512_set1_ps(scale[b]), sum);
      } else {
        const __m512 d = _mm512_mul_ps(rounded_dot_wide(dots[i], correction, factor), _mm512_set1_ps(kUnit));
        sum = _mm512_add_ps(sum, _mm512_mul_ps(d, _mm512_set1_ps(scale[b])));
      }
    }
  }
  return sum;
}

/// The scales of sixteen or thirty-two features that share them.
struct Scales {
  struct Products {                            // with one activation row
    std::vector<float> product, unit_product;  // [blocks]: s_x * s_w, and that times kUnit
    bool exact = true;                         // scales_exactly() of all
  };
  std::array<Products, kFewFp8Rows> rows;
  bool numbers = true;  // no code is NaN

  /// The next ones are fetched ahead: nothing else would have them ready.
  void set(const Activations& x, std::size_t count, const std::uint8_t* codes) {
    prefetch_bytes(codes + x.blocks, x.blocks);
    numbers = true;
    for (std::size_t r = 0; r < count; ++r) {
      rows[r].product.resize(x.rows[r].scale.size()), rows[r].unit_product.resize(x.rows[r].scale.size());
      rows[r].exact = true;
    }
    for (std::size_t b = 0; b < x.blocks; b += kLanes) {
      const auto lanes = static_cast<__mmask16>(first_bytes(std::min(kLanes, x.blocks - b)));
      const __m128i part = _mm_maskz_loadu_epi8(lanes, codes + b);
      numbers &= _mm512_cmpgt_epi32_mask(_mm512_cvtepu8_epi32(part), _mm512_set1_epi32(254)) == 0;
      for (std::size_t r = 0; r < count; ++r) {
        const __m512 scales = _mm512_mul_ps(_mm512_loadu_ps(x.rows[r].scale.data() + b), scales_of(part));
        rows[r].exact &= scales_exactly(scales, lanes);
        _mm512_storeu_ps(rows[r].product.data() + b, scales);
        _mm512_storeu_ps(rows[r].unit_product.data() + b, _mm512_mul_ps(scales, _mm512_set1_ps(kUnit)));
      }
    }
  }
};

template <std::size_t Rows>
void multiply_rows(const QuantizedRows& rows, const Fp8Matrix& w, Range range, BFloat16* out) {
  static thread_local Activations x;
  static thread_local Tile tile;
  static thread_local Scales scales;
  constexpr std::size_t kLines = ceil_div(4, Rows);  // the rest of what is ahead, with every four blocks
  x.set(rows);
  tile.reserve(x, Rows);
  std::size_t scale_row = ~std::size_t{0};
  for (std::size_t n = range.begin, count; n < range.end; n += count) {
    count = std::min({kLanes, range.end - n, kBlock - n % kBlock});  // features that share their scales
    if (scale_row != n / kBlock) {
      scale_row = n / kBlock;
      scales.set(x, Rows, w.scales + scale_row * x.blocks);
    }
    const std::uint8_t* const codes = w.codes + n * w.k;
    if (!scales.numbers || !read_tile<Rows>(x, codes, count, tile)) {
      plain_ops().linear_fp8(rows, w, {n, n + count}, out);  // NaN spreads as the definition says
    } else {
      const std::uint8_t* const begin = codes + first_ahead(x) + count * (w.k / 8) * (kFetchedLines + 1);
      Ahead ahead{begin, begin + count * (w.k / 8)};
      for (std::size_t r = 0; r < Rows; ++r) {
        const Scales::Products& scale = scales.rows[r];
        __m512 sums;
        __m512i largest = _mm512_setzero_si512();
        if (scale.exact)
          sums = add_blocks<true>(x, r, tile, scale.unit_product.data(), count, ahead, kLines, largest);
        if (!scale.exact || _mm512_reduce_max_epi32(largest) > kLargestCorrection)
          sums = add_blocks<false>(x, r, tile, scale.product.data(), count, ahead, kLines, largest);
        store_bfloat16(out + r * w.n + n, count, sums);
      }
    }
    for (std::size_t r = 0; r < Rows; ++r)
      std::fill_n(tile.sums[r].corrections.begin(), x.blocks * kLanes, 0);
  }
}

}  // namespace

void linear_fp8_few_rows(const QuantizedRows& rows, const Fp8Matrix& w, Range range, BFloat16* out) {
  if (rows.rows == 1)
    multiply_rows<1>(rows, w, range, out);
  else
    multiply_rows<2>(rows, w, range, out);
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
