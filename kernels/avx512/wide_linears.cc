// Linears whose sums are 16 fp64 lanes (docs/numerics.md 2) with AVX-512: BF16 weights, and FP8 weights with
// unquantized activations. Products are exact in fp64, so that fused additions change nothing.
#include <algorithm>
#include <bit>
#include <type_traits>
#include <vector>

#include "kernels/avx512/avx512.h"
#include "kernels/unquantized_fp8.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/panels.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kSingleFeatures = 4;  // weight rows that share the loads of a single activation row
/// Features that a group of rows takes together: 12 to 24 sums, which GCC keeps in registers beside all else
/// that the format needs.
template <class Weight>
constexpr std::size_t group_features(std::size_t rows) {
  constexpr std::size_t kMostRowsOfEight = std::is_same_v<Weight, BFloat16> ? 3 : 2;
  return rows <= kMostRowsOfEight ? 8 : 4;
}
constexpr std::size_t kMaxSums = 24;
constexpr std::size_t kRowBlock = 16;  // rows for which weights are read once
constexpr std::size_t kTile = kBlock;  // features whose sums are handed on together

/// 64 E4M3 codes as pairs of bytes that are the top of an fp64: sign, and exponent with fraction. The fp64 is
/// the code times 2^-1016.
struct CodeWords {
  __m512i low, high;  // of the first and the second eight codes of each sixteen
};
/// `largest` takes in code + code, bytewise, which is 0xFE for NaN only.
inline CodeWords code_words(__m512i codes, __m512i& largest) {
  const __m512i rest = _mm512_add_epi8(codes, codes), sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
  largest = _mm512_max_epu8(largest, rest);
  return {_mm512_unpacklo_epi8(rest, sign), _mm512_unpackhi_epi8(rest, sign)};
}
inline bool holds_nan(__m512i largest) {
  return _mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(-2)) != 0;
}
/// Eight of them, from 128-bit part `Part`.
template <int Part>
inline __m512d eight_codes(__m512i words) {
  constexpr long long kFirst = 8 * Part;
  const __m512i places =
      _mm512_setr_epi64((kFirst + 0) << 48, (kFirst + 1) << 48, (kFirst + 2) << 48, (kFirst + 3) << 48,
                        (kFirst + 4) << 48, (kFirst + 5) << 48, (kFirst + 6) << 48, (kFirst + 7) << 48);
  return _mm512_castsi512_pd(_mm512_maskz_permutexvar_epi16(0x88888888, places, words));
}
template <int Part>
inline Sixteen sixteen_codes(const CodeWords& words) {
  return {eight_codes<Part>(words.low), eight_codes<Part>(words.high)};
}

inline void add_products(const Sixteen& w, const Sixteen& x, Lanes& sums) {
  sums.part[0] = _mm512_fmadd_pd(w.part[0], x.part[0], sums.part[0]);
  sums.part[1] = _mm512_fmadd_pd(w.part[1], x.part[1], sums.part[1]);
}

/// One part of sixteen BF16 values: those in even lanes, or those in odd ones, which needs no shuffle.
template <std::size_t Part>
inline __m512d bf16_part(__m256i words) {
  const __m256i floats = Part == 0 ? _mm256_slli_epi32(words, 16)
                                   : _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
  return _mm512_cvtps_pd(_mm256_castsi256_ps(floats));
}
inline __m256i load_words(const BFloat16* from, __mmask16 mask) {
  return _mm256_maskz_loadu_epi16(mask, from);
}

/// Both parts.
inline Sixteen bf16_parts(const BFloat16* from, __mmask16 mask) {
  const __m256i words = load_words(from, mask);
  return {bf16_part<0>(words), bf16_part<1>(words)};
}
/// Sums of both parts as sixteen lanes, folded.
inline double fold_bf16_parts(__m512d even, __m512d odd) {
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  return fold(_mm512_permutex2var_pd(even, first, odd),
              _mm512_permutex2var_pd(even, _mm512_add_epi64(first, _mm512_set1_epi64(4)), odd));
}

// ---- One row ----

