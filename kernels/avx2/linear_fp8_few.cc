// FP8 products of one or a few activation rows with AVX2 (docs/numerics.md 1): every weight row is read once,
// in order.
//
// In units of 2^-9 an activation is h * 2^s + l, where h is a word with which the block's dot product fits 32
// bits, and the rest l is zero for nearly all elements. A weight is 8 t + r with the word t of fp8_codes.h
// and a remainder r that is zero for nearly all codes. So the exact dot product of a block is 2^(s+3) * sum(h
// t) + sum(8 l t) + sum(a r): the first sum is the vector loop, the others are corrections, and the total is
// rounded once. Scales and sums over the blocks follow the contract literally.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <vector>

#include "kernels/avx2/avx2.h"
#include "kernels/fp8_words.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/fp8_codes.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kFewRests = 4;  // of a block: more are summed as a second word
constexpr std::size_t kGroupCodes = kGroup * kBlock;

// By code, in units of 2^-9; NaN has no meaning in them.
constexpr std::array<std::int32_t, 256> kRounded = fp8_words::table_by_code<rounded_value>(),
                                        kRemainders = fp8_words::table_by_code<remainder_of>();

/// The words of a block in the order of words_of.
struct alignas(64) BlockWords {
  std::int16_t values[kBlock];
};

struct Rest {
  std::uint32_t k;
  std::int32_t value;
};

/// An activation row, prepared. Blocks beyond `blocks` of the last group are zero.
struct Row {
  std::size_t blocks = 0, groups = 0;
  std::vector<BlockWords> words;           // [groups * kGroup]: h
  std::vector<std::int32_t> values;        // [K]: a
  std::vector<std::int32_t> shift;         // [blocks]: s + 3
  std::vector<float> factor;               // [blocks]: 2^(s+3)
  std::vector<float> scale;                // [blocks]: s_x
  std::vector<Rest> rests;                 // of blocks that have few
  std::vector<std::uint32_t> rest_blocks;  // the others
  std::vector<BlockWords> rest_words;      // [rest_blocks]

  void set(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k);

 private:
  void set_block(std::size_t block);
};

void Row::set(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t k) {
  blocks = k / kBlock;
  groups = ceil_div(blocks, kGroup);
  words.resize(groups * kGroup);
  values.resize(k);
  shift.resize(blocks), factor.resize(blocks), scale.resize(blocks);
  rests.clear(), rest_blocks.clear(), rest_words.clear();
  for (std::size_t i = 0; i < k; i += 8) store(values.data() + i, integers_of(codes + i));
  for (std::size_t b = 0; b < blocks; ++b) {
    scale[b] = decode_e8m0(scales[b]);
    set_block(b);
  }
  std::fill(words.begin() + static_cast<std::ptrdiff_t>(blocks), words.end(), BlockWords{});
}

void Row::set_block(std::size_t block) {
  const std::int32_t* const a = values.data() + block * kBlock;
  __m256i v[4], sum = _mm256_setzero_si256(), bits = _mm256_setzero_si256();
  for (std::size_t i = 0; i < 4; ++i) {
    v[i] = load(a + 8 * i);
    const __m256i magnitude = _mm256_abs_epi32(v[i]);
    sum = _mm256_add_epi32(sum, magnitude);
    bits = _mm256_or_si256(bits, magnitude);
  }
  const int s = fp8_words::shift_for(sum_lanes(sum), static_cast<std::int32_t>(or_lanes(bits)));
  shift[block] = s + 3;
  factor[block] = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 3 + s) << 23);

  const __m128i count = _mm_cvtsi32_si128(s);
  const __m256i half = _mm256_set1_epi32(s == 0 ? 0 : 1 << (s - 1));
  __m256i high[4], low[4], any = _mm256_setzero_si256();
  for (std::size_t i = 0; i < 4; ++i) {
    high[i] = _mm256_sra_epi32(_mm256_add_epi32(v[i], half), count);
    low[i] = _mm256_sub_epi32(v[i], _mm256_sll_epi32(high[i], count));
    any = _mm256_or_si256(any, low[i]);
  }
  store_words(words[block].values, high);
  if (_mm256_testz_si256(any, any) != 0) return;
  std::int32_t rest[kBlock];
  for (std::size_t i = 0; i < 4; ++i) store(rest + 8 * i, low[i]);
  if (kBlock - static_cast<std::size_t>(std::count(rest, rest + kBlock, 0)) > kFewRests) {
    rest_blocks.push_back(static_cast<std::uint32_t>(block));
    store_words(rest_words.emplace_back().values, low);
    return;
  }
  for (std::size_t i = 0; i < kBlock; ++i)
    if (rest[i] != 0) rests.push_back({static_cast<std::uint32_t>(block * kBlock + i), rest[i]});
}

