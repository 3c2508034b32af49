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
constexpr std::size_t kRowPrefetch =
    2048;  // bytes: less than kPrefetch is better where two rows are read side by side

void widen_row(const BFloat16* from, std::size_t k, std::size_t padded, double* to) {
  std::size_t i = 0;
  for (; i + 8 <= k; i += 8) {
    const __m256 values = widen8(from + i);
    _mm256_storeu_pd(to + i, low_half(values));
    _mm256_storeu_pd(to + i + 4, high_half(values));
  }
  for (; i < padded; ++i) to[i] = i < k ? static_cast<double>(to_float(from[i])) : 0.0;
}

/// Sixteen weights as fp64 parts, from the format they are stored in.
inline void widen16(const BFloat16* w, __m256d (&parts)[4]) {
  const __m256 a = widen8(w), b = widen8(w + 8);
  parts[0] = low_half(a), parts[1] = high_half(a), parts[2] = low_half(b), parts[3] = high_half(b);
}

/// E4M3 codes times 2^-1016: sign, exponent and fraction moved to their places in an fp64.
inline __m256d scaled_codes(const std::uint8_t* codes) {
  std::int32_t four;
  std::memcpy(&four, codes, 4);
  const __m256i moved = _mm256_slli_epi64(_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(four)), 49);
  return _mm256_castsi256_pd(
      _mm256_and_si256(moved, _mm256_set1_epi64x(static_cast<long long>(0x80FE000000000000ull))));
}
inline void widen16(const std::uint8_t* w, __m256d (&parts)[4]) {
  for (std::size_t p = 0; p < 4; ++p) parts[p] = scaled_codes(w + 4 * p);
}

/// Watches the E4M3 codes that pass by for NaN.
struct NanWatch {
  __m128i largest = {};
  void see(const std::uint8_t* codes) {
    const __m128i signs = _mm_set1_epi8(-128);
    largest =
        _mm_max_epu8(largest, _mm_or_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), signs));
  }
  void see(const BFloat16*) {}
  bool found() const { return _mm_movemask_epi8(_mm_cmpeq_epi8(largest, _mm_set1_epi8(-1))) != 0; }
};

/// Dot products of one activation row (fp64, zero beyond k) with `Features` weight rows. False when an FP8
/// weight is NaN.
template <std::size_t Features, class Weight>
inline bool dots(const double* x, const Weight* const (&w)[Features], std::size_t k, double* out) {
  Lanes sums[Features];
  NanWatch watch;
  std::size_t i = 0;
  for (; i + kWidth <= k; i += kWidth) {
    for (std::size_t f = 0; f < Features; ++f) {
      _mm_prefetch(reinterpret_cast<const char*>(w[f] + i) + kRowPrefetch, _MM_HINT_T0);
      watch.see(w[f] + i);
      __m256d parts[4];
      widen16(w[f] + i, parts);
      for (std::size_t p = 0; p < 4; ++p)
        sums[f].part[p] = _mm256_fmadd_pd(parts[p], _mm256_loadu_pd(x + i + 4 * p), sums[f].part[p]);
    }
  }
  if (i < k) {
    for (std::size_t f = 0; f < Features; ++f) {
      Weight last[kWidth] = {};
      std::copy(w[f] + i, w[f] + k, last);
      watch.see(last);
      __m256d parts[4];
      widen16(last, parts);
      for (std::size_t p = 0; p < 4; ++p)
        sums[f].part[p] = _mm256_fmadd_pd(parts[p], _mm256_loadu_pd(x + i + 4 * p), sums[f].part[p]);
    }
  }
  for (std::size_t f = 0; f < Features; ++f) out[f] = fold(sums[f]);
  return !watch.found();
}

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
          for (std::size_t i = 0; i < k; i += 4)
            _mm256_storeu_pd(scaled + m * k + i,
                             _mm256_mul_pd(_mm256_loadu_pd(wide.data() + m * k + i), factor(i)));
        for (std::size_t n = begin; n < end; n += 2) {
          const std::size_t second = std::min(n + 1, end - 1);
          const std::uint8_t* const features[2] = {w.codes + n * k, w.codes + second * k};
          bool numbers = true;
          for (std::size_t m = 0; m < count && numbers; ++m) {
            numbers = dots(scaled + m * k, features, k, sums);
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
