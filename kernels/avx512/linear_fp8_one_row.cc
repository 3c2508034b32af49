// FP8 products of one activation row with AVX-512 VNNI (docs/numerics.md 1): every weight row is read once,
// in order.
//
// Activations are h * 2^s + l (fp8_activations.h), weights 8 t + r (fp8_codes.h), in units of 2^-9. A block's
// exact dot product is 2^(s+3) * sum(h t) + C with the corrections C = sum(8 l t) + sum(a r), which have few
// terms: the sum is the vector loop, the corrections are added up aside. Sixteen weight rows, a tile, are
// rounded, scaled and added up together, one in each lane.
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

/// The activation row, prepared. Where rows end in the middle of a group, two of them are whole groups again:
/// they are read as one, with the activations standing twice (copies = 2). Blocks beyond blocks * copies of
/// the last group are zero.
struct Row {
  std::size_t blocks = 0, copies = 1, groups = 0;
  std::vector<PairWords> words;           // [groups * kPairs]: h
  std::vector<std::int32_t> values;       // [copies * K]: a
  std::vector<std::int32_t> shift;        // [groups * kGroup]: s + 3
  std::vector<float> scale;               // [blocks, to whole vectors]: s_x
  std::vector<std::uint32_t> places;      // [groups * kGroup]: of a block in Tile::corrections
  std::vector<Rest> rests;                // of pairs that have few
  std::vector<std::uint32_t> rest_pairs;  // the others
  std::vector<PairWords> rest_words;      // [rest_pairs]
  PreparedName name;                      // of the QuantizedRows

  void set(const QuantizedRows& x);
  /// From the dots of a weight row of a tile to those of the next.
  std::size_t distance() const { return copies == 1 ? groups * kGroup : blocks; }

 private:
  void set_pair(std::size_t pair, std::size_t count);
};

void Row::set(const QuantizedRows& x) {
  if (name.is(x.name)) return;
  blocks = x.k / kBlock;
  copies = blocks % kGroup == kGroup / 2 ? 2 : 1;
  groups = ceil_div(blocks * copies, kGroup);
  words.resize(groups * kPairs);
  values.resize(groups * kGroupCodes);
  shift.assign(groups * kGroup, 3);
  scale.resize(ceil_div(blocks, kLanes) * kLanes);
  places.resize(groups * kGroup);
  rests.clear(), rest_pairs.clear(), rest_words.clear();
  for (std::size_t i = 0; i < x.k; i += 16) store(values.data() + i, integers_of(x.codes + i));
  std::fill(values.begin() + static_cast<std::ptrdiff_t>(x.k), values.end(), 0);
  if (copies == 2) std::copy_n(values.begin(), x.k, values.begin() + static_cast<std::ptrdiff_t>(x.k));
  for (std::size_t b = 0; b < blocks; ++b) scale[b] = decode_e8m0(x.scales[b]);
  for (std::size_t b = 0; b < groups * kGroup; ++b)
    places[b] = static_cast<std::uint32_t>(b % blocks * kLanes + b / blocks);
  const std::size_t all = blocks * copies;
  for (std::size_t pair = 0; pair < groups * kPairs; ++pair)
    set_pair(pair, std::min<std::size_t>(2, all - std::min(all, 2 * pair)));
  name.set(x.name);
}

/// `count` of the pair's blocks are part of the row.
void Row::set_pair(std::size_t pair, std::size_t count) {
  words[pair] = {};
  if (count == 0) return;
  PairWords rest;
  std::size_t rest_count = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int32_t* const a = values.data() + (2 * pair + i) * kBlock;
    const SplitBlock block = split_block({load(a), load(a + 16)});
    for (const __m512i& low : block.low)
      rest_count +=
          static_cast<std::size_t>(std::popcount(static_cast<unsigned>(_mm512_test_epi32_mask(low, low))));
    store_words(words[pair].values + i * 16, block.high, kBlock);
    store_words(rest.values + i * 16, block.low, kBlock);
    shift[2 * pair + i] = block.shift + 3;
  }
  if (rest_count > kFewRests) {
    rest_pairs.push_back(static_cast<std::uint32_t>(pair));
    rest_words.push_back(rest);
  } else if (rest_count > 0) {
    for (std::size_t i = 0; i < kPairCodes; ++i)
      if (const std::int32_t value = rest.values[place_of_word(i)]; value != 0)
        rests.push_back(
            {static_cast<std::uint32_t>(pair * kPairCodes + i), places[2 * pair + i / kBlock], value});
  }
}

