// Which GPU an expert rank takes (docs/cuda.md, "Ranks and devices"). Rank 0 takes none: the expert ranks of
// a machine are numbered 0, 1, … in rank order, and so are the devices that a process sees there.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/device.h"
#include "runtime/exchange/communicator.h"

namespace dsv41 {

/// What the user asked for.
struct GpuRequest {
  bool emulated = false;  // --devices emulated: the kernels on the host, slowly, for tests without a GPU
  // --devices 0,2: device of the first, second, … expert rank of each machine; empty: all that are visible.
  std::vector<int> devices;
  bool share = false;  // --share-gpu: several ranks may take one device
};

/// --devices "auto", "emulated" or a list such as "0,2,3". Throws UsageError.
GpuRequest parse_gpu_request(std::string_view devices, bool share);

/// Place of this process among those of its machine.
struct LocalPlace {
  std::uint32_t index = 0;
  std::uint32_t count = 1;
};

/// Among the expert ranks on this machine, from the host names of all ranks. Not for rank 0.
LocalPlace local_place(const Communicator& communicator);
/// Before there is a communicator: what Open MPI, Slurm, MPICH or Intel MPI say in the environment, all ranks
/// counted.
std::optional<LocalPlace> local_place_of_environment();

/// The device for an expert rank: the only one if the process sees one (a launcher that binds devices sets
/// CUDA_VISIBLE_DEVICES per rank), else by place. Throws ResourceError (none, too old) and UsageError (more
/// ranks than devices without `share`, a device of the list that does not exist).
cuda::DeviceDescription choose_device(const cuda::Discovery& found, LocalPlace place,
                                      const GpuRequest& request);

/// The device of an expert rank, opened.
struct RankDevice {
  std::unique_ptr<cuda::Device> device;
  std::string gpu;  // for StartReport::gpu: tells whether two ranks have taken the same one
};
/// Discovers, chooses and opens. Throws ResourceError and UsageError.
RankDevice open_rank_device(const Communicator& communicator, const GpuRequest& request);

}  // namespace dsv41
