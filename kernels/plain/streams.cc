// Operations on the copies of the residual stream: hyper-connections and the Engram gate (docs/model.md 2 and
// 5; docs/numerics.md 2 to 4).
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/exact_math.h"
#include "kernels/plain/plain.h"
#include "kernels/plain/sums.h"

namespace dsv41::plain {
namespace {

constexpr std::size_t kChunk =
    64;  // channels handled at a time where every copy is read before any is written

/// 1/sqrt(mean(x^2) + eps), fp64.
double inverse_rms(const BFloat16* x, std::size_t count, float eps) {
  const double squares = wide_sum(count, [=](std::size_t i) {
    const double value = to_float(x[i]);
    return value * value;
  });
  return 1.0 / std::sqrt(squares / static_cast<double>(count) + static_cast<double>(eps));
}

}  // namespace

void collapse(const BFloat16* x, const float* pre, std::size_t copies, std::size_t dim, BFloat16* out) {
  for (std::size_t d = 0; d < dim; ++d) {
    double sum = 0.0;
    for (std::size_t m = 0; m < copies; ++m)
      sum += static_cast<double>(pre[m]) * static_cast<double>(to_float(x[m * dim + d]));
    out[d] = to_bfloat16(sum);
  }
}

void expand(const BFloat16* y, const BFloat16* x, const float* post, const float* comb, std::size_t copies,
            std::size_t dim, BFloat16* out) {
  thread_local std::vector<double> scratch;
  scratch.resize(std::max(scratch.size(), copies * kChunk));
  double* const mixed = scratch.data();  // [copies, kChunk]
  for (std::size_t first = 0; first < dim; first += kChunk) {
    const std::size_t count = std::min(kChunk, dim - first);
    std::fill(mixed, mixed + copies * kChunk, 0.0);
    for (std::size_t j = 0; j < copies; ++j) {
      for (std::size_t k = 0; k < copies; ++k) {
        const double weight = comb[j * copies + k];
        for (std::size_t d = 0; d < count; ++d)
          mixed[k * kChunk + d] += weight * static_cast<double>(to_float(x[j * dim + first + d]));
      }
    }
    for (std::size_t k = 0; k < copies; ++k) {
      const double weight = post[k];
      for (std::size_t d = 0; d < count; ++d)
        out[k * dim + first + d] =
            to_bfloat16(weight * static_cast<double>(to_float(y[first + d])) + mixed[k * kChunk + d]);
    }
  }
}

void mix_projections(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range,
                     double* out) {
  for (std::size_t row = 0; row < rows; ++row, x += fn.k, out += fn.n) {
    const double inverse = inverse_rms(x, fn.k, eps);
    for (std::size_t feature = range.begin; feature < range.end; ++feature) {
      const float* const weights = fn.values + feature * fn.k;
      const double dot = wide_sum(fn.k, [=](std::size_t i) {
        return static_cast<double>(weights[i]) * static_cast<double>(to_float(x[i]));
      });
      out[feature] = dot * inverse;
    }
  }
}

void engram_gate(BFloat16* x, const BFloat16* key, const BFloat16* value, const BFloat16* q_weight,
                 const BFloat16* k_weight, float eps, std::size_t copies, std::size_t dim, float* gate) {
  for (std::size_t m = 0; m < copies; ++m, x += dim, key += dim, q_weight += dim, k_weight += dim) {
    const double products = wide_sum(dim, [=](std::size_t d) {  // 32 significant bits: each term is exact
      const double weight =
          static_cast<double>(to_float(q_weight[d])) * static_cast<double>(to_float(k_weight[d]));
      return static_cast<double>(to_float(x[d])) * weight * static_cast<double>(to_float(key[d]));
    });
    const double dot = products * inverse_rms(x, dim, eps) * inverse_rms(key, dim, eps) *
                       (1.0 / std::sqrt(static_cast<double>(dim)));
    const double root = std::copysign(std::sqrt(std::max(std::fabs(dot), 1e-6)), dot);
    gate[m] = static_cast<float>(1.0 / (1.0 + exact::exp(-root)));
    for (std::size_t d = 0; d < dim; ++d) {
      const double added = static_cast<double>(gate[m]) * static_cast<double>(to_float(value[d]));
      x[d] = to_bfloat16(static_cast<double>(to_float(x[d])) + added);
    }
  }
}

}  // namespace dsv41::plain
