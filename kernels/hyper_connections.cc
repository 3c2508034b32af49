// Mixing weights of the hyper-connections (docs/model.md 2): everything is fp64 until the results are held in
// fp32.
#include "kernels/hyper_connections.h"

#include <vector>

#include "kernels/exact_math.h"

namespace dsv41 {
namespace {

double sigmoid(double v) {
  return 1.0 / (1.0 + exact::exp(-v));
}

/// Softmax of one row of the mixing matrix, in place.
void softmax(double* row, std::size_t count) {
  double largest = row[0];
  for (std::size_t k = 1; k < count; ++k) largest = row[k] > largest ? row[k] : largest;
  double sum = 0.0;
  for (std::size_t k = 0; k < count; ++k) sum += row[k] = exact::exp(row[k] - largest);
  for (std::size_t k = 0; k < count; ++k) row[k] /= sum;
}

/// Divides `count` entries that lie `stride` apart by (their sum + eps).
void normalize(double* entries, std::size_t count, std::size_t stride, double eps) {
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) sum += entries[i * stride];
  for (std::size_t i = 0; i < count; ++i) entries[i * stride] /= sum + eps;
}

}  // namespace

void finish_mixes(std::span<const double> projections, std::span<const float> scale,
                  std::span<const float> base, std::size_t copies, unsigned sinkhorn_iterations,
                  double hc_eps, std::span<float> pre, std::span<float> post, std::span<float> comb) {
  const auto mixed = [&](std::size_t i, std::size_t kind) {
    return projections[i] * static_cast<double>(scale[kind]) + static_cast<double>(base[i]);
  };
  for (std::size_t j = 0; j < copies; ++j) {
    pre[j] = static_cast<float>(sigmoid(mixed(j, 0)) + hc_eps);
    post[j] = static_cast<float>(2.0 * sigmoid(mixed(copies + j, 1)));
  }

  thread_local std::vector<double> matrix;
  matrix.resize(copies * copies);
  double* const c = matrix.data();
  for (std::size_t i = 0; i < copies * copies; ++i) c[i] = mixed(2 * copies + i, 2);
  for (std::size_t j = 0; j < copies; ++j) softmax(c + j * copies, copies);
  for (std::size_t i = 0; i < copies * copies; ++i) c[i] += hc_eps;
  for (std::size_t k = 0; k < copies; ++k) normalize(c + k, copies, copies, hc_eps);
  for (unsigned iteration = 1; iteration < sinkhorn_iterations; ++iteration) {
    for (std::size_t j = 0; j < copies; ++j) normalize(c + j * copies, copies, 1, hc_eps);
    for (std::size_t k = 0; k < copies; ++k) normalize(c + k, copies, copies, hc_eps);
  }
  for (std::size_t i = 0; i < copies * copies; ++i) comb[i] = static_cast<float>(c[i]);
}

}  // namespace dsv41