/// What is left of a tile of kLanes weight rows when they have been read, for one activation row.
struct TileSums {
  std::vector<std::int32_t> dots;         // [kLanes][groups * kGroup]: sum(h t)
  std::vector<std::int32_t> corrections;  // [blocks][kLanes]
};

/// Two blocks of a weight row with rare codes among them, one bit each.
struct RarePair {
  std::uint64_t codes;
  std::uint32_t row, block;
};

struct Tile {
  std::vector<TileSums> sums;
  std::vector<RarePair> listed;  // room for one more than there can be

  void reserve(std::size_t rows, std::size_t groups) {
    if (sums.size() < rows) sums.resize(rows);
    const std::size_t size = kLanes * groups * kGroup;
    for (std::size_t m = 0; m < rows; ++m) {
      if (sums[m].dots.size() >= size) continue;
      sums[m].dots.resize(size), sums[m].corrections.resize(size);
    }
    if (listed.size() < size / 2 + 1) listed.resize(size / 2 + 1);
  }
};

/// One dword for each block of a group, of the quad sums of its halves.
inline __m256i join_quads(__m256i first, __m256i second) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                          _mm256_permute2x128_si256(first, second, 0x31));
}

/// The words of a group.
struct GroupWords {
  Words blocks[kGroup];
};

/// Appends a pair of blocks; it stays only if it has rare codes. Without a branch, which few would be
/// predicted. Returns the end of the list.
inline RarePair* list_pair(std::uint32_t first, std::uint32_t second, std::uint32_t row, std::size_t block,
                           RarePair* end) {
  const std::uint64_t codes = first | std::uint64_t{second} << 32;
  *end = {codes, row, static_cast<std::uint32_t>(block)};
  return end + (codes != 0);
}

inline void prefetch_group(const std::uint8_t* codes) {
  for (std::size_t line = 0; line < kGroupCodes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetch + line), _MM_HINT_T0);
}

/// Half a group, for one activation row: sum_quads of its blocks.
inline __m256i multiply_quad(const BlockWords* x, const std::uint8_t* codes, std::uint32_t row,
                             std::size_t block, RarePair*& end) {
  __m256i sums[4];
#pragma GCC unroll 2
  for (std::size_t b = 0; b < 4; b += 2) {
    const __m256i first = load(codes + b * kBlock), second = load(codes + (b + 1) * kBlock);
    sums[b] = dot(words_of(first), x[b].values);
    sums[b + 1] = dot(words_of(second), x[b + 1].values);
    keep(sums[b]), keep(sums[b + 1]);
    end = list_pair(rare_codes(first), rare_codes(second), row, block + b, end);
  }
  return sum_quads(sums[0], sums[1], sums[2], sums[3]);
}

/// `blocks` blocks, at most a group, for several activation rows.
inline RarePair* decode_group(const std::uint8_t* codes, std::size_t blocks, std::uint32_t row,
                              std::size_t block, RarePair* end, GroupWords& words) {
  for (std::size_t b = 0; b < kGroup; b += 2) {
    std::uint32_t rare[2] = {};
    for (std::size_t i = b; i < b + 2; ++i) {
      if (i >= blocks) {  // nothing beyond the row may be read
        words.blocks[i] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        continue;
      }
      const __m256i block_codes = load(codes + i * kBlock);
      words.blocks[i] = words_of(block_codes);
      rare[i - b] = rare_codes(block_codes);
    }
    end = list_pair(rare[0], rare[1], row, block + b, end);
  }
  return end;
}

/// A group's words are kept in the first-level cache for all activation rows.
RarePair* multiply_words(std::span<const Row> x, const std::uint8_t* codes, std::size_t blocks,
                         std::uint32_t row, std::size_t block, RarePair* end, Tile& tile) {
  GroupWords words;
  end = decode_group(codes, blocks, row, block, end, words);
  for (std::size_t m = 0; m < x.size(); ++m) {
    const BlockWords* const activations = x[m].words.data() + block;
    __m256i halves[2];
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; ++half) {
      __m256i sums[4];
#pragma GCC unroll 4
      for (std::size_t b = 0; b < 4; ++b) {
        sums[b] = dot(words.blocks[4 * half + b], activations[4 * half + b].values);
        keep(sums[b]);
      }
      halves[half] = sum_quads(sums[0], sums[1], sums[2], sums[3]);
    }
    store(tile.sums[m].dots.data() + row * x[0].groups * kGroup + block, join_quads(halves[0], halves[1]));
  }
  return end;
}

