// What --profile needs before the first step: clocks and memory of all ranks, and a recorder that writes to
// the file.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kernels/compute.h"
#include "loader/checkpoint.h"
#include "runtime/agreement.h"
#include "runtime/exchange/communicator.h"
#include "runtime/placement.h"
#include "runtime/profile/clocks.h"
#include "runtime/profile/profile_file.h"
#include "runtime/profile/recorder.h"
#include "tools/options.h"

namespace dsv41 {

/// All ranks, in rank order; on rank 0 only.
struct RankMachine {
  std::vector<ClockRelation> clocks;
  std::vector<double> read_bandwidth;  // bytes/s that memory delivers to all threads of the rank
};

/// Collective: relates clocks, then measures on all ranks at once how fast they read memory.
RankMachine measure_machine(Communicator& communicator, Compute& compute);

/// On rank 0; null, and one line, when the disk is full. placement: none when experts are in this process.
std::unique_ptr<Recorder> start_recorder(const Options& options, const Communicator& communicator,
                                         const Checkpoint& checkpoint,
                                         const std::optional<Placement>& placement,
                                         const std::vector<StartReport>& reports, const RankMachine& machine,
                                         std::unique_ptr<ProfileFile> file);

}  // namespace dsv41
