// Routed experts on one device: what Compute::experts (kernels/compute.h) does, with the same bits. Uploads
// experts as they lie in the file, keeps as many as fit (one LRU over all blocks), and overlaps what it must
// fetch with the computation of what is there. No CUDA types; works on any Device, the emulated one included.
// Design: docs/cuda.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/compute.h"
#include "kernels/cuda/device.h"

namespace dsv41::cuda {

struct ExpertKey {
  std::uint32_t block = 0, expert = 0;
};

/// The rows of one call that go to one expert, as ExpertTask.
struct DeviceExpertTask {
  ExpertKey key;
  std::span<const std::uint32_t> rows;
  std::span<const float> route_weights;
  std::span<const std::uint32_t> outputs;
};

struct DeviceExpertsOptions {
  std::uint32_t dim = 0, inter = 0;  // D, I: multiples of 32
  std::uint32_t max_rows = 0, max_routes = 0;
  std::uint32_t slots = 0;  // experts resident on the device, at least 1
  std::uint32_t pinned_slots =
      2;  // experts in pinned host memory behind them, at least 2: uploads pass through here
  std::uint32_t dot_rows = 1;    // tasks of at most this many rows (0…2) take the dot4 path
  std::size_t copy_threads = 2;  // for reading experts into pinned memory
  bool time_launches = false;    // for launch_ms()
  bool in_place = false;         // rows come and go in device memory: begin_in_place() instead of begin()
};

/// How much memory an object of these options takes; all of it is allocated at construction.
struct DeviceMemoryPlan {
  std::uint64_t expert_bytes = 0;     // one slot
  std::uint64_t workspace_bytes = 0;  // on the device, beside the slots
  std::uint64_t device_bytes = 0;     // slots and workspace
  std::uint64_t pinned_bytes = 0;

  static DeviceMemoryPlan of(const DeviceExpertsOptions& options);
};

struct DeviceExpertsCounters {
  std::uint64_t hits = 0, misses = 0;  // experts of calls: on the device or not
  std::uint64_t bytes_read = 0;        // copied out of the source
  std::uint64_t bytes_uploaded = 0;    // experts sent to the device
  std::uint64_t launches = 0;
};

class DeviceExperts {
 public:
  /// Matrices of an expert in host memory; the views stay valid.
  using Source = std::function<ExpertMatrices(ExpertKey)>;
  /// Returns when `reached` does. May throw, for a device that does not answer; then only abandon() and
  /// destruction may follow. Empty: waits for ever.
  using Wait = std::function<void(const std::function<bool()>& reached)>;

  /// Throws DeviceError (memory) and std::invalid_argument (options, dimensions of an expert).
  DeviceExperts(std::unique_ptr<Device> device, const DeviceExpertsOptions& options, Source source);
  ~DeviceExperts();
  DeviceExperts(const DeviceExperts&) = delete;
  DeviceExperts& operator=(const DeviceExperts&) = delete;

  /// Uploads experts while slots are free, then fills pinned memory; reading and uploading overlap.
  /// `progress` (bytes read so far, bytes there will be) is called after every expert and may throw.
  void load(std::span<const ExpertKey> keys,
            const std::function<void(std::uint64_t, std::uint64_t)>& progress, const Wait& wait = {});

  /// Memory for the caller, released with this object, which waits for the device first. Throws DeviceError.
  std::span<std::byte> allocate(DeviceBuffer::Kind kind, std::size_t bytes);

  /// Starts a call and returns; the arrays may be reused at once. One call at a time. Each route fills the
  /// output row that its task names, a number below that of the call's routes.
  /// `alive` (may be empty) is called after every expert that had to be fetched, and may throw; then no call
  /// may follow. `wait`: for earlier uploads, when more experts are missing than pinned memory holds.
  void begin(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks, float swiglu_limit,
             const std::function<void()>& alive = {}, const Wait& wait = {});
  /// The same on memory of the device: reads `x` and fills `outputs`, bf16 [routes, D], where they lie. Both
  /// must stay until finish() and be aligned to 16 bytes.
  void begin_in_place(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks, float swiglu_limit,
                      BFloat16* outputs, const std::function<void()>& alive = {}, const Wait& wait = {});
  /// Whether finish() would return without waiting.
  bool ready();
  /// outputs: bf16 [routes, D]; empty after begin_in_place(), which has filled its own.
  void finish(std::span<BFloat16> outputs);

  /// For a device that does not answer any more: destruction would wait for it. Gives up device and memory
  /// without a word to it; nothing but destruction may follow.
  void abandon() noexcept;

  const DeviceExpertsCounters& counters() const;
  /// Time of the last call's launches on the device's clock, without copies; after finish().
  float launch_ms();
  Device& device();

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace dsv41::cuda
