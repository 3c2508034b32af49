// Linears whose sums are 16 fp64 lanes (docs/numerics.md 2) with AVX-512: BF16 weights, and FP8 weights with
// unquantized activations. Products are exact in fp64, so that fused additions change nothing.
#include <algorithm>
#include <vector>

#include "kernels/avx512/avx512.h"
#include "kernels/unquantized_fp8.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/vectors.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kFeatures = 4;  // weight rows that share the loads of an activation row …
constexpr std::size_t kRows =
    5;  // … and activation rows that share those of decoded weights: 20 sums in registers
constexpr std::size_t kFewRows = 4;    // so many go one by one: decoding into memory would not pay
constexpr std::size_t kDepth = 256;    // part of K: four decoded weight rows stay in the first-level cache
constexpr std::size_t kRowBlock = 25;  // rows that a decoded weight serves; their part of K and …
constexpr std::size_t kTile = kBlock;  // … the sums with that many features stay in the second-level cache

/// 64 E4M3 codes as pairs of bytes that are the top of an fp64: sign, and exponent with fraction. The fp64 is
/// the code times 2^-1016.
struct CodeWords {
  __m512i low, high;  // of the first and the second eight codes of each sixteen
};
inline CodeWords code_words(__m512i codes) {
  const __m512i rest = _mm512_add_epi8(codes, codes), sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
  return {_mm512_unpacklo_epi8(rest, sign), _mm512_unpackhi_epi8(rest, sign)};
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

/// Dot products of one activation row with four weight rows, each k elements behind the one before. Fetched
/// ahead are the next four.
struct Dots {
  double values[kFeatures];
  bool nan;  // an FP8 weight is NaN
};
template <class Weight>
inline void prefetch(const Weight* w) {
  _mm_prefetch(reinterpret_cast<const char*>(w), _MM_HINT_T0);
}
DSV41_OUT_OF_LINE void row_dots(const BFloat16* x, const BFloat16* const* w, std::size_t k, Dots& out) {
  Lanes sums[kFeatures];
  for (std::size_t i = 0; i < k; i += 2 * kWidth) {
    const __mmask16 mask = first_values(k - i), next = first_values(k - std::min(k, i + kWidth));
    const Sixteen x0 = widen(x + i, mask), x1 = widen(x + i + kWidth, next);
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kFeatures; ++f) {
      prefetch(w[f] + i + kFeatures * k);
      add_products(widen(w[f] + i, mask), x0, sums[f]);
      add_products(widen(w[f] + i + kWidth, next), x1, sums[f]);
    }
  }
  for (std::size_t f = 0; f < kFeatures; ++f) out.values[f] = fold(sums[f]);
  out.nan = false;
}
/// x: fp64, zero from k up to a multiple of 64.
DSV41_OUT_OF_LINE void row_dots(const double* x, const std::uint8_t* const* w, std::size_t k, Dots& out) {
  Lanes sums[kFeatures];
  __mmask64 nan = 0;
  for (std::size_t i = 0; i < k; i += 64) {
    const std::uint64_t mask = first_bytes(k - i);
    CodeWords words[kFeatures];
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kFeatures; ++f) {
      prefetch(w[f] + i + kFeatures * k);
      const __m512i codes = load_part(w[f] + i, mask);
      nan |= _mm512_cmpeq_epi8_mask(_mm512_or_si512(codes, _mm512_set1_epi8(-128)), _mm512_set1_epi8(-1));
      words[f] = code_words(codes);
    }
    const Sixteen x0 = load_sixteen(x + i), x1 = load_sixteen(x + i + 16);
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kFeatures; ++f) {
      add_products(sixteen_codes<0>(words[f]), x0, sums[f]);
      add_products(sixteen_codes<1>(words[f]), x1, sums[f]);
    }
    const Sixteen x2 = load_sixteen(x + i + 32), x3 = load_sixteen(x + i + 48);
#pragma GCC unroll 4
    for (std::size_t f = 0; f < kFeatures; ++f) {
      add_products(sixteen_codes<2>(words[f]), x2, sums[f]);
      add_products(sixteen_codes<3>(words[f]), x3, sums[f]);
    }
  }
  for (std::size_t f = 0; f < kFeatures; ++f) out.values[f] = fold(sums[f]);
  out.nan = nan != 0;
}