/// Weight row `row` of the tile, for one activation row.
inline RarePair* one_row_dots(const Row& x, const std::uint8_t* codes, std::size_t whole, std::uint32_t row,
                              RarePair* end, std::int32_t* dots) {
  const BlockWords* const words = x.words.data();
  for (std::size_t b = 0; b < whole; b += kGroup) {
    prefetch_group(codes + b * kBlock);
    const __m256i first = multiply_quad(words + b, codes + b * kBlock, row, b, end);
    const __m256i second = multiply_quad(words + b + 4, codes + (b + 4) * kBlock, row, b + 4, end);
    store(dots + b, join_quads(first, second));
  }
  return end;
}

/// Weight row `row` of the tile. Returns the end of the list of rare pairs.
RarePair* row_dots(std::span<const Row> x, const std::uint8_t* codes, std::uint32_t row, RarePair* end,
                   Tile& tile) {
  const std::size_t blocks = x[0].blocks, whole = blocks / kGroup * kGroup;
  if (x.size() == 1) {
    end = one_row_dots(x[0], codes, whole, row, end, tile.sums[0].dots.data() + row * x[0].groups * kGroup);
  } else {
    for (std::size_t b = 0; b < whole; b += kGroup) {
      prefetch_group(codes + b * kBlock);
      end = multiply_words(x, codes + b * kBlock, kGroup, row, b, end, tile);
    }
  }
  return whole == blocks ? end
                         : multiply_words(x, codes + whole * kBlock, blocks - whole, row, whole, end, tile);
}

/// sum(8 l t) of a weight row, to its lane of the corrections.
void add_rests(const Row& x, const std::uint8_t* codes, std::int32_t* corrections) {
  for (const Rest& rest : x.rests)
    corrections[rest.k / kBlock * kLanes] += rest.value * kRounded[codes[rest.k]];
  for (std::size_t i = 0; i < x.rest_blocks.size(); ++i) {
    const std::size_t block = x.rest_blocks[i];
    const __m256i sums = dot(words_of(load(codes + block * kBlock)), x.rest_words[i].values);
    corrections[block * kLanes] += 8 * sum_lanes(sums);
  }
}

/// sum(a r) of the listed pairs. False when a code is NaN.
bool add_remainders(std::span<const Row> x, const std::uint8_t* codes, std::size_t k,
                    std::span<const RarePair> pairs, Tile& tile) {
  bool numbers = true;
  for (const RarePair& pair : pairs) {
    for (std::uint64_t rare = pair.codes; rare != 0; rare &= rare - 1) {
      const std::size_t at = pair.block * kBlock + static_cast<std::size_t>(std::countr_zero(rare));
      const std::uint8_t code = codes[pair.row * k + at];
      numbers &= (code & 0x7F) != 0x7F;
      for (std::size_t m = 0; m < x.size(); ++m)
        tile.sums[m].corrections[at / kBlock * kLanes + pair.row] += x[m].values[at] * kRemainders[code];
    }
  }
  return numbers;
}

/// Reads `count` <= kLanes weight rows. False when a weight is NaN.
DSV41_OUT_OF_LINE bool read_tile(std::span<const Row> x, const std::uint8_t* codes, std::size_t k,
                                 std::size_t count, Tile& tile) {
  for (std::size_t m = 0; m < x.size(); ++m)
    std::fill_n(tile.sums[m].corrections.begin(), x[m].blocks * kLanes, 0);
  RarePair* end = tile.listed.data();
  for (std::size_t r = 0; r < count; ++r) {
    end = row_dots(x, codes + r * k, static_cast<std::uint32_t>(r), end, tile);
    for (std::size_t m = 0; m < x.size(); ++m)
      add_rests(x[m], codes + r * k, tile.sums[m].corrections.data() + r);
  }
  return add_remainders(x, codes, k, {tile.listed.data(), end}, tile);
}

/// RN32 of 2^(s+3) * dots + corrections, in one rounding: the dots are an fp32 number and a small error of
/// it, and the error and the corrections are another one as long as they stay below 2^24. Beyond that `large`
/// gets one of the bits from 25 on.
inline __m256 rounded_total(__m256i dots, __m256i corrections, std::int32_t shift, float factor,
                            __m256i& large) {
  const __m256 head = _mm256_cvtepi32_ps(dots);
  // Rounded up to 2^31 it becomes -2^31 here: the difference is still right.
  const __m256i error = _mm256_sub_epi32(dots, _mm256_cvtps_epi32(head));
  const __m256i tail = _mm256_add_epi32(_mm256_sllv_epi32(error, _mm256_set1_epi32(shift)), corrections);
  large = _mm256_or_si256(large, _mm256_add_epi32(tail, _mm256_set1_epi32(1 << 24)));
  return _mm256_fmadd_ps(head, _mm256_set1_ps(factor), _mm256_cvtepi32_ps(tail));
}

