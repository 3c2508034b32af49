// Linears whose sums are 16 fp64 lanes (docs/numerics.md 2): BF16 weights, FP8 weights with unquantized
// activations, and the fp32 projections of the hyper-connections. Products are exact in fp64, so that fused
// additions change nothing.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/avx2/avx2.h"
#include "kernels/unquantized_fp8.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/vectors.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kWidth = 16;
constexpr std::size_t kRowPrefetch = 2048;  // bytes of a single long row that are fetched ahead

void widen_row(const BFloat16* from, std::size_t k, std::size_t padded, double* to) {
  std::size_t i = 0;
  for (; i + 8 <= k; i += 8) {
    const __m256 values = widen8(from + i);
    _mm256_storeu_pd(to + i, low_half(values));
    _mm256_storeu_pd(to + i + 4, high_half(values));
  }
  for (; i < padded; ++i) to[i] = i < k ? static_cast<double>(to_float(from[i])) : 0.0;
}

/// Sixteen BF16 values as fp64 parts.
inline void widen16(const BFloat16* from, __m256d (&parts)[4]) {
  const __m256i values = load(from), zero = _mm256_setzero_si256();
  const __m256 a = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, values));  // 0-3 and 8-11
  const __m256 b = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, values));  // 4-7 and 12-15
  parts[0] = low_half(a), parts[1] = low_half(b), parts[2] = high_half(a), parts[3] = high_half(b);
}

/// E4M3 codes times 2^-1016: sign, exponent and fraction moved to their places in an fp64.
inline __m256d scaled_codes(const std::uint8_t* codes) {
  std::int32_t four;
  std::memcpy(&four, codes, 4);
  const __m256i moved = _mm256_slli_epi64(_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(four)), 49);
  return _mm256_castsi256_pd(
      _mm256_and_si256(moved, _mm256_set1_epi64x(static_cast<long long>(0x80FE000000000000ull))));
}

// ---- one activation row and two weight rows --------------------------------------------------------------

/// The sums of a weight row. Not an array, which GCC would keep in memory.
struct RowSums {
  __m256d part0 = {}, part1 = {}, part2 = {}, part3 = {};
};

/// Adds products of two weight rows with the same activations, in this order: all sums stay in registers.
inline void add_products(__m256d& first_sum, __m256d& second_sum, __m256d first, __m256d second,
                         const double* x) {
  const __m256d activations = kept(_mm256_loadu_pd(x));
  first_sum = kept(_mm256_fmadd_pd(first, activations, first_sum));
  second_sum = kept(_mm256_fmadd_pd(second, activations, second_sum));
}

/// Fetches what the next two rows have in the same place, if they begin `next` weights further.
template <class Weight>
inline void prefetch_next(const Weight* const (&w)[2], std::size_t i, std::size_t next) {
  if (i * sizeof(Weight) % 64 != 0) return;
  _mm_prefetch(reinterpret_cast<const char*>(w[0] + i + next), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(w[1] + i + next), _MM_HINT_T0);
}

inline void add_sixteen(RowSums& first, RowSums& second, const BFloat16* a, const BFloat16* b,
                        const double* x) {
  __m256d of_a[4], of_b[4];
  widen16(a, of_a);
  widen16(b, of_b);
  add_products(first.part0, second.part0, of_a[0], of_b[0], x);
  add_products(first.part1, second.part1, of_a[1], of_b[1], x + 4);
  add_products(first.part2, second.part2, of_a[2], of_b[2], x + 8);
  add_products(first.part3, second.part3, of_a[3], of_b[3], x + 12);
}