/// What is left of sixteen weight rows when they have been read.
struct Tile {
  std::vector<std::int32_t> dots;         // [kLanes][distance between rows]: sum(h t)
  std::vector<std::int32_t> corrections;  // [blocks][kLanes]; zero between uses
  std::vector<std::uint64_t> rare;        // [weight rows, as they are read][groups * kQuads]
  std::vector<std::uint32_t> listed;      // indices of the masks that name any code

  void reserve(const Row& x) {
    const std::size_t quads = kLanes * x.groups * kQuads;
    if (rare.size() >= quads + kLanes) return;
    dots.resize((kLanes + 1) * x.groups * kGroup);
    corrections.resize(kLanes * x.groups * kGroup);
    rare.resize(quads + kLanes);
    listed.resize(quads + kLanes);
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
inline void multiply_group(const PairWords* x, const std::uint8_t* codes, GroupSums& sums,
                           std::uint64_t* rare) {
#pragma GCC unroll 4
  for (std::size_t p = 0; p < kPairs; p += 2) {
    const Decoded a = decode_codes(load(codes + p * kPairCodes));
    const Decoded b = decode_codes(load(codes + (p + 1) * kPairCodes));
    rare[p / 2] = rare_codes(_mm512_min_epu8(a.order, b.order));
    sums.pairs[p] = dot(a.words, x[p]);
    sums.pairs[p + 1] = dot(b.words, x[p + 1]);
  }
}

/// The last group, of which only some blocks are part of the row.
inline void multiply_last(const PairWords* x, const std::uint8_t* codes, std::size_t blocks, GroupSums& sums,
                          std::uint64_t* rare) {
  std::fill_n(rare, kQuads, 0);
#pragma GCC unroll 8
  for (std::size_t p = 0; p < kPairs; ++p) {
    const std::uint64_t mask = first_bytes(blocks * kBlock - std::min(blocks * kBlock, p * kPairCodes));
    const Decoded decoded = decode_codes(load_part(codes + p * kPairCodes, mask));
    rare[p / 2] |= rare_codes(decoded.order) & mask;
    sums.pairs[p] = dot(decoded.words, x[p]);
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
DSV41_OUT_OF_LINE void row_dots(const Row& x, const std::uint8_t* codes, std::size_t blocks,
                                std::int32_t* dots, std::uint64_t* rare, const std::uint8_t* ahead) {
  const std::size_t whole = blocks / kGroup, rest = blocks % kGroup;
  const PairWords* words = x.words.data();
  GroupSums sums;
  // A group is added up while the next one is multiplied: one after the other would wait for the last
  // products.
  for (std::size_t g = 0; g < whole; ++g, words += kPairs, codes += kGroupCodes, rare += kQuads) {
    if (g > 0) add_up_group(sums, dots + (g - 1) * kGroup);
    prefetch_bytes(ahead, kFetchedLines * 64);
    ahead += kFetchedLines * 64;
    multiply_group(words, codes, sums, rare);
  }
  if (whole > 0) add_up_group(sums, dots + (whole - 1) * kGroup);
  if (rest == 0) return;
  prefetch_bytes(ahead, rest * kBlock / 8 * kFetchedLines);
  multiply_last(words, codes, rest, sums, rare);
  add_up_group(sums, dots + whole * kGroup);
}

/// sum(8 l t) of `blocks` blocks of weights, to their lanes of the corrections.
void add_rests(const Row& x, const std::uint8_t* codes, std::size_t blocks, std::int32_t* corrections) {
  for (const Rest& rest : x.rests) {
    if (rest.k >= blocks * kBlock) break;
    corrections[rest.place] += rest.value * kRounded[codes[rest.k]];
  }
  for (std::size_t i = 0; i < x.rest_pairs.size() && 2 * x.rest_pairs[i] < blocks; ++i) {
    const std::size_t pair = x.rest_pairs[i];
    const __m512i weights = load_part(codes + pair * kPairCodes, first_bytes((blocks - 2 * pair) * kBlock));
    const __m512i sums = dot(decode_codes(weights).words, x.rest_words[i]);
    corrections[x.places[2 * pair]] += 8 * _mm512_mask_reduce_add_epi32(0x00FF, sums);
    corrections[x.places[2 * pair + 1]] += 8 * _mm512_mask_reduce_add_epi32(0xFF00, sums);
  }
}

/// sum(a r) of the rare codes of `count` weight rows. False when one is NaN. `lines` are fetched from `ahead`
/// on.
bool add_remainders(const Row& x, const std::uint8_t* codes, std::size_t count, Tile& tile,
                    const std::uint8_t* ahead, std::size_t lines) {
  const std::size_t quads = x.groups * kQuads, row_codes = x.copies * x.blocks * kBlock;
  const std::size_t all_codes = count * x.blocks * kBlock;
  const std::uint64_t reciprocal = (std::uint64_t{1} << 40) / quads + 1;  // divides less than 2^20 exactly
  const std::size_t listed =
      list_masks(tile.rare.data(), ceil_div(count, x.copies) * quads, tile.listed.data());
  const std::size_t step = ceil_div(lines, std::max<std::size_t>(listed, 1)) * 64;
  const std::uint8_t* const end = ahead + lines * 64;
  bool numbers = true;
  for (std::size_t i = 0; i < listed; ++i) {
    if (ahead < end) prefetch_bytes(ahead, step), ahead += step;
    const std::size_t index = tile.listed[i], row = index * reciprocal >> 40;
    const std::size_t first = (index - row * quads) * 2 * kPairCodes;
    for (std::uint64_t rare = tile.rare[index]; rare != 0; rare &= rare - 1) {
      // In one pair of blocks or in both; what is not rare has no remainder.
      std::size_t k = first + static_cast<std::size_t>(std::countr_zero(rare));
      for (std::size_t pair = 0; pair < 2 && row * row_codes + k < all_codes; ++pair, k += kPairCodes) {
        const std::uint8_t code = codes[row * row_codes + k];
        numbers &= (code & 0x7F) != 0x7F;
        tile.corrections[x.places[k / kBlock] + row * x.copies] += x.values[k] * kRemainders[code];
      }
    }
  }
  for (; ahead < end; ahead += 64) prefetch_bytes(ahead, 64);
  return numbers;
}

/// From a tile to what is fetched ahead when it is begun: kPrefetch is left of that when it has been read.
inline std::size_t first_ahead(const Row& x) {
  constexpr std::size_t kShortest = 14336;
  return std::max(kShortest, kPrefetch + x.blocks * (8 - kFetchedLines) * 64);
}

/// Reads `count` <= kLanes weight rows. False when a weight is NaN.
bool read_tile(const Row& x, const std::uint8_t* codes, std::size_t count, Tile& tile) {
  const std::size_t quads = x.groups * kQuads;
  for (std::size_t r = 0; r < count; r += x.copies) {
    const std::uint8_t* const row = codes + r * x.blocks * kBlock;
    const std::size_t blocks = std::min(x.copies, count - r) * x.blocks;
    std::uint64_t* const rare = tile.rare.data() + r / x.copies * quads;
    row_dots(x, row, blocks, tile.dots.data() + r * x.distance(), rare,
             codes + first_ahead(x) + r * x.blocks * (kBlock / 8) * kFetchedLines);
    std::fill(rare + ceil_div(blocks, kGroup) * kQuads, rare + quads, 0);
    add_rests(x, row, blocks, tile.corrections.data() + r);
  }
  const std::size_t eighth = count * x.blocks * (kBlock / 8);  // bytes
  return add_remainders(x, codes, count, tile, codes + first_ahead(x) + kFetchedLines * eighth, eighth / 64);
}

/// The features of a tile, one in each lane: their scaled block products, added in ascending order. scale:
/// s_x * s_w, or in the fast case, where scales_exactly() of all of them, that times kUnit. `largest` takes
/// the magnitudes of the corrections in.
template <bool Fast>
DSV41_OUT_OF_LINE __m512 add_blocks(const Row& x, const Tile& tile, const float* scale, std::size_t count,
                                    const std::uint8_t* ahead, __m512i& largest) {
  const std::uint8_t* rows[kLanes];  // lanes beyond the tile repeat its last row
  for (std::size_t r = 0; r < kLanes; ++r)
    rows[r] = reinterpret_cast<const std::uint8_t*>(tile.dots.data() + std::min(r, count - 1) * x.distance());
  __m512 sum = _mm512_setzero_ps();
  __m512i dots[4];
  for (std::size_t first = 0; first < x.blocks; first += 4) {
    transpose_dwords(rows, first * sizeof(std::int32_t), dots);
    prefetch_bytes(ahead + first * 64, 4 * 64);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t b = first + i;
      if (b >= x.blocks) break;
      const __m512i correction = load(tile.corrections.data() + b * kLanes);
      const __m512i shift = _mm512_set1_epi32(x.shift[b]);
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
  std::vector<float> product, unit_product;  // [blocks]: s_x * s_w, and that times kUnit
  bool numbers = true, exact = true;         // no code is NaN; scales_exactly() of all

  /// The next ones are fetched ahead: nothing else would have them ready.
  void set(const Row& x, const std::uint8_t* codes) {
    prefetch_bytes(codes + x.blocks, x.blocks);
    product.resize(x.scale.size()), unit_product.resize(x.scale.size());
    numbers = exact = true;
    for (std::size_t b = 0; b < x.blocks; b += kLanes) {
      const auto lanes = static_cast<__mmask16>(first_bytes(std::min(kLanes, x.blocks - b)));
      const __m128i part = _mm_maskz_loadu_epi8(lanes, codes + b);
      const __m512 scales = _mm512_mul_ps(_mm512_loadu_ps(x.scale.data() + b), scales_of(part));
      numbers &= _mm512_cmpgt_epi32_mask(_mm512_cvtepu8_epi32(part), _mm512_set1_epi32(254)) == 0;
      exact &= scales_exactly(scales, lanes);
      _mm512_storeu_ps(product.data() + b, scales);
      _mm512_storeu_ps(unit_product.data() + b, _mm512_mul_ps(scales, _mm512_set1_ps(kUnit)));
    }
  }
};

}  // namespace

void linear_fp8_one_row(const QuantizedRows& row, const Fp8Matrix& w, Range range, BFloat16* out) {
  static thread_local Row x;
  static thread_local Tile tile;
  static thread_local Scales scales;
  x.set(row);
  tile.reserve(x);
  std::size_t scale_row = ~std::size_t{0};
  for (std::size_t n = range.begin, count; n < range.end; n += count) {
    count = std::min({kLanes, range.end - n, kBlock - n % kBlock});  // features that share their scales
    if (scale_row != n / kBlock) {
      scale_row = n / kBlock;
      scales.set(x, w.scales + scale_row * x.blocks);
    }
    const std::uint8_t* const codes = w.codes + n * w.k;
    if (!scales.numbers || !read_tile(x, codes, count, tile)) {
      plain_ops().linear_fp8(row, w, {n, n + count}, out);  // NaN spreads as the definition says
    } else {
      const std::uint8_t* const ahead = codes + first_ahead(x) + count * (w.k / 8) * (kFetchedLines + 1);
      __m512 sums;
      __m512i largest = _mm512_setzero_si512();
      if (scales.exact) sums = add_blocks<true>(x, tile, scales.unit_product.data(), count, ahead, largest);
      if (!scales.exact || _mm512_reduce_max_epi32(largest) > kLargestCorrection)
        sums = add_blocks<false>(x, tile, scales.product.data(), count, ahead, largest);
      store_bfloat16(out + n, count, sums);
    }
    std::fill_n(tile.corrections.begin(), x.blocks * kLanes, 0);
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