/// Dot products of one activation row with four weight rows, each k elements behind the one before. Fetched
/// ahead are the next four.
struct Dots {
  double values[kSingleFeatures];
  bool nan;  // an FP8 weight is NaN
};
template <class Weight>
inline void prefetch(const Weight* w) {
  _mm_prefetch(reinterpret_cast<const char*>(w), _MM_HINT_T0);
}
DSV41_OUT_OF_LINE void row_dots(const BFloat16* x, const BFloat16* const* w, std::size_t k, Dots& out) {
  Lanes sums[kSingleFeatures];
  for (std::size_t i = 0; i < k; i += 2 * kWidth) {
    const __mmask16 mask = first_values(k - i), next = first_values(k - std::min(k, i + kWidth));
    const Sixteen x0 = bf16_parts(x + i, mask), x1 = bf16_parts(x + i + kWidth, next);
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kSingleFeatures; ++f) {
      prefetch(w[f] + i + kSingleFeatures * k);
      add_products(bf16_parts(w[f] + i, mask), x0, sums[f]);
      add_products(bf16_parts(w[f] + i + kWidth, next), x1, sums[f]);
    }
  }
  for (std::size_t f = 0; f < kSingleFeatures; ++f)
    out.values[f] = fold_bf16_parts(sums[f].part[0], sums[f].part[1]);
  out.nan = false;
}
/// x: the panel of one row.
DSV41_OUT_OF_LINE void row_dots(const PanelVector* x, const std::uint8_t* const* w, std::size_t k,
                                Dots& out) {
  Lanes sums[kSingleFeatures];
  __m512i largest = _mm512_setzero_si512();
  const std::size_t part = padded_length(k) / 32;
  for (std::size_t i = 0; i < k; i += 64, x += 2) {
    const std::uint64_t mask = first_bytes(k - i);
    CodeWords words[kSingleFeatures];
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kSingleFeatures; ++f) {
      prefetch(w[f] + i + kSingleFeatures * k);
      words[f] = code_words(load_part(w[f] + i, mask), largest);
    }
    const Sixteen x0 = {panel_values<0>(x[0]), panel_values<0>(x[part])};
    const Sixteen x1 = {panel_values<1>(x[0]), panel_values<1>(x[part])};
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kSingleFeatures; ++f) {
      add_products(sixteen_codes<0>(words[f]), x0, sums[f]);
      add_products(sixteen_codes<1>(words[f]), x1, sums[f]);
    }
    const Sixteen x2 = {panel_values<0>(x[1]), panel_values<0>(x[part + 1])};
    const Sixteen x3 = {panel_values<1>(x[1]), panel_values<1>(x[part + 1])};
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kSingleFeatures; ++f) {
      add_products(sixteen_codes<2>(words[f]), x2, sums[f]);
      add_products(sixteen_codes<3>(words[f]), x3, sums[f]);
    }
  }
  for (std::size_t f = 0; f < kSingleFeatures; ++f) out.values[f] = fold(sums[f]);
  out.nan = holds_nan(largest);
}

/// Sums of one row with `features` <= kTile features. False when an FP8 weight is NaN.
template <class Activation, class Weights>
bool single_sums(const Activation* x, const Weights& w, std::size_t features, double* out) {
  for (std::size_t n = 0; n < features; n += kSingleFeatures) {
    const typename Weights::Weight* weights[kSingleFeatures];  // beyond the last feature the last one again
    for (std::size_t f = 0; f < kSingleFeatures; ++f) weights[f] = w.row(std::min(n + f, features - 1));
    Dots dots;
    row_dots(x, weights, w.k, dots);
    if (dots.nan) return false;
    std::copy_n(dots.values, std::min(kSingleFeatures, features - n), out + n);
  }
  return true;
}

// ---- Groups of rows: weights go from the decoding to their products without a trip through memory ----

/// The sums of one part for a group of rows and its features, [features][rows].
struct PartSums {
  __m512d sums[kMaxSums];
  bool nan = false;  // an FP8 weight is NaN
};

/// Bytes to fetch ahead, the same number in every step.
struct Ahead {
  const char* next;
  std::size_t step;
  void fetch() {
    for (std::size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T0);
    next += step;
  }
};