/// `x` fp64, zero beyond k.
inline void dots(const double* x, const BFloat16* const (&w)[2], std::size_t k, double* out) {
  RowSums first, second;
  std::size_t i = 0;
  for (; i + kWidth <= k; i += kWidth) {
    prefetch_next(w, i, 2 * k);
    add_sixteen(first, second, w[0] + i, w[1] + i, x + i);
  }
  if (i < k) {
    BFloat16 last[2][kWidth] = {};
    for (std::size_t f = 0; f < 2; ++f) std::copy(w[f] + i, w[f] + k, last[f]);
    add_sixteen(first, second, last[0], last[1], x + i);
  }
  out[0] = fold(Lanes{{first.part0, first.part1, first.part2, first.part3}});
  out[1] = fold(Lanes{{second.part0, second.part1, second.part2, second.part3}});
}

// Codes become words, four of them in each quarter of a vector, and part p takes word p of every quarter. So
// it holds the lanes p, p + 4, p + 8 and p + 12, of activations and of sums.

/// Sixteen fp64 values times a factor, in those parts.
inline void store_split(double* to, const double* from, __m256d factor) {
  __m256d quarter[4];
  for (std::size_t q = 0; q < 4; ++q) quarter[q] = _mm256_mul_pd(_mm256_loadu_pd(from + 4 * q), factor);
  const __m256d even[2] = {_mm256_unpacklo_pd(quarter[0], quarter[1]),
                           _mm256_unpacklo_pd(quarter[2], quarter[3])};
  const __m256d odd[2] = {_mm256_unpackhi_pd(quarter[0], quarter[1]),
                          _mm256_unpackhi_pd(quarter[2], quarter[3])};
  _mm256_storeu_pd(to, _mm256_permute2f128_pd(even[0], even[1], 0x20));
  _mm256_storeu_pd(to + 4, _mm256_permute2f128_pd(odd[0], odd[1], 0x20));
  _mm256_storeu_pd(to + 8, _mm256_permute2f128_pd(even[0], even[1], 0x31));
  _mm256_storeu_pd(to + 12, _mm256_permute2f128_pd(odd[0], odd[1], 0x31));
}

/// fold() of sums in those parts: lanes j + (j+8) and 4 within a part, then 2 and 1.
inline double fold_part(__m256d part) {
  const __m128d eight = _mm_add_pd(_mm256_castpd256_pd128(part), _mm256_extractf128_pd(part, 1));
  return _mm_cvtsd_f64(_mm_add_sd(eight, _mm_unpackhi_pd(eight, eight)));
}
inline double fold_split(const RowSums& sums) {
  return (fold_part(sums.part0) + fold_part(sums.part2)) + (fold_part(sums.part1) + fold_part(sums.part3));
}

/// Sixteen codes as words whose place is the top of an fp64: sign, seven zeros, twice the rest of the code.
inline __m256i words_of_codes(const std::uint8_t* codes) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return _mm256_and_si256(_mm256_add_epi16(wide, wide), _mm256_set1_epi16(static_cast<short>(0x80FE)));
}

/// The codes are times 2^-1016, k is a multiple of a block, and `x` is split as above. False when a weight is
/// NaN.
inline bool dots_of_codes(const double* x, const std::uint8_t* const (&w)[2], std::size_t k, double* out) {
  // The words of a part get to the top of their quarters by different means: that keeps different units busy.
  const __m256i upper_quarters = _mm256_setr_epi64x(0, 0x0808000000000000, 0, 0x0808000000000000);
  const __m256i second = kept(_mm256_add_epi8(_mm256_set1_epi64x(0x0302FFFFFFFFFFFF), upper_quarters));
  const __m256i third = kept(_mm256_add_epi8(_mm256_set1_epi64x(0x0504FFFFFFFFFFFF), upper_quarters));
  const __m256i top = kept(_mm256_set1_epi64x(static_cast<long long>(0xFFFF000000000000ull)));
  RowSums sums[2];
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < k; i += kWidth) {
    prefetch_next(w, i, 2 * k);
    const __m256i a = words_of_codes(w[0] + i), b = words_of_codes(w[1] + i);
    largest = _mm256_max_epu8(largest, _mm256_max_epu8(a, b));
    add_products(sums[0].part0, sums[1].part0, _mm256_castsi256_pd(_mm256_slli_epi64(a, 48)),
                 _mm256_castsi256_pd(_mm256_slli_epi64(b, 48)), x + i);
    add_products(sums[0].part1, sums[1].part1, _mm256_castsi256_pd(_mm256_shuffle_epi8(a, second)),
                 _mm256_castsi256_pd(_mm256_shuffle_epi8(b, second)), x + i + 4);
    add_products(sums[0].part2, sums[1].part2, _mm256_castsi256_pd(_mm256_shuffle_epi8(a, third)),
                 _mm256_castsi256_pd(_mm256_shuffle_epi8(b, third)), x + i + 8);
    add_products(sums[0].part3, sums[1].part3, _mm256_castsi256_pd(_mm256_and_si256(a, top)),
                 _mm256_castsi256_pd(_mm256_and_si256(b, top)), x + i + 12);
  }
  out[0] = fold_split(sums[0]), out[1] = fold_split(sums[1]);
  const __m256i nan = _mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-2));
  return _mm256_testz_si256(nan, nan) != 0;
}

