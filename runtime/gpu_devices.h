// What an expert rank computes on, a GPU or the CPU (docs/cuda.md, "Ranks and devices"). The expert ranks of
// a machine are numbered 0, 1, … in rank order, and so are the devices that a process sees there.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/emulated_device.h"
#include "runtime/exchange/communicator.h"

namespace dsv41 {

/// What one expert rank is to compute on.
struct DeviceEntry {
  enum class Kind : std::uint8_t {
    Cpu,
    Gpu,
    Emulated,  // the GPU's kernels on the host, slowly: for tests without a GPU
  };
  Kind kind = Kind::Gpu;
  int index = 0;                   // of a GPU, as this process numbers them
  cuda::EmulatedOptions emulated;  // of an emulated one
  // Of an emulated one: messages may lie in its memory, which is the host's, whatever the MPI library says.
  bool mpi_takes_memory = false;
};

/// --devices and --share-gpu.
struct GpuRequest {
  /// For the first, second, … expert rank of each machine; a single entry without a GPU number is for all.
  /// Empty: the GPUs that are visible, one for each rank; where there is none, the CPU.
  std::vector<DeviceEntry> entries;
  bool share = false;  // several ranks may take one device
};

/// "auto", "none" (all on the CPU), or a list of device numbers and "cpu" such as "0,2,cpu". In place of a
/// number "emulated" may stand, with `:memory=BYTES`; `:fail=N` or `:hang=N` for what happens to the N-th
/// launch, `:hang_copy=N` to the N-th upload of an expert; and `:mpi=cuda` for an MPI library that takes its
/// memory. Throws UsageError.
GpuRequest parse_gpu_request(std::string_view devices, bool share);

/// Place of this process among those of its machine.
struct LocalPlace {
  std::uint32_t index = 0;
  std::uint32_t count = 1;
};

/// Among the ranks on this machine that compute experts, from the host names of all ranks. With several
/// ranks, not for rank 0.
LocalPlace local_place(const Communicator& communicator);

/// What choose_device has decided.
struct DeviceChoice {
  DeviceEntry::Kind kind = DeviceEntry::Kind::Cpu;
  cuda::DeviceDescription gpu;     // of Kind::Gpu
  cuda::EmulatedOptions emulated;  // of Kind::Emulated
  bool mpi_takes_memory = false;   // as DeviceEntry
  std::uint32_t sharers = 1;       // ranks of this machine that take the same device, this one included
  std::string why_cpu;             // nothing was asked for, and this is why it is not a GPU
};

/// The device for the expert rank at `place`. A process that sees a single GPU takes it whatever its place: a
/// launcher that binds devices (Slurm, CUDA_VISIBLE_DEVICES per rank) has decided already. Throws
/// ResourceError (a GPU is asked for and there is none; too old) and UsageError (more ranks than devices
/// without `share`, a number that does not exist).
DeviceChoice choose_device(const cuda::Discovery& found, LocalPlace place, const GpuRequest& request);

/// The device of an expert rank, opened.
struct RankDevice {
  std::unique_ptr<cuda::Device> device;  // null: the CPU
  std::string gpu;     // for StartReport::gpu: tells whether two ranks have taken the same one
  std::string number;  // names the device to transport_self_test(); empty: the CPU
  std::uint32_t sharers = 1;
  std::string why_cpu;
  bool mpi_takes_memory = false;  // as DeviceEntry
};
/// Discovers, chooses and opens. Throws ResourceError and UsageError.
RankDevice open_rank_device(const Communicator& communicator, const GpuRequest& request);

}  // namespace dsv41