/// w: the weight rows of the group's features.
template <std::size_t Part, std::size_t Rows>
DSV41_OUT_OF_LINE void part_sums(const PanelVector* x, const BFloat16* const* w, std::size_t k, Ahead ahead,
                                 PartSums& out) {
  constexpr std::size_t kFeatures = group_features<BFloat16>(Rows), kSums = kFeatures * Rows;
  __m512d sum[kSums];
#pragma GCC unroll 24
  for (std::size_t j = 0; j < kSums; ++j) sum[j] = _mm512_setzero_pd();
  std::size_t i = 0;
  for (; i + 2 * kWidth <= k; i += 2 * kWidth, x += Rows) {
    ahead.fetch();
    add_products<0, Rows, kFeatures>(x, sum,
                                     [&](std::size_t f) { return bf16_part<Part>(load32(w[f] + i)); });
    add_products<1, Rows, kFeatures>(
        x, sum, [&](std::size_t f) { return bf16_part<Part>(load32(w[f] + i + kWidth)); });
  }
  if (i < k) {  // masked loads only here: they cost an instruction more
    const std::size_t middle = std::min(k, i + kWidth);
    const __mmask16 first = first_values(k - i), second = first_values(k - middle);
    add_products<0, Rows, kFeatures>(
        x, sum, [&](std::size_t f) { return bf16_part<Part>(load_words(w[f] + i, first)); });
    add_products<1, Rows, kFeatures>(
        x, sum, [&](std::size_t f) { return bf16_part<Part>(load_words(w[f] + middle, second)); });
  }
#pragma GCC unroll 24
  for (std::size_t j = 0; j < kSums; ++j) out.sums[j] = sum[j];
}

/// Adds the products of 64 FP8 codes for each feature, codes(feature). `largest`: of code + code, bytewise,
/// which is 0xFE for NaN only.
template <std::size_t Part, std::size_t Rows, class Codes>
inline __attribute__((always_inline)) void add_codes(const PanelVector* x, __m512d* sum, __m512i& largest,
                                                     const Codes& codes) {
  constexpr std::size_t kFeatures = group_features<std::uint8_t>(Rows);
  __m512i words[kFeatures];
#pragma GCC unroll 8
  for (std::size_t f = 0; f < kFeatures; ++f) {
    const CodeWords both = code_words(codes(f), largest);
    words[f] = Part == 0 ? both.low : both.high;
  }
  add_products<0, Rows, kFeatures>(x, sum, [&](std::size_t f) { return eight_codes<0>(words[f]); });
  add_products<1, Rows, kFeatures>(x, sum, [&](std::size_t f) { return eight_codes<1>(words[f]); });
  add_products<0, Rows, kFeatures>(x + Rows, sum, [&](std::size_t f) { return eight_codes<2>(words[f]); });
  add_products<1, Rows, kFeatures>(x + Rows, sum, [&](std::size_t f) { return eight_codes<3>(words[f]); });
}

/// The same for FP8 codes; the panel's parts are lanes 0 to 7 and 8 to 15, zero up to a multiple of 64.
template <std::size_t Part, std::size_t Rows>
DSV41_OUT_OF_LINE void part_sums(const PanelVector* x, const std::uint8_t* const* w, std::size_t k,
                                 Ahead ahead, PartSums& out) {
  constexpr std::size_t kSums = group_features<std::uint8_t>(Rows) * Rows;
  __m512d sum[kSums];
#pragma GCC unroll 24
  for (std::size_t j = 0; j < kSums; ++j) sum[j] = _mm512_setzero_pd();
  __m512i largest = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + 64 <= k; i += 64, x += 2 * Rows) {
    ahead.fetch();
    add_codes<Part, Rows>(x, sum, largest, [&](std::size_t f) { return load(w[f] + i); });
  }
  if (i < k) {
    const std::uint64_t mask = first_bytes(k - i);
    add_codes<Part, Rows>(x, sum, largest, [&](std::size_t f) { return load_part(w[f] + i, mask); });
  }
#pragma GCC unroll 24
  for (std::size_t j = 0; j < kSums; ++j) out.sums[j] = sum[j];
  if (Part == 0) out.nan = holds_nan(largest);
}

/// Weight rows of a matrix, and how sixteen lanes are split in two parts.
struct Bf16Rows {
  using Weight = BFloat16;
  static constexpr std::size_t kStep = 2 * kWidth;  // of part_sums along K
  const BFloat16* values;                           // [features][k]
  std::size_t k;
  const BFloat16* row(std::size_t feature) const { return values + feature * k; }

  struct Split {
    Sixteen operator()(const BFloat16* from, __mmask16 mask) const { return bf16_parts(from, mask); }
  };
  static double fold_parts(__m512d even, __m512d odd) { return fold_bf16_parts(even, odd); }
};
/// Codes stand for their value times 2^-1016; the scales are in the activations.
struct Fp8Rows {
  using Weight = std::uint8_t;
  static constexpr std::size_t kStep = 64;
  const std::uint8_t* codes;  // [features][k]
  std::size_t k;
  const std::uint8_t* row(std::size_t feature) const { return codes + feature * k; }