// ---- many activation rows --------------------------------------------------------------------------------

constexpr std::size_t kFeatures = 4, kRows = 3;  // 12 sums and 5 operands: what the registers hold
constexpr std::size_t kDepth = 512;    // part of K: four decoded weight rows stay in the first-level cache
constexpr std::size_t kRowBlock = 24;  // rows that a decoded weight serves; their part of K and …
constexpr std::size_t kTileRows = 5;   // fewer go one by one: decoding into memory would not pay
constexpr std::size_t kTile = kBlock;  // … the sums with that many features stay in the second-level cache

/// Adds `Rows` activation rows (stride apart) times four decoded weight rows [kFeatures][kDepth], fp64 both,
/// to the lanes [Rows][kFeatures]; a quarter of the lanes at a time.
template <std::size_t Rows>
DSV41_OUT_OF_LINE void add_tile(const double* x, std::size_t stride, const double* w, std::size_t depth,
                                Lanes* lanes) {
  for (std::size_t p = 0; p < 4; ++p) {
    __m256d sum[Rows][kFeatures];
    for (std::size_t m = 0; m < Rows; ++m)
      for (std::size_t f = 0; f < kFeatures; ++f) sum[m][f] = lanes[m * kFeatures + f].part[p];
    for (std::size_t i = 4 * p; i < depth; i += kWidth) {
      __m256d weights[kFeatures];
      for (std::size_t f = 0; f < kFeatures; ++f) weights[f] = _mm256_loadu_pd(w + f * kDepth + i);
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256d value = _mm256_loadu_pd(x + m * stride + i);
        for (std::size_t f = 0; f < kFeatures; ++f) sum[m][f] = _mm256_fmadd_pd(value, weights[f], sum[m][f]);
      }
    }
    for (std::size_t m = 0; m < Rows; ++m)
      for (std::size_t f = 0; f < kFeatures; ++f) lanes[m * kFeatures + f].part[p] = sum[m][f];
  }
}

/// Sums of `rows` <= kRowBlock activation rows with `features` <= kTile features, out [rows][kTile].
/// decode(feature, first, count, to) writes `count` fp64 weights, and zeros up to a multiple of sixteen.
template <class Decode>
void tile_sums(const double* x, std::size_t rows, std::size_t k, std::size_t padded, std::size_t features,
               const Decode& decode, double* out) {
  static thread_local std::vector<Lanes> storage(kTile * kRowBlock);
  std::fill_n(storage.begin(), ceil_div(features, kFeatures) * kFeatures * rows, Lanes{});
  alignas(32) double weights[kFeatures * kDepth];
  for (std::size_t first = 0; first < k; first += kDepth) {
    const std::size_t count = std::min(kDepth, k - first), depth = ceil_div(count, kWidth) * kWidth;
    for (std::size_t n = 0; n < features; n += kFeatures) {
      // Beyond the last feature stands the last one again; nobody looks at its sums.
      for (std::size_t f = 0; f < kFeatures; ++f)
        decode(std::min(n + f, features - 1), first, count, weights + f * kDepth);
      Lanes* const lanes = storage.data() + n * rows;  // [rows][kFeatures]
      std::size_t m = 0;
      for (; m + kRows <= rows; m += kRows)
        add_tile<kRows>(x + m * padded + first, padded, weights, depth, lanes + m * kFeatures);
      if (m + 2 == rows) add_tile<2>(x + m * padded + first, padded, weights, depth, lanes + m * kFeatures);
      if (m + 1 == rows) add_tile<1>(x + m * padded + first, padded, weights, depth, lanes + m * kFeatures);
    }
  }
  for (std::size_t m = 0; m < rows; ++m)
    for (std::size_t f = 0; f < features; ++f)
      out[m * kTile + f] = fold(storage[(f / kFeatures * rows + m) * kFeatures + f % kFeatures]);
}

