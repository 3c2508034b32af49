// Random experts and calls for the tests of kernels/cuda, and what Compute::experts makes of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/compute.h"
#include "kernels/cuda/device_experts.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41::testing {

/// One expert's matrices in memory of their own.
struct OwnedExpert {
  std::vector<std::uint8_t> w1, w1_scales, w3, w3_scales, w2, w2_scales;
  std::size_t dim, inter;

  OwnedExpert(Inputs& inputs, std::size_t d, std::size_t i, Codes codes, Scales scales)
      : w1(inputs.e2m1(i * d, codes)),
        w1_scales(inputs.e8m0(i * d / kBlock, scales)),
        w3(inputs.e2m1(i * d, codes)),
        w3_scales(inputs.e8m0(i * d / kBlock, scales)),
        w2(inputs.e2m1(i * d, codes)),
        w2_scales(inputs.e8m0(i * d / kBlock, scales)),
        dim(d),
        inter(i) {}

  ExpertMatrices matrices() const {
    return {{w1.data(), w1_scales.data(), inter, dim},
            {w3.data(), w3_scales.data(), inter, dim},
            {w2.data(), w2_scales.data(), dim, inter}};
  }
};

/// A call: rows, and for every expert the rows it is chosen for. Output rows are numbered in shuffled order.
struct ExpertsCase {
  std::size_t dim, inter;
  std::vector<OwnedExpert> experts;
  std::vector<std::uint8_t> codes, scales;
  std::size_t rows;
  struct Routes {
    std::vector<std::uint32_t> rows, outputs;
    std::vector<float> weights;
  };
  std::vector<Routes> routes;
  std::size_t route_count = 0;

  /// rows_of_experts: how many rows each expert gets (0: none).
  ExpertsCase(std::uint64_t seed, std::size_t d, std::size_t i, std::span<const std::size_t> rows_of_experts,
              Codes code_kind, Scales scale_kind)
      : dim(d), inter(i) {
    Inputs inputs(seed);
    rows = std::max<std::size_t>(
        1, *std::max_element(rows_of_experts.begin(), rows_of_experts.end()) + seed % 3);
    codes = inputs.e4m3(rows * dim, code_kind);
    scales = inputs.e8m0(rows * dim / kBlock, scale_kind);
    for (const std::size_t count : rows_of_experts) route_count += count;
    std::vector<std::uint32_t> numbers(route_count);
    for (std::size_t n = 0; n < route_count; ++n) numbers[n] = static_cast<std::uint32_t>(n);
    for (std::size_t n = route_count; n > 1; --n) std::swap(numbers[n - 1], numbers[inputs.below(n)]);
    std::size_t next = 0;
    for (const std::size_t count : rows_of_experts) {
      experts.emplace_back(inputs, dim, inter, code_kind, scale_kind);
      Routes& own = routes.emplace_back();
      const std::size_t first = inputs.below(rows - count + 1);
      for (std::size_t n = 0; n < count; ++n) {
        own.rows.push_back(static_cast<std::uint32_t>(first + n));
        own.outputs.push_back(numbers[next++]);
        own.weights.push_back(static_cast<float>(inputs.gaussian() * 0.5));
      }
    }
  }

  QuantizedRows x() const { return {codes.data(), scales.data(), rows, dim}; }

  std::vector<BFloat16> expected(float limit) const {
    std::vector<ExpertTask> tasks;
    for (std::size_t e = 0; e < experts.size(); ++e)
      tasks.push_back({experts[e].matrices(), routes[e].rows, routes[e].weights, routes[e].outputs});
    std::vector<BFloat16> outputs(route_count * dim);
    Compute compute(plain_ops(), 1);
    compute.experts(x(), tasks, limit, outputs);
    return outputs;
  }

  /// The experts are number 0 … of `block`.
  std::vector<cuda::DeviceExpertTask> tasks(std::uint32_t block = 0) const {
    std::vector<cuda::DeviceExpertTask> result;
    for (std::uint32_t e = 0; e < experts.size(); ++e)
      result.push_back({{block, e}, routes[e].rows, routes[e].weights, routes[e].outputs});
    return result;
  }

  cuda::DeviceExpertsOptions options() const {
    cuda::DeviceExpertsOptions chosen;
    chosen.dim = static_cast<std::uint32_t>(dim);
    chosen.inter = static_cast<std::uint32_t>(inter);
    chosen.max_rows = static_cast<std::uint32_t>(rows);
    chosen.max_routes = static_cast<std::uint32_t>(std::max<std::size_t>(route_count, 1));
    chosen.slots = static_cast<std::uint32_t>(experts.size());
    return chosen;
  }
};

}  // namespace dsv41::testing
