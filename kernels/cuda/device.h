// A GPU as the rest of the program sees it: memory, two queues, events, and the launches. No CUDA types. A
// program built without CUDA has the same functions and finds no device. emulated_device() runs the kernels'
// source on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cuda/launch.h"

namespace dsv41::cuda {

enum class DeviceFault : std::uint8_t {
  NotBuilt,     // the program was built without CUDA
  NoDevice,     // no driver, no device, or no such index
  TooOld,       // compute capability below 7.5
  OutOfMemory,  // device or pinned memory
  Failed,       // the device or its driver reported an error that ends all work on it
};

/// One line: device, operation, cause, and what to do where that is known.
class DeviceError : public std::runtime_error {
 public:
  DeviceError(DeviceFault fault, const std::string& message) : std::runtime_error(message), fault_(fault) {}
  DeviceFault fault() const { return fault_; }

 private:
  DeviceFault fault_;
};

struct DeviceDescription {
  int index = 0;
  std::string name;          // "NVIDIA H200"
  std::string bus_id;        // "0000:3b:00.0"; tells two ranks whether they share a device
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t memory_bytes = 0, free_bytes = 0;
  std::size_t shared_bytes_per_block = 0;  // what a kernel may ask for
};

/// Oldest compute capability that the kernels are compiled for.
inline constexpr int kOldestMajor = 7, kOldestMinor = 5;

struct Discovery {
  std::vector<DeviceDescription> devices;  // visible to this process, in its numbering
  std::string why_none;                    // when there is none: one line
};
Discovery discover_devices();

enum class Queue : std::uint8_t { Compute, Copy };
/// A point in a queue; 0 is the beginning, which is always reached.
using Event = std::uint64_t;

/// Not thread-safe: one owner. Everything that can fail throws DeviceError.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceDescription& description() const = 0;

  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;
  /// Host memory that asynchronous copies can use.
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  virtual void release_pinned(void* memory) noexcept = 0;
  virtual std::size_t free_bytes() = 0;

  // Asynchronous, in order within a queue; host memory must be pinned and stay until an event behind the
  // copy.
  virtual void upload(Queue queue, void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(Queue queue, void* host, const void* device, std::size_t bytes) = 0;
  virtual void copy(Queue queue, void* to, const void* from, std::size_t bytes) = 0;
  virtual Event record(Queue queue) = 0;
  /// What is put into `queue` from now on starts after the event.
  virtual void wait(Queue queue, Event event) = 0;
  virtual bool reached(Event event) = 0;
  virtual void synchronize(Event event) = 0;
  /// Milliseconds between two reached events.
  virtual float elapsed_ms(Event from, Event to) = 0;

  /// On the compute queue. One kernel each; no host synchronization.
  virtual void launch(const ExpertLaunch& launch, Variant variant) = 0;
  virtual void launch(const LinearLaunch& launch, Variant variant) = 0;
  /// The variant for calls whose largest task has this many rows.
  virtual Variant variant_for(std::uint32_t rows) const = 0;
};

/// Opens a device of discover_devices().
std::unique_ptr<Device> open_device(int index);

/// Memory of a device or pinned memory, released with the object.
class DeviceBuffer {
 public:
  enum class Kind : std::uint8_t { Device, Pinned };
  DeviceBuffer() = default;
  DeviceBuffer(Device& device, Kind kind, std::size_t bytes)
      : device_(&device),
        kind_(kind),
        bytes_(bytes),
        memory_(kind == Kind::Device ? device.allocate(bytes) : device.allocate_pinned(bytes)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (memory_ == nullptr) return;
    if (kind_ == Kind::Device)
      device_->release(memory_);
    else
      device_->release_pinned(memory_);
  }

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  std::size_t size() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(kind_, other.kind_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
  }

  Device* device_ = nullptr;
  Kind kind_ = Kind::Device;
  std::size_t bytes_ = 0;
  void* memory_ = nullptr;
};

}  // namespace dsv41::cuda
