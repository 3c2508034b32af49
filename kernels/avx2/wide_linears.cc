// Linears whose sums are 16 fp64 lanes (docs/numerics.md 2): BF16 weights, FP8 weights with unquantized
// activations, and the fp32 projections of the hyper-connections. Products are exact in fp64, so that fused
// additions change nothing.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/avx2/avx2.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/blocks.h"
#include "kernels/avx2/vectors.h"

namespace dsv41::avx2 {
namespace {

constexpr std::size_t kWidth = 16;

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

/// Dot products of one activation row (fp64, zero beyond k) with `Features` weight rows.
template <std::size_t Features, class Weight>
inline void dots(const double* x, const Weight* const (&w)[Features], std::size_t k, double* out) {
  Lanes sums[Features];
  std::size_t i = 0;
  for (; i + kWidth <= k; i += kWidth) {
    for (std::size_t f = 0; f < Features; ++f) {
      _mm_prefetch(reinterpret_cast<const char*>(w[f] + i) + kPrefetch, _MM_HINT_T0);
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
      __m256d parts[4];
      widen16(last, parts);
      for (std::size_t p = 0; p < 4; ++p)
        sums[f].part[p] = _mm256_fmadd_pd(parts[p], _mm256_loadu_pd(x + i + 4 * p), sums[f].part[p]);
    }
  }
  for (std::size_t f = 0; f < Features; ++f) out[f] = fold(sums[f]);
}

/// `Rows` activation rows times `Features` decoded weight rows, [.., padded] fp64 both, a quarter of the
/// lanes at a time; out [Rows][Features].
template <std::size_t Rows, std::size_t Features>
[[gnu::noinline]] void tile_dots(const double* x, const double* w, std::size_t padded, double* out) {
  Lanes sums[Rows][Features];
  for (std::size_t p = 0; p < 4; ++p) {
    __m256d sum[Rows][Features];
    for (auto& row : sum)
      for (__m256d& value : row) value = _mm256_setzero_pd();
    for (std::size_t i = 4 * p; i < padded; i += kWidth) {
      __m256d weights[Features];
      for (std::size_t f = 0; f < Features; ++f) weights[f] = _mm256_loadu_pd(w + f * padded + i);
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m256d value = _mm256_loadu_pd(x + m * padded + i);
        for (std::size_t f = 0; f < Features; ++f) sum[m][f] = _mm256_fmadd_pd(value, weights[f], sum[m][f]);
      }
    }
    for (std::size_t m = 0; m < Rows; ++m)
      for (std::size_t f = 0; f < Features; ++f) sums[m][f].part[p] = sum[m][f];
  }
  for (std::size_t m = 0; m < Rows; ++m)
    for (std::size_t f = 0; f < Features; ++f) out[m * Features + f] = fold(sums[m][f]);
}

constexpr std::size_t kFeatures = 4, kRows = 3;  // 12 sums and 5 operands: what the registers hold
constexpr std::size_t kRowBlock = 24;            // rows whose fp64 values stay near while the weights pass by

struct Scratch {
  std::vector<double> x, w;
};
Scratch& scratch() {
  static thread_local Scratch buffers;
  return buffers;
}

/// emit(row, feature, fp64 sum) for every row and feature of the range.
template <class Emit>
void bfloat16_sums(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w,
                   Range range, const Emit& emit) {
  const std::size_t k = w.k, padded = ceil_div(k, kWidth) * kWidth;
  auto& [wide_x, wide_w] = scratch();
  const std::size_t block_rows = std::min(rows, kRowBlock);
  if (wide_x.size() < block_rows * padded) wide_x.resize(block_rows * padded);
  if (wide_w.size() < kFeatures * padded) wide_w.resize(kFeatures * padded);
  for (std::size_t first = 0; first < rows; first += kRowBlock) {
    const std::size_t count = std::min(kRowBlock, rows - first);
    for (std::size_t m = 0; m < count; ++m)
      widen_row(x + (first + m) * x_stride, k, padded, wide_x.data() + m * padded);
    std::size_t n = range.begin;
    double sums[kRows * kFeatures];
    if (count == 1) {
      for (; n + 2 <= range.end; n += 2) {
        const BFloat16* const features[2] = {w.values + n * k, w.values + (n + 1) * k};
        dots(wide_x.data(), features, k, sums);
        emit(first, n, sums[0]), emit(first, n + 1, sums[1]);
      }
      for (; n < range.end; ++n) {
        const BFloat16* const features[1] = {w.values + n * k};
        dots(wide_x.data(), features, k, sums);
        emit(first, n, sums[0]);
      }
      continue;
    }
    for (; n < range.end; n += kFeatures) {
      const std::size_t features = std::min(kFeatures, range.end - n);
      for (std::size_t f = 0; f < kFeatures; ++f)
        widen_row(w.values + (n + std::min(f, features - 1)) * k, k, padded, wide_w.data() + f * padded);
      std::size_t m = 0;
      const auto emit_rows = [&](std::size_t tile_rows) {
        for (std::size_t r = 0; r < tile_rows; ++r)
          for (std::size_t f = 0; f < features; ++f) emit(first + m + r, n + f, sums[r * kFeatures + f]);
        m += tile_rows;
      };
      while (m + kRows <= count)
        tile_dots<kRows, kFeatures>(wide_x.data() + m * padded, wide_w.data(), padded, sums),
            emit_rows(kRows);
      while (m < count)
        tile_dots<1, kFeatures>(wide_x.data() + m * padded, wide_w.data(), padded, sums), emit_rows(1);
    }
  }
}

// E4M3 codes enter as code * 2^-1016 and activations as x * s * 2^516: sums are 2^-500 of the true ones, far
// from both ends of the range, and rounded at the same places.
constexpr double kActivationFactor = 0x1p516, kSumFactor = 0x1p500;
/// Scales with which bf16(code * scale) rounds nothing.
constexpr std::uint8_t kSmallestScale = 17, kLargestScale = 246;

bool plain_weights(const Fp8Matrix& w, Range features) {
  const std::size_t blocks = w.k / kBlock;
  const std::uint8_t* const scales = w.scales + features.begin / kBlock * blocks;
  for (std::size_t b = 0; b < blocks; ++b)
    if (scales[b] < kSmallestScale || scales[b] > kLargestScale) return false;
  return !holds_e4m3_nan(w.codes + features.begin * w.k, features.size() * w.k);
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
  auto& [wide_x, wide_w] = scratch();
  const std::size_t block_rows = std::min(rows, kRowBlock);
  if (wide_x.size() < (block_rows + 1) * k) wide_x.resize((block_rows + 1) * k);
  if (wide_w.size() < kFeatures * k) wide_w.resize(kFeatures * k);
  double* const scaled = wide_x.data() + block_rows * k;
  for (std::size_t first = 0; first < rows; first += kRowBlock) {
    const std::size_t count = std::min(kRowBlock, rows - first);
    for (std::size_t m = 0; m < count; ++m)
      widen_row(x + (first + m) * x_stride, k, k, wide_x.data() + m * k);
    for (std::size_t begin = range.begin, end; begin < range.end; begin = end) {
      end = std::min(range.end, (begin / kBlock + 1) * kBlock);  // features that share their scales
      const auto put = [&](std::size_t row, std::size_t n, double sum) {
        out[(first + row) * out_stride + n - range.begin] = to_bfloat16(sum * kSumFactor);
      };
      if (!plain_weights(w, {begin, end})) {
        plain_ops().linear_fp8_unquantized(x + first * x_stride, count, x_stride, w, {begin, end},
                                           out + first * out_stride + begin - range.begin, out_stride);
        continue;
      }
      const std::uint8_t* const scales = w.scales + begin / kBlock * blocks;
      double sums[kRows * kFeatures];
      std::size_t n = begin;
      if (count == 1) {
        for (std::size_t b = 0; b < blocks; ++b) {
          const __m256d factor =
              _mm256_set1_pd(static_cast<double>(decode_e8m0(scales[b])) * kActivationFactor);
          for (std::size_t i = b * kBlock; i < (b + 1) * kBlock; i += 4)
            _mm256_storeu_pd(scaled + i, _mm256_mul_pd(_mm256_loadu_pd(wide_x.data() + i), factor));
        }
        for (; n + 2 <= end; n += 2) {
          const std::uint8_t* const features[2] = {w.codes + n * k, w.codes + (n + 1) * k};
          dots(scaled, features, k, sums);
          put(0, n, sums[0]), put(0, n + 1, sums[1]);
        }
        for (; n < end; ++n) {
          const std::uint8_t* const features[1] = {w.codes + n * k};
          dots(scaled, features, k, sums);
          put(0, n, sums[0]);
        }
        continue;
      }
      for (; n < end; n += kFeatures) {
        const std::size_t features = std::min(kFeatures, end - n);
        for (std::size_t f = 0; f < kFeatures; ++f) {
          const std::uint8_t* const codes = w.codes + (n + std::min(f, features - 1)) * k;
          for (std::size_t b = 0; b < blocks; ++b) {
            const __m256d factor =
                _mm256_set1_pd(static_cast<double>(decode_e8m0(scales[b])) * kActivationFactor);
            for (std::size_t i = b * kBlock; i < (b + 1) * kBlock; i += 4)
              _mm256_storeu_pd(wide_w.data() + f * k + i, _mm256_mul_pd(scaled_codes(codes + i), factor));
          }
        }
        std::size_t m = 0;
        const auto put_rows = [&](std::size_t tile_rows) {
          for (std::size_t r = 0; r < tile_rows; ++r)
            for (std::size_t f = 0; f < features; ++f) put(m + r, n + f, sums[r * kFeatures + f]);
          m += tile_rows;
        };
        while (m + kRows <= count)
          tile_dots<kRows, kFeatures>(wide_x.data() + m * k, wide_w.data(), k, sums), put_rows(kRows);
        while (m < count) tile_dots<1, kFeatures>(wide_x.data() + m * k, wide_w.data(), k, sums), put_rows(1);
      }
    }
  }
}

void mix_projections(const BFloat16* x, const F32Matrix& fn, float eps, Range range, double* out) {
  if (fn.k % kWidth != 0) return plain_ops().mix_projections(x, fn, eps, range, out);
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
        _mm_prefetch(reinterpret_cast<const char*>(w[f] + i) + kPrefetch, _MM_HINT_T0);
        for (std::size_t p = 0; p < 4; ++p)
          sums[f].part[p] =
              _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(w[f] + i + 4 * p)), values[p], sums[f].part[p]);
      }
    }
    out[n] = fold(sums[0]) * inverse;
    if (second != n) out[second] = fold(sums[1]) * inverse;
  }
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