  using Split = Halves;
  static double fold_parts(__m512d low, __m512d high) { return fold(low, high); }
};

/// Sums of a group with at most `features` features from `first` on, as many as it takes together; out
/// [Rows][kTile]. False when an FP8 weight is NaN.
template <std::size_t Rows, class Weights>
bool group_sums(const PanelVector* panel, const Weights& w, std::size_t first, std::size_t features,
                Ahead ahead, double* out) {
  constexpr std::size_t kTogether = group_features<typename Weights::Weight>(Rows);
  const typename Weights::Weight* weights[kTogether];  // beyond the last feature the last one again
  for (std::size_t f = 0; f < kTogether; ++f) weights[f] = w.row(first + std::min(f, features - 1));
  PartSums one, other;
  part_sums<0, Rows>(panel, weights, w.k, ahead, one);
  if (one.nan) return false;
  ahead.next += ahead.step * ceil_div(w.k, Weights::kStep);
  part_sums<1, Rows>(panel + padded_length(w.k) / 32 * Rows, weights, w.k, ahead, other);
  for (std::size_t f = 0; f < std::min(kTogether, features); ++f)
    for (std::size_t m = 0; m < Rows; ++m)
      out[m * kTile + f] = Weights::fold_parts(one.sums[f * Rows + m], other.sums[f * Rows + m]);
  return true;
}
/// The same for a group of any size.
template <class Weights>
bool group_sums(std::size_t rows, const PanelVector* panel, const Weights& w, std::size_t first,
                std::size_t features, Ahead ahead, double* out) {
  switch (rows) {
    case 2:
      return group_sums<2>(panel, w, first, features, ahead, out);
    case 3:
      return group_sums<3>(panel, w, first, features, ahead, out);
    case 4:
      return group_sums<4>(panel, w, first, features, ahead, out);
    default:
      return group_sums<kMaxGroup>(panel, w, first, features, ahead, out);
  }
}

/// Sums of two or more rows, which stand in panels, with `features` <= kTile features, out [rows][kTile].
/// False when an FP8 weight is NaN.
template <class Weights>
bool tile_sums(const PanelVector* panels, std::size_t rows, const Weights& w, std::size_t features,
               double* out) {
  constexpr std::size_t kTogether =
      group_features<typename Weights::Weight>(2);  // a multiple of those of every other group
  const std::size_t groups = ceil_div(rows, kMaxGroup);
  for (std::size_t n = 0; n < features; n += kTogether) {
    const std::size_t end = std::min(n + kTogether, features);
    // Every group fetches a part of the next weights.
    const char* next = reinterpret_cast<const char*>(w.row(n + kTogether));
    const PanelVector* panel = panels;
    for (std::size_t m = 0, group; m < rows; m += group, panel += group * padded_length(w.k) / 16) {
      group = portion(rows - m, kMaxGroup);
      const std::size_t together = group_features<typename Weights::Weight>(group);
      const std::size_t step = together * Weights::kStep * sizeof(typename Weights::Weight) / 2 / groups;
      for (std::size_t f = n; f < end; f += together) {
        if (!group_sums(group, panel, w, f, end - f, Ahead{next, step}, out + m * kTile + f)) return false;
        next += 2 * step * ceil_div(w.k, Weights::kStep);
      }
    }
  }
  return true;
}

// ---- Whole linears ----

/// emit(row, feature, fp64 sum) for every row and feature of the range.
template <class Emit>
void bfloat16_sums(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w,
                   Range range, const Emit& emit) {
  static thread_local std::vector<PanelVector> buffer;
  PanelVector* const panels = panel_buffer(buffer, std::min(rows, kRowBlock), w.k);
  double sums[kRowBlock * kTile];
  for (std::size_t first = 0, count; first < rows; first += count, x += count * x_stride) {
    count = portion(rows - first, kRowBlock);
    if (count > 1) make_panels<Bf16Rows::Split>(x, count, x_stride, w.k, panels);
    for (std::size_t n = range.begin; n < range.end; n += kTile) {
      const std::size_t features = std::min(kTile, range.end - n);
      const Bf16Rows weights{w.values + n * w.k, w.k};
      if (count > 1)
        tile_sums(panels, count, weights, features, sums);
      else
        single_sums(x, weights, features, sums);
      for (std::size_t m = 0; m < count; ++m)
        for (std::size_t f = 0; f < features; ++f) emit(first + m, n + f, sums[m * kTile + f]);
    }
  }
}

