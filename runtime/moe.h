// Mixture of experts of one block (docs/model.md 4): gate, routed experts behind the seam, shared expert
// meanwhile.
#pragma once

#include <vector>

#include "kernels/selection.h"
#include "runtime/context.h"
#include "runtime/experts.h"

namespace dsv41 {

class Moe {
 public:
  Moe(const ModelContext& context, Experts& experts);

  /// block counts backbone layers, then draft stages. x, out: bf16 [rows, D].
  void forward(std::uint64_t step, std::uint32_t block, const MoeWeights& weights,
               std::span<const BFloat16> x, std::size_t rows, std::span<BFloat16> out);

 private:
  void route(std::uint32_t block, const MoeWeights& weights, std::span<const BFloat16> x, std::size_t rows);
  void shared_expert(const QuantizedRows& x, const MoeWeights& weights);

  const ModelContext& context_;
  Experts& experts_;
  std::vector<float> logits_, scores_;        // [max_rows, E]
  std::vector<std::int32_t> ids_;             // [max_rows, k], in order of choice
  std::vector<float> weights_;                // [max_rows, k]
  std::vector<Route> routes_;                 // [rows * k], by row and ascending expert
  std::vector<std::uint8_t> codes_, scales_;  // act_quant of the input
  std::vector<BFloat16> gate_, up_;           // [max_rows, I] of the shared expert
  std::vector<std::uint8_t> hidden_codes_, hidden_scales_;
  std::vector<BFloat16> shared_;  // [max_rows, D]
  std::vector<BFloat16> routed_;  // [max_rows * k, D], a row per route
};

}  // namespace dsv41