/// The same where the corrections are large: fp64 holds the total.
inline __m256 rounded_wide_total(__m256i dots, __m256i corrections, float factor) {
  const __m256d wide_factor = _mm256_set1_pd(factor);
  const __m256d low = _mm256_fmadd_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(dots)), wide_factor,
                                      _mm256_cvtepi32_pd(_mm256_castsi256_si128(corrections)));
  const __m256d high = _mm256_fmadd_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(dots, 1)), wide_factor,
                                       _mm256_cvtepi32_pd(_mm256_extracti128_si256(corrections, 1)));
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
}

/// Adds one block of the features: its rounded total in units of 2^-18, times the scale.
template <bool Wide>
inline __m256 add_block(__m256 sum, __m256i dots, const Row& x, const TileSums& tile, const float* scale,
                        std::size_t block, __m256i& large) {
  const __m256i corrections = load(tile.corrections.data() + block * kLanes);
  const __m256 total = Wide ? rounded_wide_total(dots, corrections, x.factor[block])
                            : rounded_total(dots, corrections, x.shift[block], x.factor[block], large);
  const __m256 d = _mm256_mul_ps(total, _mm256_set1_ps(0x1p-18f));
  return _mm256_add_ps(sum, _mm256_mul_ps(d, _mm256_set1_ps(scale[block])));
}

/// The features of a tile, one in each lane: their scaled block products, added in ascending order. Returns
/// whether all corrections were small enough: always if they are Wide.
template <bool Wide>
DSV41_OUT_OF_LINE bool add_blocks(const Row& x, const TileSums& tile, const float* scale, std::size_t count,
                                  BFloat16* out) {
  const std::uint8_t* rows[kLanes];  // lanes beyond the tile repeat its last row
  for (std::size_t r = 0; r < kLanes; ++r)
    rows[r] =
        reinterpret_cast<const std::uint8_t*>(tile.dots.data() + std::min(r, count - 1) * x.groups * kGroup);
  __m256 sum = _mm256_setzero_ps();
  __m256i large = _mm256_setzero_si256();
  __m256i dots[4];
  const std::size_t whole = x.blocks / 4 * 4;
  for (std::size_t first = 0; first < whole; first += 4) {
    transpose_dwords(rows, first * sizeof(std::int32_t), dots);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) sum = add_block<Wide>(sum, dots[i], x, tile, scale, first + i, large);
  }
  if (whole < x.blocks) transpose_dwords(rows, whole * sizeof(std::int32_t), dots);
  for (std::size_t b = whole; b < x.blocks; ++b)
    sum = add_block<Wide>(sum, dots[b - whole], x, tile, scale, b, large);
  if (_mm256_testz_si256(large, _mm256_set1_epi32(-1 << 25)) == 0) return false;
  store_bfloat16(out, count, sum);
  return true;
}

/// RN32(s_x * s_w) of `blocks` blocks.
inline void multiply_scales(const float* x, const std::uint8_t* w, std::size_t blocks, float* out) {
  std::size_t b = 0;
  for (; b + kLanes <= blocks; b += kLanes)
    _mm256_storeu_ps(out + b, _mm256_mul_ps(_mm256_loadu_ps(x + b), load_scales(w + b)));
  for (; b < blocks; ++b) out[b] = x[b] * decode_e8m0(w[b]);
}

}  // namespace

void linear_fp8_few(const QuantizedRows& rows, const Fp8Matrix& w, Range range, BFloat16* out) {
  static thread_local std::vector<Row> storage;
  static thread_local std::vector<float> scale;  // [rows][blocks]: RN32(s_x * s_w)
  static thread_local Tile tile;
  static thread_local PreparedName prepared;  // of what is in storage
  if (storage.size() < rows.rows) storage.resize(rows.rows);
  const std::span<const Row> x(storage.data(), rows.rows);
  const std::size_t blocks = w.k / kBlock;
  if (!prepared.is(rows.name)) {
    for (std::size_t m = 0; m < rows.rows; ++m)
      storage[m].set(rows.codes + m * w.k, rows.scales + m * blocks, w.k);
    prepared.set(rows.name);
  }
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
        multiply_scales(x[m].scale.data(), scales, blocks, scale.data() + m * blocks);
    }
    if (!numbers || !read_tile(x, w.codes + n * w.k, w.k, count, tile)) {
      plain_ops().linear_fp8(rows, w, {n, n + count}, out);  // NaN spreads as the definition says
      continue;
    }
    for (std::size_t m = 0; m < rows.rows; ++m) {
      const float* const row_scale = scale.data() + m * blocks;
      BFloat16* const to = out + m * w.n + n;
      if (!add_blocks<false>(x[m], tile.sums[m], row_scale, count, to))
        add_blocks<true>(x[m], tile.sums[m], row_scale, count, to);
    }
  }
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
