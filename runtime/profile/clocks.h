// How the clocks of all ranks relate to rank 0's, measured by ping-pong at start (docs/runtime.md, "HDF5
// profile").
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/exchange/communicator.h"

namespace dsv41 {

struct ClockRelation {
  std::int64_t offset_ns = 0;  // rank 0's clock minus the rank's: add it to a time of that rank
  std::int64_t error_ns = 0;   // bound of the offset's error: half the shortest round trip
};

/// Collective, on ranks that do nothing else meanwhile. On rank 0: one relation per rank; elsewhere empty.
/// clock: reads this process's monotonic clock in ns; the one that all measurements use.
/// Throws PeerError when a rank does not answer within ten seconds.
std::vector<ClockRelation> relate_clocks(Communicator& communicator, int tag, std::int64_t (*clock)(),
                                         int rounds = 64);

}  // namespace dsv41
