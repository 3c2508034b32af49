// Activations of several rows for products in 16 fp64 lanes: groups of rows, each a panel. Include between
// target_begin.h and target_end.h only.
//
// The lanes are summed in two parts of eight, one after the other, each over all of K: so twice as many sums
// fit the registers. A panel holds what a part reads in the order in which it is read:
// [2 parts][padded k / 32][rows] vectors of sixteen values, the part's lanes of two successive sixteens. A
// value is the upper half of an fp64 whose lower half is zero: BF16 values and their products with powers of
// two have no more bits. So the panels of sixteen rows stay in the second-level cache, and reading them takes
// half the bandwidth that fp64 would.
#pragma once

#include <vector>

#include "kernels/avx512/vectors.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kMaxGroup = 5;  // rows of a panel

/// Values per row: zeros fill the last step of a kernel.
constexpr std::size_t padded_length(std::size_t k) {
  return ceil_div(k, 64) * 64;
}

/// How many of `left` rows to take next, at most `most`: as few portions as possible, of nearly the same
/// size.
constexpr std::size_t portion(std::size_t left, std::size_t most) {
  return ceil_div(left, ceil_div(left, most));
}

/// The alignment is spelled out for std::vector (kernels/avx2/vectors.h).
struct alignas(64) PanelVector {
  __m512i values;
};
inline PanelVector join_values(__m512d first, __m512d second) {
  return {_mm512_castps_si512(_mm512_shuffle_ps(_mm512_castpd_ps(first), _mm512_castpd_ps(second), 0xDD))};
}
/// Lanes of the first or the second sixteen.
template <std::size_t Which>
inline __m512d panel_values(const PanelVector& from) {
  const __m512i zero = _mm512_setzero_si512();
  return _mm512_castsi512_pd(Which == 0 ? _mm512_unpacklo_epi32(zero, from.values)
                                        : _mm512_unpackhi_epi32(zero, from.values));
}

/// Adds the products of one part of a sixteen, the first or the second of the vectors x [Rows], with
/// weights(feature).
template <std::size_t Which, std::size_t Rows, std::size_t Features, class Weights>
inline __attribute__((always_inline)) void add_products(const PanelVector* x, __m512d* sum,
                                                        const Weights& weights) {
  __m512d values[Rows];
#pragma GCC unroll 5
  for (std::size_t m = 0; m < Rows; ++m) values[m] = panel_values<Which>(x[m]);
#pragma GCC unroll 8
  for (std::size_t f = 0; f < Features; ++f) {
    const __m512d weight = weights(f);
#pragma GCC unroll 5
    for (std::size_t m = 0; m < Rows; ++m)
      sum[f * Rows + m] = _mm512_fmadd_pd(weight, values[m], sum[f * Rows + m]);
  }
}

/// Parts of sixteen values: lanes 0 to 7 and 8 to 15.
struct Halves {
  Sixteen operator()(const BFloat16* from, __mmask16 mask) const { return widen(from, mask); }
};

inline __m512d widen_eight(const float* from) {
  return _mm512_cvtps_pd(_mm256_loadu_ps(from));
}
/// One part of the sums of a panel made with Halves times fp32 weight rows [k], k a multiple of sixteen: out
/// [Features][Rows]. `Ahead`: elements to fetch ahead in the first part.
template <std::size_t Part, std::size_t Rows, std::size_t Features, std::size_t Ahead = 0>
DSV41_OUT_OF_LINE void float_sums(const PanelVector* x, const float* const* w, std::size_t k, __m512d* out) {
  constexpr std::size_t kSums = Features * Rows;
  __m512d sum[kSums];
#pragma GCC unroll 24
  for (std::size_t j = 0; j < kSums; ++j) sum[j] = _mm512_setzero_pd();
  std::size_t i = 8 * Part;
  for (; i + kWidth < k; i += 2 * kWidth, x += Rows) {
    if (Part == 0 && Ahead != 0)
      for (std::size_t f = 0; f < Features; ++f)
        prefetch_bytes(reinterpret_cast<const std::uint8_t*>(w[f] + i + Ahead), 128);
    add_products<0, Rows, Features>(x, sum, [&](std::size_t f) { return widen_eight(w[f] + i); });
    add_products<1, Rows, Features>(x, sum, [&](std::size_t f) { return widen_eight(w[f] + i + kWidth); });
  }
  if (i < k) add_products<0, Rows, Features>(x, sum, [&](std::size_t f) { return widen_eight(w[f] + i); });
#pragma GCC unroll 24
  for (std::size_t j = 0; j < kSums; ++j) out[j] = sum[j];
}

/// Room for the panels of `rows` rows.
inline PanelVector* panel_buffer(std::vector<PanelVector>& buffer, std::size_t rows, std::size_t k) {
  const std::size_t size = rows * padded_length(k) / 16;
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

/// Fills row m of a panel of `rows` rows. Split{}(values, mask): the two parts of sixteen values.
template <class Split>
void fill_panel_row(const BFloat16* row, std::size_t k, std::size_t rows, std::size_t m, PanelVector* panel) {
  const std::size_t part = padded_length(k) / 32;
  for (std::size_t i = 0; i < part; ++i) {
    const std::size_t begin = std::min(k, 2 * kWidth * i), middle = std::min(k, begin + kWidth);
    const Sixteen first = Split{}(row + begin, first_values(k - begin));
    const Sixteen second = Split{}(row + middle, first_values(k - middle));
    panel[i * rows + m] = join_values(first.part[0], second.part[0]);
    panel[(part + i) * rows + m] = join_values(first.part[1], second.part[1]);
  }
}

/// Panels of the groups of `rows` rows, one behind the other.
template <class Split>
void make_panels(const BFloat16* x, std::size_t rows, std::size_t x_stride, std::size_t k, PanelVector* to) {
  for (std::size_t first = 0, group; first < rows; first += group, to += group * padded_length(k) / 16) {
    group = portion(rows - first, kMaxGroup);
    for (std::size_t m = 0; m < group; ++m)
      fill_panel_row<Split>(x + (first + m) * x_stride, k, group, m, to);
  }
}

}  // namespace
}  // namespace dsv41::avx512