/// Adds `Rows` activation rows (stride apart) times four decoded weight rows [kFeatures][kDepth], fp64 both,
/// to the lanes [Rows][kFeatures]; half of the lanes at a time.
template <std::size_t Rows>
DSV41_OUT_OF_LINE void add_tile(const double* x, std::size_t stride, const double* w, std::size_t depth,
                                Lanes* lanes) {
  for (std::size_t p = 0; p < 2; ++p) {
    __m512d sum[Rows][kFeatures];
#pragma GCC unroll 5
    for (std::size_t m = 0; m < Rows; ++m)
#pragma GCC unroll 4
      for (std::size_t f = 0; f < kFeatures; ++f) sum[m][f] = lanes[m * kFeatures + f].part[p];
    for (std::size_t i = 8 * p; i < depth; i += kWidth) {
      __m512d weights[kFeatures];
#pragma GCC unroll 4
      for (std::size_t f = 0; f < kFeatures; ++f) weights[f] = _mm512_loadu_pd(w + f * kDepth + i);
#pragma GCC unroll 5
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m512d value = _mm512_loadu_pd(x + m * stride + i);
#pragma GCC unroll 4
        for (std::size_t f = 0; f < kFeatures; ++f) sum[m][f] = _mm512_fmadd_pd(value, weights[f], sum[m][f]);
      }
    }
#pragma GCC unroll 5
    for (std::size_t m = 0; m < Rows; ++m)
#pragma GCC unroll 4
      for (std::size_t f = 0; f < kFeatures; ++f) lanes[m * kFeatures + f].part[p] = sum[m][f];
  }
}

void add_rows(std::size_t rows, const double* x, std::size_t stride, const double* w, std::size_t depth,
              Lanes* lanes) {
  switch (rows) {
    case 1:
      return add_tile<1>(x, stride, w, depth, lanes);
    case 2:
      return add_tile<2>(x, stride, w, depth, lanes);
    case 3:
      return add_tile<3>(x, stride, w, depth, lanes);
    case 4:
      return add_tile<4>(x, stride, w, depth, lanes);
    default:
      return add_tile<kRows>(x, stride, w, depth, lanes);
  }
}

// How weights become fp64, `count` <= kDepth of them from `first` on, zeros up to a multiple of sixteen.
struct Bf16Rows {
  const BFloat16* values;  // [features][k]
  std::size_t k;
  const BFloat16* row(std::size_t feature) const { return values + feature * k; }
  void decode(std::size_t feature, std::size_t first, std::size_t count, double* to) const {
    for (std::size_t i = 0; i < count; i += kWidth) {
      prefetch(row(feature) + first + i + kFeatures * k);  // for the next four features
      store_sixteen(to + i, widen(row(feature) + first + i, first_values(count - i)));
    }
  }
};
/// Codes times 2^-1016; the scales are in the activations. Writes zeros up to a multiple of 64.
struct Fp8Rows {
  const std::uint8_t* codes;  // [features][k]
  std::size_t k;
  const std::uint8_t* row(std::size_t feature) const { return codes + feature * k; }
  void decode(std::size_t feature, std::size_t first, std::size_t count, double* to) const {
    for (std::size_t i = 0; i < count; i += 64) {
      prefetch(row(feature) + first + i + kFeatures * k);
      const CodeWords words = code_words(load_part(row(feature) + first + i, first_bytes(count - i)));
      store_sixteen(to + i, sixteen_codes<0>(words));
      store_sixteen(to + i + 16, sixteen_codes<1>(words));
      store_sixteen(to + i + 32, sixteen_codes<2>(words));
      store_sixteen(to + i + 48, sixteen_codes<3>(words));
    }
  }
};

/// Sums of `rows` <= kRowBlock activation rows with `features` <= kTile features, out [rows][kTile].
template <class Weights>
void tile_sums(const double* x, std::size_t rows, std::size_t padded, const Weights& w, std::size_t features,
               double* out) {
  static thread_local std::vector<Lanes> storage(kTile * kRowBlock);
  std::fill_n(storage.begin(), ceil_div(features, kFeatures) * kFeatures * rows, Lanes{});
  alignas(64) double weights[kFeatures * kDepth];
  for (std::size_t first = 0; first < w.k; first += kDepth) {
    const std::size_t count = std::min(kDepth, w.k - first), depth = ceil_div(count, kWidth) * kWidth;
    for (std::size_t n = 0; n < features; n += kFeatures) {
      // Beyond the last feature stands the last one again; nobody looks at its sums.
      for (std::size_t f = 0; f < kFeatures; ++f)
        w.decode(std::min(n + f, features - 1), first, count, weights + f * kDepth);
      for (std::size_t m = 0; m < rows; m += kRows)
        add_rows(std::min(kRows, rows - m), x + m * padded + first, padded, weights, depth,
                 storage.data() + n * rows + m * kFeatures);
    }
  }
  for (std::size_t m = 0; m < rows; ++m)
    for (std::size_t f = 0; f < features; ++f)
      out[m * kTile + f] = fold(storage[f / kFeatures * kFeatures * rows + m * kFeatures + f % kFeatures]);
}

/// The same one row at a time, rows x_stride elements apart. False when an FP8 weight is NaN.
template <class Activation, class Weights>
bool single_sums(const Activation* x, std::size_t rows, std::size_t x_stride, const Weights& w,
                 std::size_t features, double* out) {
  for (std::size_t n = 0; n < features; n += kFeatures) {
    decltype(w.row(0)) weights[kFeatures];
    for (std::size_t f = 0; f < kFeatures; ++f) weights[f] = w.row(std::min(n + f, features - 1));
    for (std::size_t m = 0; m < rows; ++m) {
      Dots dots;
      row_dots(x + m * x_stride, weights, w.k, dots);
      if (dots.nan) return false;
      std::copy_n(dots.values, std::min(kFeatures, features - n), out + m * kTile + n);
    }
  }
  return true;
}

