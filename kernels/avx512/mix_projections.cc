// Projections of the hyper-connections (docs/model.md 2; docs/numerics.md 2) for several rows with AVX-512:
// fp32 weights are widened once for a group of rows. Products are exact in fp64. A single row, which takes as
// long as reading its weights, goes by AVX2.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/avx512.h"
// (target_begin.h has to come after every other header)
#include "kernels/avx512/target_begin.h"

#include "kernels/avx512/panels.h"

namespace dsv41::avx512 {
namespace {

constexpr std::size_t kGroupRows = 4;
constexpr std::size_t kFeatures = 6;  // 24 sums in registers; the mixes of four copies are 24 features
constexpr std::size_t kAhead = 512;   // elements

/// 1/sqrt(mean(x^2) + eps) of the rows of a panel.
template <std::size_t Rows>
void inverse_rms(const PanelVector* panel, std::size_t k, float eps, double* out) {
  __m512d squares[2][Rows] = {};
  for (std::size_t part = 0; part < 2; ++part)
    for (std::size_t i = 0; i < padded_length(k) / 32; ++i, panel += Rows)
      for (std::size_t m = 0; m < Rows; ++m) {
        const __m512d first = panel_values<0>(panel[m]), second = panel_values<1>(panel[m]);
        squares[part][m] = _mm512_fmadd_pd(first, first, squares[part][m]);
        squares[part][m] = _mm512_fmadd_pd(second, second, squares[part][m]);
      }
  for (std::size_t m = 0; m < Rows; ++m) {
    const double mean = fold(squares[0][m], squares[1][m]) / static_cast<double>(k);
    out[m] = 1.0 / std::sqrt(mean + static_cast<double>(eps));
  }
}

template <std::size_t Rows>
void project(const PanelVector* panel, const F32Matrix& fn, float eps, Range range, double* out) {
  double inverse[Rows];
  inverse_rms<Rows>(panel, fn.k, eps, inverse);
  for (std::size_t n = range.begin; n < range.end; n += kFeatures) {
    const float* weights[kFeatures];  // beyond the last feature the last one again
    for (std::size_t f = 0; f < kFeatures; ++f)
      weights[f] = fn.values + std::min(n + f, range.end - 1) * fn.k;
    __m512d first[kFeatures * Rows], second[kFeatures * Rows];
    float_sums<0, Rows, kFeatures, kAhead>(panel, weights, fn.k, first);
    float_sums<1, Rows, kFeatures>(panel + padded_length(fn.k) / 32 * Rows, weights, fn.k, second);
    for (std::size_t f = 0; f < std::min(kFeatures, range.end - n); ++f)
      for (std::size_t m = 0; m < Rows; ++m)
        out[m * fn.n + n + f] = fold(first[f * Rows + m], second[f * Rows + m]) * inverse[m];
  }
}

}  // namespace

void mix_projections(const BFloat16* x, std::size_t rows, const F32Matrix& fn, float eps, Range range,
                     double* out) {
  if (rows == 1 || fn.k % kWidth != 0) return avx2_ops().mix_projections(x, rows, fn, eps, range, out);
  static thread_local std::vector<PanelVector> buffer;
  PanelVector* const panel = panel_buffer(buffer, kGroupRows, fn.k);
  for (std::size_t first = 0, group; first < rows; first += group, x += group * fn.k, out += group * fn.n) {
    group = portion(rows - first, kGroupRows);
    for (std::size_t m = 0; m < group; ++m) fill_panel_row<Halves>(x + m * fn.k, fn.k, group, m, panel);
    switch (group) {
      case 2:
        project<2>(panel, fn, eps, range, out);
        break;
      case 3:
        project<3>(panel, fn, eps, range, out);
        break;
      default:
        project<kGroupRows>(panel, fn, eps, range, out);
    }
  }
}

}  // namespace dsv41::avx512

#include "kernels/avx512/target_end.h"
