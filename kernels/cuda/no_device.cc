// A program built without CUDA: the functions of device.h that look for a real device, and find none.
#include "kernels/cuda/device.h"

namespace dsv41::cuda {

Discovery discover_devices() {
  return {{}, "this program was built without CUDA"};
}

std::unique_ptr<Device> open_device(int) {
  throw DeviceError(DeviceFault::NotBuilt,
                    discover_devices().why_none + ": configure with -DDSV41_CUDA=ON (preset cuda)");
}

}  // namespace dsv41::cuda
