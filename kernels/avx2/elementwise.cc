// Norms, activations and the residual stream with AVX2 (docs/numerics.md 2 to 4 and 6): the same fp64
// operations in the same order in every lane; a fused addition stands only where the product is exact.
#include <immintrin.h>

#include <cmath>

#include "kernels/avx2/avx2.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx2/target_begin.h"

#include "kernels/avx2/vectors.h"

namespace dsv41::avx2 {
namespace {

struct Eight {
  __m256d low, high;
};
inline Eight widen(__m256 values) {
  return {low_half(values), high_half(values)};
}
inline Eight widen_at(const BFloat16* from) {
  return widen(widen8(from));
}
inline Eight fused(__m256d factor, const Eight& values, const Eight& sum) {
  return {_mm256_fmadd_pd(factor, values.low, sum.low), _mm256_fmadd_pd(factor, values.high, sum.high)};
}
inline Eight zero() {
  return {_mm256_setzero_pd(), _mm256_setzero_pd()};
}
inline void put(BFloat16* to, const Eight& values) {
  store8(to, narrow(values.low, values.high));
}

/// silu(g) * u * weight of four values.
inline __m256d activate(__m256d g, __m256d u, __m256d weight) {
  const __m256d minus_g = _mm256_xor_pd(g, _mm256_set1_pd(-0.0));
  const __m256d silu = _mm256_div_pd(g, _mm256_add_pd(_mm256_set1_pd(1.0), exponential(minus_g)));
  return _mm256_mul_pd(_mm256_mul_pd(silu, u), weight);
}

}  // namespace

void rms_norm(const BFloat16* x, const BFloat16* weight, float eps, std::size_t rows, std::size_t k,
              BFloat16* out) {
  if (k % 16 != 0) return plain_ops().rms_norm(x, weight, eps, rows, k, out);
  for (std::size_t row = 0; row < rows; ++row, x += k, out += k) {
    Lanes squares;
    for (std::size_t i = 0; i < k; i += 16)
      for (std::size_t half = 0; half < 2; ++half) {
        const Eight values = widen_at(x + i + 8 * half);
        squares.part[2 * half] = _mm256_fmadd_pd(values.low, values.low, squares.part[2 * half]);
        squares.part[2 * half + 1] = _mm256_fmadd_pd(values.high, values.high, squares.part[2 * half + 1]);
      }
    const __m256d inverse =
        _mm256_set1_pd(1.0 / std::sqrt(fold(squares) / static_cast<double>(k) + static_cast<double>(eps)));
    for (std::size_t i = 0; i < k; i += 8) {
      const Eight values = widen_at(x + i), weights = widen_at(weight + i);
      put(out + i, {_mm256_mul_pd(_mm256_mul_pd(values.low, inverse), weights.low),
                    _mm256_mul_pd(_mm256_mul_pd(values.high, inverse), weights.high)});
    }
  }
}

void swiglu(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n,
            BFloat16* out) {
  const __m256d wide_weight = _mm256_set1_pd(static_cast<double>(weight));
  const __m256 upper = _mm256_set1_ps(limit), lower = _mm256_set1_ps(-limit);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 g = widen8(gate + i), u = widen8(up + i);
    if (limit != 0.0f) {
      g = _mm256_min_ps(upper, g);  // NaN, the second operand, stays
      u = _mm256_max_ps(lower, _mm256_min_ps(upper, u));
    }
    const Eight wide_g = widen(g), wide_u = widen(u);
    put(out + i,
        {activate(wide_g.low, wide_u.low, wide_weight), activate(wide_g.high, wide_u.high, wide_weight)});
  }
  if (i < n) plain_ops().swiglu(gate + i, up + i, weight, limit, n - i, out + i);
}

void collapse(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out) {
  if (dim % 8 != 0) return plain_ops().collapse(x, pre, copies, dim, out);
  for (std::size_t d = 0; d < dim; d += 8) {
    Eight sum = zero();
    for (std::size_t m = 0; m < copies; ++m)
      sum = fused(_mm256_set1_pd(static_cast<double>(pre[m])), widen_at(x + m * dim + d), sum);
    put(out + d, sum);
  }
}

void expand(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
            std::size_t dim, BFloat16* out) {
  constexpr std::size_t kCopies = 4;
  if (dim % 8 != 0 || copies != kCopies) return plain_ops().expand(y, x, post, comb, copies, dim, out);
  for (std::size_t d = 0; d < dim; d += 8) {
    Eight stream[kCopies];  // all copies are read before any is written: out may be x
    for (std::size_t j = 0; j < kCopies; ++j) stream[j] = widen_at(x + j * dim + d);
    const Eight added = widen_at(y + d);
    for (std::size_t k = 0; k < kCopies; ++k) {
      Eight sum = zero();
      for (std::size_t j = 0; j < kCopies; ++j)
        sum = fused(_mm256_set1_pd(static_cast<double>(comb[j * kCopies + k])), stream[j], sum);
      put(out + k * dim + d, fused(_mm256_set1_pd(static_cast<double>(post[k])), added, sum));
    }
  }
}

void sum_experts(const BFloat16* experts, std::size_t count, const BFloat16* shared, std::size_t dim,
                 BFloat16* out) {
  if (dim % 8 != 0) return plain_ops().sum_experts(experts, count, shared, dim, out);
  for (std::size_t d = 0; d < dim; d += 8) {
    __m256 sum = _mm256_setzero_ps();
    for (std::size_t e = 0; e < count; ++e) sum = _mm256_add_ps(sum, widen8(experts + e * dim + d));
    store8(out + d, _mm256_add_ps(sum, widen8(shared + d)));
  }
}

}  // namespace dsv41::avx2

#include "kernels/avx2/target_end.h"
