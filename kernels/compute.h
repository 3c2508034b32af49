// A backend and the threads it runs on: what the model calls. Every method is an operation of ops.h spread over
// independent outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/ops.h"
#include "kernels/threads.h"

namespace dsv41 {

/// The three matrices of a routed expert.
struct ExpertMatrices {
  Fp4Matrix w1, w3;  // [I, D]
  Fp4Matrix w2;      // [D, I]
};

/// The rows of one call that go to one expert; indices into the call's QuantizedRows and outputs.
struct ExpertTask {
  ExpertMatrices weights;
  std::span<const std::uint32_t> rows;     // which activation row each route takes
  std::span<const float> route_weights;    // same length
  std::span<const std::uint32_t> outputs;  // which output row each route fills
};

class Compute {
 public:
  /// ops must outlive the object (backends are static).
  Compute(const Ops& ops, std::size_t threads);

  /// For QuantizedRows::name and IndexQuery::name: a number that was not there before in this process.
  static std::uint64_t new_name();

  const Ops& ops() const { return ops_; }
  ThreadPool& threads() { return pool_; }

  void quantize_rows(std::span<const BFloat16> x, std::size_t k, std::span<std::uint8_t> codes, std::span<std::uint8_t> scales);
  void linear(const QuantizedRows& x, const Fp8Matrix& w, std::span<BFloat16> out);
  void linear(const QuantizedRows& x, const Fp4Matrix& w, std::span<BFloat16> out);
  void linear(std::span<const BFloat16> x, const Bf16Matrix& w, std::span<BFloat16> out);
  void linear_wide(std::span<const BFloat16> x, const Bf16Matrix& w, std::span<float> out);
  void rms_norm(std::span<const BFloat16> x, std::span<const BFloat16> weight, float eps, std::span<BFloat16> out);

  /// Routed experts (model.md 4): for every task, w1 and w3, clamp, silu, routing weight, quantize, w2.
  /// outputs: bf16 [*, D], each route fills the row its task names. All tasks share two parallel loops.
  void experts(const QuantizedRows& x, std::span<const ExpertTask> tasks, float swiglu_limit, std::span<BFloat16> outputs);

 private:
  struct ExpertScratch;
  const Ops& ops_;
  ThreadPool pool_;
  std::shared_ptr<ExpertScratch> scratch_;
};

}  // namespace dsv41