/// Elements between two activation rows: a multiple of 64, and two more cache lines, since rows whose
/// distance is a large power of two would fight for the same places in the first-level cache.
constexpr std::size_t padded_length(std::size_t k) {
  return ceil_div(k, 64) * 64 + kWidth;
}

/// Activations as fp64, [kRowBlock][padded] for rows padded with zeros to a multiple of 64.
double* wide_rows(const BFloat16* x, std::size_t rows, std::size_t x_stride, std::size_t k,
                  std::size_t padded) {
  static thread_local std::vector<double> buffer;
  if (buffer.size() < kRowBlock * padded) buffer.resize(kRowBlock * padded);
  for (std::size_t m = 0; m < rows; ++m) {
    Bf16Rows{x + m * x_stride, k}.decode(0, 0, k, buffer.data() + m * padded);
    const std::size_t end = ceil_div(k, kWidth) * kWidth;
    std::fill(buffer.data() + m * padded + end, buffer.data() + (m + 1) * padded, 0.0);
  }
  return buffer.data();
}

/// emit(row, feature, fp64 sum) for every row and feature of the range.
template <class Emit>
void bfloat16_sums(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w,
                   Range range, const Emit& emit) {
  const std::size_t padded = padded_length(w.k);
  double sums[kRowBlock * kTile];
  for (std::size_t first = 0; first < rows; first += kRowBlock) {
    const std::size_t count = std::min(kRowBlock, rows - first);
    const double* const wide =
        count <= kFewRows ? nullptr : wide_rows(x + first * x_stride, count, x_stride, w.k, padded);
    for (std::size_t n = range.begin; n < range.end; n += kTile) {
      const std::size_t features = std::min(kTile, range.end - n);
      const Bf16Rows weights{w.values + n * w.k, w.k};
      if (count <= kFewRows)
        single_sums(x + first * x_stride, count, x_stride, weights, features, sums);
      else
        tile_sums(wide, count, padded, weights, features, sums);
      for (std::size_t m = 0; m < count; ++m)
        for (std::size_t f = 0; f < features; ++f) emit(first + m, n + f, sums[m * kTile + f]);
    }
  }
}

/// Activation rows times the scales of a block of features, both as fp64.
void scale_rows(const double* x, std::size_t rows, std::size_t padded, const std::uint8_t* scales,
                std::size_t blocks, double* to) {
  for (std::size_t m = 0; m < rows; ++m, x += padded, to += padded) {
    for (std::size_t b = 0; b < blocks; ++b) {
      const __m512d factor =
          _mm512_set1_pd(static_cast<double>(decode_e8m0(scales[b])) * unquantized_fp8::kActivationFactor);
      for (std::size_t i = b * kBlock; i < (b + 1) * kBlock; i += 8)
        _mm512_storeu_pd(to + i, _mm512_mul_pd(_mm512_loadu_pd(x + i), factor));
    }
    std::fill(to + blocks * kBlock, to + padded, 0.0);
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
  static thread_local std::vector<double> scaled;
  const std::size_t k = w.k, blocks = k / kBlock, padded = padded_length(k);
  if (scaled.size() < kRowBlock * padded) scaled.resize(kRowBlock * padded);
  double sums[kRowBlock * kTile];
  for (std::size_t first = 0; first < rows; first += kRowBlock) {
    const std::size_t count = std::min(kRowBlock, rows - first);
    const double* const wide = wide_rows(x + first * x_stride, count, x_stride, k, padded);
    for (std::size_t begin = range.begin, end; begin < range.end; begin = end) {
      end = std::min(range.end, (begin / kBlock + 1) * kBlock);  // features that share their scales
      const std::uint8_t* const scales = w.scales + begin / kBlock * blocks;
      const Fp8Rows weights{w.codes + begin * k, k};
      bool good = unquantized_fp8::usual_scales(scales, blocks);
      if (good) scale_rows(wide, count, padded, scales, blocks, scaled.data());
      if (good && count <= kFewRows) {
        good = single_sums(scaled.data(), count, padded, weights, end - begin, sums);
      } else if (good) {
        good = !holds_e4m3_nan(weights.codes, (end - begin) * k);
        if (good) tile_sums(scaled.data(), count, padded, weights, end - begin, sums);
      }
      if (!good) {
        plain_ops().linear_fp8_unquantized(x + first * x_stride, count, x_stride, w, {begin, end},
                                           out + first * out_stride + begin - range.begin, out_stride);
        continue;
      }
      for (std::size_t m = 0; m < count; ++m)
        for (std::size_t n = begin; n < end; ++n)
          out[(first + m) * out_stride + n - range.begin] =
              to_bfloat16(sums[m * kTile + n - begin] * unquantized_fp8::kSumFactor);
    }
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
