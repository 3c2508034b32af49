// Activations and the residual stream with AVX-512 (docs/numerics.md 3 and 4): the same fp64 operations in
// the same order in every lane; a fused addition stands only where the product is exact.
#include <algorithm>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/vectors.h"

namespace dsv41::avx512 {
namespace {

constexpr __mmask16 kAll = 0xFFFF;

inline __m512 floats_at(const BFloat16* from) {
  const __m256i words = load32(from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
inline Sixteen fused(double factor, const Sixteen& values, const Sixteen& sum) {
  const __m512d all = _mm512_set1_pd(factor);
  return {_mm512_fmadd_pd(all, values.part[0], sum.part[0]),
          _mm512_fmadd_pd(all, values.part[1], sum.part[1])};
}
inline Sixteen zero() {
  return {{_mm512_setzero_pd(), _mm512_setzero_pd()}};
}

}  // namespace

void swiglu(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n,
            BFloat16* out) {
  constexpr std::size_t kTogether = 2 * kWidth;  // four exponentials side by side
  const __m512d wide_weight = _mm512_set1_pd(static_cast<double>(weight));
  const __m512 upper = _mm512_set1_ps(limit), lower = _mm512_set1_ps(-limit);
  std::size_t i = 0;
  for (; i + kTogether <= n; i += kTogether) {
    Sixteen g[2], u[2];
    for (std::size_t j = 0; j < 2; ++j) {
      __m512 gates = floats_at(gate + i + j * kWidth), ups = floats_at(up + i + j * kWidth);
      if (limit != 0.0f) {
        gates = _mm512_min_ps(upper, gates);  // NaN, the second operand, stays
        ups = _mm512_max_ps(lower, _mm512_min_ps(upper, ups));
      }
      g[j] = widen(gates);
      u[j] = widen(ups);
    }
    __m512d e[4];
    for (std::size_t j = 0; j < 4; ++j) e[j] = _mm512_xor_pd(g[j / 2].part[j % 2], _mm512_set1_pd(-0.0));
    exponential(e);
    for (std::size_t j = 0; j < 4; ++j) {
      const __m512d silu = _mm512_div_pd(g[j / 2].part[j % 2], _mm512_add_pd(_mm512_set1_pd(1.0), e[j]));
      e[j] = _mm512_mul_pd(_mm512_mul_pd(silu, u[j / 2].part[j % 2]), wide_weight);
    }
    store_sixteen(out + i, join_floats(e[0], e[1]));
    store_sixteen(out + i + kWidth, join_floats(e[2], e[3]));
  }
  if (i < n) avx2_ops().swiglu(gate + i, up + i, weight, limit, n - i, out + i);
}

void collapse(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out) {
  if (dim % kWidth != 0) return avx2_ops().collapse(x, pre, copies, dim, out);
  for (std::size_t d = 0; d < dim; d += kWidth) {
    Sixteen sum = zero();
    for (std::size_t m = 0; m < copies; ++m)
      sum = fused(static_cast<double>(pre[m]), widen(x + m * dim + d, kAll), sum);
    store_sixteen(out + d, join_floats(sum.part[0], sum.part[1]));
  }
}

void expand(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
            std::size_t dim, BFloat16* out) {
  constexpr std::size_t kCopies = 4;
  if (dim % kWidth != 0 || copies != kCopies) return avx2_ops().expand(y, x, post, comb, copies, dim, out);
  double wide_post[kCopies], wide_comb[kCopies * kCopies];
  std::copy_n(post, kCopies, wide_post);
  std::copy_n(comb, kCopies * kCopies, wide_comb);
  for (std::size_t d = 0; d < dim; d += kWidth) {
    Sixteen stream[kCopies];  // all copies are read before any is written: out may be x
    for (std::size_t j = 0; j < kCopies; ++j) stream[j] = widen(x + j * dim + d, kAll);
    const Sixteen added = widen(y + d, kAll);
    for (std::size_t k = 0; k < kCopies; ++k) {
      Sixteen sum = zero();
      for (std::size_t j = 0; j < kCopies; ++j) sum = fused(wide_comb[j * kCopies + k], stream[j], sum);
      sum = fused(wide_post[k], added, sum);
      store_sixteen(out + k * dim + d, join_floats(sum.part[0], sum.part[1]));
    }
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
