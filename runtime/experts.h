// The one seam of the system: routed experts, wherever they live (docs/runtime.md, "Roles" and "Exchange").
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/compute.h"
#include "loader/checkpoint.h"
#include "runtime/placement.h"

namespace dsv41 {

/// One (row, expert, weight) of a step. Routes are ordered by row, then ascending expert id.
struct Route {
  std::uint32_t row = 0;
  std::uint32_t expert = 0;
  float weight = 0;
};

struct ExpertCall {
  std::uint64_t step = 0;
  std::uint32_t block = 0;  // backbone layers, then draft stages
  QuantizedRows x;          // [rows, D]
  std::span<const Route> routes;
};

class Experts {
 public:
  virtual ~Experts() = default;
  /// Starts the experts of one block. The call's arrays must stay valid until finish().
  virtual void begin(const ExpertCall& call) = 0;
  /// outputs: bf16 [routes, D], in route order. Blocks until all are there.
  virtual void finish(std::span<BFloat16> outputs) = 0;
};

/// Experts computed in this process (-np 1, and inside an expert rank).
std::unique_ptr<Experts> local_experts(const Checkpoint& checkpoint, Compute& compute);

}  // namespace dsv41
