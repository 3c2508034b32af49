// The engine of an expert rank with a GPU: DeviceExperts (kernels/cuda) behind the seam of experts.h. The
// same bits as cpu_engine. Design and state on hardware: docs/cuda.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device_experts.h"
#include "runtime/experts.h"

namespace dsv41 {

struct GpuEngineOptions {
  /// --expert-memory: bytes of device memory for experts and workspace; 0: what is free, less a reserve.
  std::uint64_t device_bytes = 0;
  /// Pinned host memory for experts that do not fit on the device; at least two experts pass through it.
  std::uint64_t pinned_bytes = 0;
  /// Ranks among which the device's free memory is shared, this one included.
  std::uint32_t sharers = 1;
  /// A call that takes longer has met a device that hangs: the rank ends with an error.
  std::chrono::milliseconds hang_after = std::chrono::seconds(60);
  std::size_t copy_threads = 2;
  /// Tasks of at most this many rows take the dot4 kernels.
  std::uint32_t dot_rows = 1;
  /// The message layer takes device memory: messages lie there, and rows are read and written in them.
  bool messages_on_device = false;
};

/// What fits where, known before anything is loaded.
struct GpuMemoryPlan {
  cuda::DeviceExpertsOptions options;
  std::uint64_t owned_experts = 0, owned_bytes = 0;
  std::uint64_t resident_experts = 0, pinned_experts = 0;
  std::uint64_t device_bytes = 0, host_bytes = 0;  // to be allocated
  std::uint64_t message_bytes = 0;                 // of device_bytes, for messages
  /// "1152 of 1200 experts (19.9 of 20.8 GiB) stay on the GPU, 48 in pinned host memory".
  std::string describe() const;
};

/// Throws ResourceError with the numbers when the device cannot hold even one expert and the workspace, or
/// when `device_bytes` asks for more than is free.
GpuMemoryPlan plan_gpu_memory(const ExpertGeometry& geometry, const ExpertLimits& limits,
                              std::uint64_t owned_experts, std::uint64_t free_device_bytes,
                              const GpuEngineOptions& options);

/// "GPU 0 (NVIDIA H200)".
std::string describe_gpu(const cuda::Device& device);

/// An engine for the experts that `owner` owns (0-based; placement null: all). Memory is planned here and
/// taken by load(), which also uploads as many experts as the plan keeps; `plan`, if given, is what was
/// planned. `source` must outlive the engine. Throws ResourceError.
std::unique_ptr<ExpertEngine> gpu_engine(std::unique_ptr<cuda::Device> device, ExpertSource& source,
                                         const Placement* placement, std::uint32_t owner,
                                         const ExpertLimits& limits, const GpuEngineOptions& options,
                                         GpuMemoryPlan* plan = nullptr);

}  // namespace dsv41
