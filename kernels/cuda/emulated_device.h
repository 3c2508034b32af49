// A device that is not there: memory of the host, queues that do their work as late as the program allows,
// and the kernels' own source on the emulator. For tests, and for running a GPU rank's whole path on a
// machine without one.
#pragma once

#include <memory>

#include "kernels/cuda/device.h"
#include "kernels/cuda/emulator.h"

namespace dsv41::cuda {

struct EmulatedOptions {
  unsigned thread_blocks = 2;
  emulation::Order order = emulation::Order::Ascending;
  std::size_t memory_bytes = std::size_t{1} << 30;  // allocations beyond it fail as on a real device
  bool tensor_copies = true;                        // as sm_80 and later: 32 rows per tile
  // The launch with this number (from 1) fails, and as on a real device every operation after it (a "sticky"
  // error); or it never ends, and synchronize() behind it does not return.
  std::uint64_t fail_launch = 0, hang_launch = 0;
  // The upload on the copy queue with this number never ends.
  std::uint64_t hang_copy = 0;
  // Device memory is out of the host's reach unless the device works on it, as a real one's: touching it is a
  // segmentation fault. That of a device that has failed is out of everybody's.
  bool guarded = true;
};

std::unique_ptr<Device> emulated_device(const EmulatedOptions& options = {});

/// While it exists, this thread may touch the guarded memory of an emulated device, as a message layer that
/// takes device memory may that of a real one.
class EmulatedAccess {
 public:
  explicit EmulatedAccess(Device& device);
  ~EmulatedAccess();
  EmulatedAccess(const EmulatedAccess&) = delete;
  EmulatedAccess& operator=(const EmulatedAccess&) = delete;

 private:
  Device& device_;
};

}  // namespace dsv41::cuda
