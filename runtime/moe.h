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

  /// What stays in use between begin() and finish(), one for each call in flight.
  struct Call {
    std::size_t rows = 0;
    std::vector<Route> routes;                // [rows * k], by row and ascending expert
    std::vector<std::uint8_t> codes, scales;  // act_quant of the input
    std::vector<BFloat16> shared;             // [max_rows, D] the shared expert's output
  };
  Call make_call() const;

  /// Routes rows x (bf16 [rows, D]), sends them to their experts, and computes the shared expert meanwhile.
  /// block counts backbone layers, then draft stages. origins: rows of the step that these are, for the
  /// profile; empty: the same numbers.
  void begin(std::uint64_t step, std::uint32_t block, const MoeWeights& weights, std::span<const BFloat16> x,
             std::size_t rows, Call& call, std::span<const std::uint32_t> origins = {});
  /// Ends the oldest call that was begun: out bf16 [rows, D].
  void finish(std::uint32_t block, Call& call, std::span<BFloat16> out);

 private:
  void route(std::uint32_t block, const MoeWeights& weights, std::span<const BFloat16> x, Call& call);
  void shared_expert(const QuantizedRows& x, const MoeWeights& weights, std::span<BFloat16> out);

  const ModelContext& context_;
  Experts& experts_;
  std::vector<float> logits_, scores_;  // [max_rows, E]
  std::vector<std::int32_t> ids_;       // [max_rows, k], in order of choice
  std::vector<float> weights_;          // [max_rows, k]
  std::vector<BFloat16> gate_, up_;     // [max_rows, I] of the shared expert
  std::vector<std::uint8_t> hidden_codes_, hidden_scales_;
  std::vector<BFloat16> routed_;  // [max_rows * k, D], a row per route
};

}  // namespace dsv41