std::vector<double>& wide_activations() {
  static thread_local std::vector<double> buffer;
  return buffer;
}

/// emit(row, feature, fp64 sum) for every row and feature of the range.
template <class Emit>
void bfloat16_sums(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w,
                   Range range, const Emit& emit) {
  const std::size_t k = w.k, padded = ceil_div(k, kWidth) * kWidth;
  std::vector<double>& wide = wide_activations();
  if (wide.size() < kRowBlock * padded) wide.resize(kRowBlock * padded);
  double sums[kRowBlock * kTile];
  for (std::size_t first = 0; first < rows; first += kRowBlock) {
    const std::size_t count = std::min(kRowBlock, rows - first);
    for (std::size_t m = 0; m < count; ++m)
      widen_row(x + (first + m) * x_stride, k, padded, wide.data() + m * padded);
    if (count < kTileRows) {
      for (std::size_t n = range.begin; n < range.end; n += 2) {
        const std::size_t second = std::min(n + 1, range.end - 1);
        const BFloat16* const features[2] = {w.values + n * k, w.values + second * k};
        for (std::size_t m = 0; m < count; ++m) {
          dots(wide.data() + m * padded, features, k, sums);
          emit(first + m, n, sums[0]);
          if (second != n) emit(first + m, second, sums[1]);
        }
      }
      continue;
    }
    for (std::size_t n = range.begin; n < range.end; n += kTile) {
      const std::size_t features = std::min(kTile, range.end - n);
      const auto decode = [&](std::size_t f, std::size_t from, std::size_t length, double* to) {
        widen_row(w.values + (n + f) * k + from, length, ceil_div(length, kWidth) * kWidth, to);
      };
      tile_sums(wide.data(), count, k, padded, features, decode, sums);
      for (std::size_t m = 0; m < count; ++m)
        for (std::size_t f = 0; f < features; ++f) emit(first + m, n + f, sums[m * kTile + f]);
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
  const std::size_t k = w.k, blocks = k / kBlock;
  std::vector<double>& wide = wide_activations();
  if (wide.size() < (kRowBlock + kTileRows) * k) wide.resize((kRowBlock + kTileRows) * k);
  double* const scaled = wide.data() + kRowBlock * k;
  double sums[kRowBlock * kTile];
  for (std::size_t first = 0; first < rows; first += kRowBlock) {
    const std::size_t count = std::min(kRowBlock, rows - first);
    for (std::size_t m = 0; m < count; ++m) widen_row(x + (first + m) * x_stride, k, k, wide.data() + m * k);
    const auto put = [&](std::size_t row, std::size_t n, double sum) {
      out[(first + row) * out_stride + n - range.begin] = to_bfloat16(sum * unquantized_fp8::kSumFactor);
    };
    const auto plainly = [&](std::size_t begin, std::size_t end) {
      plain_ops().linear_fp8_unquantized(x + first * x_stride, count, x_stride, w, {begin, end},
                                         out + first * out_stride + begin - range.begin, out_stride);
    };
    for (std::size_t begin = range.begin, end; begin < range.end; begin = end) {
      end = std::min(range.end, (begin / kBlock + 1) * kBlock);  // features that share their scales
      const std::uint8_t* const scales = w.scales + begin / kBlock * blocks;
      if (!unquantized_fp8::usual_scales(scales, blocks)) {
        plainly(begin, end);
        continue;
      }
      const auto factor = [&](std::size_t k_index) {
        return _mm256_set1_pd(static_cast<double>(decode_e8m0(scales[k_index / kBlock])) *
                              unquantized_fp8::kActivationFactor);
      };
      if (count < kTileRows) {
        for (std::size_t m = 0; m < count; ++m)
          for (std::size_t i = 0; i < k; i += kWidth)
            store_split(scaled + m * k + i, wide.data() + m * k + i, factor(i));
        for (std::size_t n = begin; n < end; n += 2) {
          const std::size_t second = std::min(n + 1, end - 1);
          const std::uint8_t* const features[2] = {w.codes + n * k, w.codes + second * k};
          bool numbers = true;
          for (std::size_t m = 0; m < count && numbers; ++m) {
            numbers = dots_of_codes(scaled + m * k, features, k, sums);
            put(m, n, sums[0]);
            put(m, second, sums[second - n]);
          }
          if (!numbers) plainly(n, second + 1);
        }
        continue;
      }
      if (holds_e4m3_nan(w.codes + begin * k, (end - begin) * k)) {
        plainly(begin, end);
        continue;
      }
      const auto decode = [&](std::size_t f, std::size_t from, std::size_t length, double* to) {
        const std::uint8_t* const codes = w.codes + (begin + f) * k + from;
        for (std::size_t i = 0; i < length; i += 4)
          _mm256_storeu_pd(to + i, _mm256_mul_pd(scaled_codes(codes + i), factor(from + i)));
      };
      tile_sums(wide.data(), count, k, k, end - begin, decode, sums);
      for (std::size_t m = 0; m < count; ++m)
        for (std::size_t n = begin; n < end; ++n) put(m, n, sums[m * kTile + n - begin]);
    }
  }
}

namespace {

/// mix_projections of one row.
void project_row(const BFloat16* x, const F32Matrix& fn, float eps, Range range, double* out) {
  Lanes squares;
  for (std::size_t i = 0; i < fn.k; i += kWidth) {
    __m256d values[4];
    widen16(x + i, values);
    for (std::size_t p = 0; p < 4; ++p)
      squares.part[p] = _mm256_fmadd_pd(values[p], values[p], squares.part[p]);
  }
  const double inverse =
      1.0 / std::sqrt(fold(squares) / static_cast<double>(fn.k) + static_cast<double>(eps));
  for (std::size_t n = range.begin; n < range.end; n += 2) {
    const std::size_t second = std::min(n + 1, range.end - 1);
    const float* const w[2] = {fn.values + n * fn.k, fn.values + second * fn.k};
    Lanes sums[2];
    for (std::size_t i = 0; i < fn.k; i += kWidth) {
      __m256d values[4];
      widen16(x + i, values);
      for (std::size_t f = 0; f < 2; ++f) {
        _mm_prefetch(reinterpret_cast<const char*>(w[f] + i) + kRowPrefetch, _MM_HINT_T0);
        for (std::size_t p = 0; p < 4; ++p)
          sums[f].part[p] =
              _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(w[f] + i + 4 * p)), values[p], sums[f].part[p]);
      }
    }
    out[n] = fold(sums[0]) * inverse;
    if (second != n) out[second] = fold(sums[1]) * inverse;
  }
}

}  // namespace

void mix_projections(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range,
                     double* out) {
  if (fn.k % kWidth != 0) return plain_ops().mix_projections(x, rows, fn, eps, range, out);
  for (std::size_t row = 0; row < rows; ++row) project_row(x + row * fn.k, fn, eps, range, out + row * fn.n);
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