/// What the activations of a block are multiplied with, and how that differs from what they were before:
/// powers of two.
struct BlockFactor {
  double current = 1.0, change = 1.0;
};
inline double quotient_of_powers(double a, double b) {
  return std::bit_cast<double>(std::bit_cast<std::int64_t>(a) - std::bit_cast<std::int64_t>(b) +
                               std::bit_cast<std::int64_t>(1.0));
}

/// Exchanges the factors of the panels' blocks for the scales of a block of features, in place; nothing is
/// rounded. A vector lies within a block. The next scales are fetched ahead.
void scale_panels(PanelVector* panels, std::size_t rows, std::size_t k, const std::uint8_t* scales,
                  std::vector<BlockFactor>& factors) {
  const std::size_t padding = padded_length(k) / kBlock - factors.size();
  prefetch_bytes(scales + factors.size(), factors.size());
  for (std::size_t b = 0; b < factors.size(); ++b) {
    const double factor = static_cast<double>(decode_e8m0(scales[b])) * unquantized_fp8::kActivationFactor;
    factors[b] = {factor, quotient_of_powers(factor, factors[b].current)};
  }
  for (std::size_t first = 0, group; first < rows; first += group) {
    group = portion(rows - first, kMaxGroup);
    for (std::size_t part = 0; part < 2; ++part, panels += padding * group)
      for (const BlockFactor& factor : factors) {
        const __m512d change = _mm512_set1_pd(factor.change);
        for (std::size_t m = 0; m < group; ++m, ++panels)
          *panels = join_values(_mm512_mul_pd(panel_values<0>(*panels), change),
                                _mm512_mul_pd(panel_values<1>(*panels), change));
      }
  }
}

}  // namespace

void linear_bf16(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w, Range range,
                 BFloat16* out) {
  bfloat16_sums(x, rows, x_stride, w, range, [&](std::size_t row, std::size_t feature, double sum) {
    out[row * w.n + feature] = to_bfloat16(sum);
  });
}

void linear_wide(const BFloat16* x, std::size_t rows, const Bf16Matrix& w, Range range, float* out) {
  bfloat16_sums(x, rows, w.k, w, range, [&](std::size_t row, std::size_t feature, double sum) {
    out[row * w.n + feature] = static_cast<float>(sum);
  });
}

void linear_fp8_unquantized(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Fp8Matrix& w,
                            Range range, BFloat16* out, std::size_t out_stride) {
  static thread_local std::vector<PanelVector> buffer;
  static thread_local std::vector<BlockFactor> factors;
  const std::size_t k = w.k, blocks = k / kBlock;
  PanelVector* const panels = panel_buffer(buffer, std::min(rows, kRowBlock), k);
  double sums[kRowBlock * kTile];
  for (std::size_t first = 0, count; first < rows;
       first += count, x += count * x_stride, out += count * out_stride) {
    count = portion(rows - first, kRowBlock);
    make_panels<Fp8Rows::Split>(x, count, x_stride, k, panels);
    factors.assign(blocks, {});
    for (std::size_t begin = range.begin, end; begin < range.end; begin = end) {
      end = std::min(range.end, (begin / kBlock + 1) * kBlock);  // features that share their scales
      const std::uint8_t* const scales = w.scales + begin / kBlock * blocks;
      const Fp8Rows weights{w.codes + begin * k, k};
      bool good = unquantized_fp8::usual_scales(scales, blocks);
      if (good) {
        scale_panels(panels, count, k, scales, factors);
        good = count > 1 ? tile_sums(panels, count, weights, end - begin, sums)
                         : single_sums(panels, weights, end - begin, sums);
      }
      if (!good) {
        plain_ops().linear_fp8_unquantized(x, count, x_stride, w, {begin, end}, out + begin - range.begin,
                                           out_stride);
        continue;
      }
      for (std::size_t m = 0; m < count; ++m)
        for (std::size_t n = begin; n < end; ++n)
          out[m * out_stride + n - range.begin] =
              to_bfloat16(sums[m * kTile + n - begin] * unquantized_fp8::kSumFactor);
    }
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
