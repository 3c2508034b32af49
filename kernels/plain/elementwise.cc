// Element-wise chains and the short sums of single vectors (docs/model.md 1, 3 and 4; docs/numerics.md 3, 4
// and 6).
#include <cmath>

#include "kernels/exact_math.h"
#include "kernels/plain/plain.h"
#include "kernels/plain/sums.h"

namespace dsv41::plain {

void rms_norm(const BFloat16* x, const BFloat16* weight, float eps, std::size_t rows, std::size_t k,
              BFloat16* out) {
  for (std::size_t row = 0; row < rows; ++row, x += k, out += k) {
    const double squares = wide_sum(k, [=](std::size_t i) {
      const double value = to_float(x[i]);
      return value * value;
    });
    const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(k) + static_cast<double>(eps));
    for (std::size_t i = 0; i < k; ++i)
      out[i] = to_bfloat16(static_cast<double>(to_float(x[i])) * inverse *
                           static_cast<double>(to_float(weight[i])));
  }
}

void rotate(BFloat16* x, std::size_t heads, std::size_t dim, std::size_t pairs, const float* cosine,
            const float* sine, bool inverse) {
  for (std::size_t head = 0; head < heads; ++head) {
    BFloat16* const channels = x + (head + 1) * dim - 2 * pairs;
    for (std::size_t i = 0; i < pairs; ++i) {
      const double real = to_float(channels[2 * i]), imaginary = to_float(channels[2 * i + 1]);
      const double c = cosine[i], s = inverse ? -sine[i] : sine[i];
      channels[2 * i] = to_bfloat16(real * c - imaginary * s);
      channels[2 * i + 1] = to_bfloat16(real * s + imaginary * c);
    }
  }
}

void swiglu(const BFloat16* gate, const BFloat16* up, float weight, float limit, std::size_t n,
            BFloat16* out) {
  for (std::size_t i = 0; i < n; ++i) {
    float g = to_float(gate[i]), u = to_float(up[i]);
    if (limit != 0.0f) {
      g = g > limit ? limit : g;
      u = u > limit ? limit : u;
      u = u < -limit ? -limit : u;
    }
    const double silu = g / (1.0 + exact::exp(-static_cast<double>(g)));
    out[i] = to_bfloat16(silu * static_cast<double>(u) * static_cast<double>(weight));
  }
}

void compress_group(const float* u, const float* z, std::size_t members, std::size_t dim, BFloat16* out) {
  for (std::size_t d = 0; d < dim; ++d) {
    float largest = z[d];
    for (std::size_t g = 1; g < members; ++g) largest = z[g * dim + d] > largest ? z[g * dim + d] : largest;
    const auto exponential = [&](std::size_t g) {
      return exact::exp(static_cast<double>(z[g * dim + d]) - static_cast<double>(largest));
    };
    double total = 0.0;
    for (std::size_t g = 0; g < members; ++g) total += exponential(g);
    double value = 0.0;
    for (std::size_t g = 0; g < members; ++g)
      value += exponential(g) / total * static_cast<double>(u[g * dim + d]);
    out[d] = to_bfloat16(value);
  }
}

void sum_experts(const BFloat16* experts, std::size_t count, const BFloat16* shared, std::size_t dim,
                 BFloat16* out) {
  for (std::size_t d = 0; d < dim; ++d) {
    float sum = 0.0f;
    for (std::size_t expert = 0; expert < count; ++expert) sum += to_float(experts[expert * dim + d]);
    out[d] = to_bfloat16(sum + to_float(shared[d]));
  }
}

}  // namespace dsv41::plain
