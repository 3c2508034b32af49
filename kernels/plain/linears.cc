// Linear layers (docs/model.md 1; order of the sums: docs/numerics.md 1 and 2). Codes are decoded to fp64, in
// which the products of two stored values are exact. A few rows of activations stay decoded while the weights
// pass by once.
#include <algorithm>
#include <vector>

#include "kernels/plain/plain.h"
#include "kernels/plain/sums.h"
#include "kernels/plain/tables.h"

namespace dsv41::plain {
namespace {

constexpr std::size_t kRowTile =
    8;  // rows decoded at a time: 8 * 5120 doubles stay in the second-level cache

/// Calls product(row, feature, activations, weights) with both sides decoded to fp64 [k] for every row and
/// every feature of the range. decode_activations(row, out) and decode_weights(feature, out) fill k doubles.
template <class DecodeActivations, class DecodeWeights, class Product>
void for_each_product(std::size_t rows, std::size_t k, Range range,
                      const DecodeActivations& decode_activations, const DecodeWeights& decode_weights,
                      const Product& product) {
  thread_local std::vector<double> scratch;
  scratch.resize(std::max(scratch.size(), (kRowTile + 1) * k));
  double* const weights = scratch.data();
  double* const activations = weights + k;
  for (std::size_t first = 0; first < rows; first += kRowTile) {
    const std::size_t count = std::min(kRowTile, rows - first);
    for (std::size_t row = 0; row < count; ++row) decode_activations(first + row, activations + row * k);
    for (std::size_t feature = range.begin; feature < range.end; ++feature) {
      decode_weights(feature, weights);
      for (std::size_t row = 0; row < count; ++row)
        product(first + row, feature, activations + row * k, weights);
    }
  }
}

void decode_e4m3_row(const std::uint8_t* codes, std::size_t k, double* out) {
  for (std::size_t i = 0; i < k; ++i) out[i] = kE4m3[codes[i]];
}

void decode_e2m1_row(const std::uint8_t* packed, std::size_t k, double* out) {
  for (std::size_t i = 0; i < k / 2; ++i) {
    out[2 * i] = kE2m1Pairs[packed[i]].even;
    out[2 * i + 1] = kE2m1Pairs[packed[i]].odd;
  }
}

void decode_bfloat16_row(const BFloat16* values, std::size_t k, double* out) {
  for (std::size_t i = 0; i < k; ++i) out[i] = to_float(values[i]);
}

/// numerics.md 1: per block the exact dot, rounded once, times the product of both scales, added in fp32.
BFloat16 sum_blocks(const double* x, const std::uint8_t* x_scales, const double* w,
                    const std::uint8_t* w_scales, std::size_t k) {
  float sum = 0.0f;
  for (std::size_t block = 0; block < k / kBlock; ++block) {
    const auto dot = static_cast<float>(block_dot(x + block * kBlock, w + block * kBlock));
    sum += dot * (kE8m0[x_scales[block]] * kE8m0[w_scales[block]]);
  }
  return to_bfloat16(sum);
}

}  // namespace

void linear_fp8(const QuantizedRows& x, const Fp8Matrix& w, Range range, BFloat16* out) {
  const std::size_t k = w.k, blocks = k / kBlock;
  for_each_product(
      x.rows, k, range, [&](std::size_t row, double* to) { decode_e4m3_row(x.codes + row * k, k, to); },
      [&](std::size_t feature, double* to) { decode_e4m3_row(w.codes + feature * k, k, to); },
      [&](std::size_t row, std::size_t feature, const double* activations, const double* weights) {
        out[row * w.n + feature] = sum_blocks(activations, x.scales + row * blocks, weights,
                                              w.scales + feature / kBlock * blocks, k);
      });
}

void linear_fp4(const QuantizedRows& x, const Fp4Matrix& w, Range range, BFloat16* out) {
  const std::size_t k = w.k, blocks = k / kBlock;
  for_each_product(
      x.rows, k, range, [&](std::size_t row, double* to) { decode_e4m3_row(x.codes + row * k, k, to); },
      [&](std::size_t feature, double* to) { decode_e2m1_row(w.codes + feature * (k / 2), k, to); },
      [&](std::size_t row, std::size_t feature, const double* activations, const double* weights) {
        out[row * w.n + feature] =
            sum_blocks(activations, x.scales + row * blocks, weights, w.scales + feature * blocks, k);
      });
}

void linear_bf16(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Bf16Matrix& w, Range range,
                 BFloat16* out) {
  for_each_product(
      rows, w.k, range,
      [&](std::size_t row, double* to) { decode_bfloat16_row(x + row * x_stride, w.k, to); },
      [&](std::size_t feature, double* to) { decode_bfloat16_row(w.values + feature * w.k, w.k, to); },
      [&](std::size_t row, std::size_t feature, const double* activations, const double* weights) {
        out[row * w.n + feature] = to_bfloat16(wide_dot(activations, weights, w.k));
      });
}

void linear_wide(const BFloat16* x, std::size_t rows, const Bf16Matrix& w, Range range, float* out) {
  for_each_product(
      rows, w.k, range, [&](std::size_t row, double* to) { decode_bfloat16_row(x + row * w.k, w.k, to); },
      [&](std::size_t feature, double* to) { decode_bfloat16_row(w.values + feature * w.k, w.k, to); },
      [&](std::size_t row, std::size_t feature, const double* activations, const double* weights) {
        out[row * w.n + feature] = static_cast<float>(wide_dot(activations, weights, w.k));
      });
}

void linear_fp8_unquantized(const BFloat16* x, std::size_t rows, std::size_t x_stride, const Fp8Matrix& w,
                            Range range, BFloat16* out, std::size_t out_stride) {
  const std::size_t k = w.k;
  for_each_product(
      rows, k, range, [&](std::size_t row, double* to) { decode_bfloat16_row(x + row * x_stride, k, to); },
      [&](std::size_t feature, double* to) {
        const std::uint8_t* const codes = w.codes + feature * k;
        const std::uint8_t* const scales = w.scales + feature / kBlock * (k / kBlock);
        for (std::size_t i = 0; i < k; ++i)  // the weight is a bf16 tensor: bf16(code * scale)
          to[i] = to_float(to_bfloat16(static_cast<float>(kE4m3[codes[i]]) * kE8m0[scales[i / kBlock]]));
      },
      [&](std::size_t row, std::size_t feature, const double* activations, const double* weights) {
        out[row * out_stride + feature - range.begin] = to_bfloat16(wide_dot(activations, weights, k));
      });
}

}  // namespace dsv41::plain
