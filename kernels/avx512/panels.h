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
#include "kernels/unquantized_fp8.h"

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

/// Room for the panels of `rows` rows.
inline PanelVector* panel_buffer(std::vector<PanelVector>& buffer, std::size_t rows, std::size_t k) {
  const std::size_t size = rows * padded_length(k) / 16;
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

/// Panels of the groups of `rows` rows, one behind the other. Weights::split: a part of each sixteen values.
template <class Weights>
void make_panels(const BFloat16* x, std::size_t rows, std::size_t x_stride, std::size_t k, PanelVector* to) {
  const std::size_t part = padded_length(k) / 32;
  for (std::size_t first = 0, group; first < rows; first += group, to += 2 * part * group) {
    group = portion(rows - first, kMaxGroup);
    for (std::size_t m = 0; m < group; ++m) {
      const BFloat16* const row = x + (first + m) * x_stride;
      for (std::size_t i = 0; i < part; ++i) {
        const std::size_t begin = std::min(k, 2 * kWidth * i), middle = std::min(k, begin + kWidth);
        const Sixteen a = Weights::split(row + begin, first_values(k - begin));
        const Sixteen b = Weights::split(row + middle, first_values(k - middle));
        to[i * group + m] = join_values(a.part[0], b.part[0]);
        to[(part + i) * group + m] = join_values(a.part[1], b.part[1]);
      }
    }
  }
}

/// What the activations of a block are multiplied with, and how that differs from what they were before.
struct BlockFactor {
  double current = 1.0, change = 1.0;
};

/// Exchanges the factors of the panels' blocks for the scales of a block of features, in place: factors are
/// powers of two, so that nothing is rounded. A vector lies within a block.
inline void scale_panels(PanelVector* panels, std::size_t rows, std::size_t k, const std::uint8_t* scales,
                         std::vector<BlockFactor>& factors) {
  const std::size_t padding = padded_length(k) / kBlock - factors.size();
  for (std::size_t b = 0; b < factors.size(); ++b) {
    const double factor = static_cast<double>(decode_e8m0(scales[b])) * unquantized_fp8::kActivationFactor;
    factors[b] = {factor, factor / factors[b].current};
  }
  for (std::size_t first = 0, group; first < rows; first += group) {
    group = portion(rows - first, kMaxGroup);
    for (std::size_t part = 0; part < 2; ++part, panels += padding * group)
      for (const BlockFactor& factor : factors) {
        if (factor.change == 1.0) {
          panels += group;
          continue;
        }
        const __m512d change = _mm512_set1_pd(factor.change);
        for (std::size_t m = 0; m < group; ++m, ++panels)
          *panels = join_values(_mm512_mul_pd(panel_values<0>(*panels), change),
                                _mm512_mul_pd(panel_values<1>(*panels), change));
      }
  }
}

}  // namespace
}  // namespace dsv41::avx512
