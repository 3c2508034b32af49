// The loop of an expert rank: receive rows, compute their experts, reply (docs/runtime.md, "Roles" and
// "Exchange").
#pragma once

#include <chrono>
#include <cstdint>

#include "loader/error.h"
#include "runtime/experts.h"
#include "runtime/placement.h"

namespace dsv41 {

class Communicator;

struct ExpertRankOptions {
  /// How long the host (rank 0) may be silent.
  std::chrono::milliseconds rank_timeout = std::chrono::seconds(60);
};

/// Serves the host until it ends the job; returns the exit code that the host named. A failure of this rank
/// (a malformed message, an error of the engine) is sent to the host, which prints it and names the code;
/// this rank prints nothing. Only when the host does not answer any more does this print one line and end the
/// job by Communicator::abort. Experts of this rank are those of owner communicator.rank() - 1.
ExitCode run_expert_rank(Communicator& communicator, const Placement& placement, ExpertEngine& engine,
                         const ExpertLimits& limits, const ExpertRankOptions& options = {});

/// The same on CPU threads.
ExitCode run_expert_rank(Communicator& communicator, const Placement& placement, ExpertSource& source,
                         Compute& compute, const ExpertLimits& limits, const ExpertRankOptions& options = {});

}  // namespace dsv41
