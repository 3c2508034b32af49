// The real device: CUDA's runtime behind device.h, and the kernels' entry points. The only file that nvcc
// compiles.
#include <cuda_runtime.h>

#include <map>
#include <string>

#include "kernels/cuda/device.h"
#include "kernels/cuda/expert_kernel.h"

namespace dsv41::cuda {

// Pipelines of several stages need asynchronous copies (sm_80); sm_75 has its own variants. The bodies of
// variants that an architecture never runs are left out of its code.
template <unsigned kRows, unsigned kStages>
__global__ void __launch_bounds__(kThreads) experts_kernel(const ExpertLaunch launch) {
#if defined(__CUDA_ARCH__)
  if constexpr ((__CUDA_ARCH__ >= 800) == (kStages > 2)) run_experts<kRows, kStages>(launch);
#endif
}
// Asked for two blocks per multiprocessor, ptxas has registers to spare; left to itself it aims at so many more
// that it spills.
template <unsigned kRows, unsigned kStages>
__global__ void __launch_bounds__(kThreads, 2) linear_kernel(const LinearLaunch launch) {
#if defined(__CUDA_ARCH__)
  if constexpr ((__CUDA_ARCH__ >= 800) == (kStages > 2)) run_linear<kRows, kStages>(launch);
#endif
}

namespace {

std::string describe(const DeviceDescription& device) {
  return "GPU " + std::to_string(device.index) + " (" + device.name + ")";
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const DeviceDescription& description) : description_(description) {
    check(cudaSetDevice(description_.index), "opening it");
    for (cudaStream_t& stream : streams_)
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  }
  ~CudaDevice() override {
    for (auto& [event, handle] : events_) cudaEventDestroy(handle);
    for (cudaStream_t stream : streams_)
      if (stream != nullptr) cudaStreamDestroy(stream);
  }

  const DeviceDescription& description() const override { return description_; }

  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    enter();
    check(cudaMalloc(&memory, bytes), "allocating " + std::to_string(bytes) + " bytes of device memory");
    return memory;
  }
  void release(void* memory) noexcept override { cudaFree(memory); }
  void* allocate_pinned(std::size_t bytes) override {
    void* memory = nullptr;
    enter();
    check(cudaMallocHost(&memory, bytes), "allocating " + std::to_string(bytes) + " bytes of pinned memory");
    return memory;
  }
  void release_pinned(void* memory) noexcept override { cudaFreeHost(memory); }
  std::size_t free_bytes() override {
    std::size_t free = 0, total = 0;
    enter();
    check(cudaMemGetInfo(&free, &total), "reading its free memory");
    return free;
  }

  void upload(Queue queue, void* device, const void* host, std::size_t bytes) override {
    transfer(queue, device, host, bytes, cudaMemcpyHostToDevice, "uploading");
  }
  void download(Queue queue, void* host, const void* device, std::size_t bytes) override {
    transfer(queue, host, device, bytes, cudaMemcpyDeviceToHost, "downloading");
  }
  void copy(Queue queue, void* to, const void* from, std::size_t bytes) override {
    transfer(queue, to, from, bytes, cudaMemcpyDeviceToDevice, "copying");
  }

  Event record(Queue queue) override {
    enter();
    recycle();
    cudaEvent_t handle = nullptr;
    if (free_events_.empty()) {
      check(cudaEventCreate(&handle), "creating an event");
    } else {
      handle = free_events_.back();
      free_events_.pop_back();
    }
    events_[++last_event_] = handle;
    check(cudaEventRecord(handle, stream(queue)), "recording an event");
    return last_event_;
  }
  void wait(Queue queue, Event event) override {
    const auto found = events_.find(event);
    if (found != events_.end())
      check(cudaStreamWaitEvent(stream(queue), found->second, 0), "ordering its queues");
  }
  bool reached(Event event) override {
    const auto found = events_.find(event);
    if (found == events_.end()) return true;
    const cudaError_t status = cudaEventQuery(found->second);
    if (status == cudaErrorNotReady) return false;
    check(status, "running the experts");
    return true;
  }
  void synchronize(Event event) override {
    const auto found = events_.find(event);
    if (found != events_.end()) check(cudaEventSynchronize(found->second), "running the experts");
  }
  float elapsed_ms(Event from, Event to) override {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events_.at(from), events_.at(to)), "reading its clock");
    return ms;
  }

  void launch(const ExpertLaunch& launch, Variant variant) override {
    const std::size_t longest = (launch.dim > launch.inter ? launch.dim : launch.inter) / kBlock;
    switch (variant) {
      case Variant::Rows8:
        return start(experts_kernel<8, stages(Variant::Rows8)>, launch, variant, longest);
      case Variant::Rows16:
        return start(experts_kernel<16, stages(Variant::Rows16)>, launch, variant, longest);
      case Variant::Rows32:
        return start(experts_kernel<32, stages(Variant::Rows32)>, launch, variant, longest);
      case Variant::Rows8Deep:
        return start(experts_kernel<8, stages(Variant::Rows8Deep)>, launch, variant, longest);
    }
  }
  void launch(const LinearLaunch& launch, Variant variant) override {
    const std::size_t longest = launch.k / kBlock;
    switch (variant) {
      case Variant::Rows8:
        return start(linear_kernel<8, stages(Variant::Rows8)>, launch, variant, longest);
      case Variant::Rows16:
        return start(linear_kernel<16, stages(Variant::Rows16)>, launch, variant, longest);
      case Variant::Rows32:
        return start(linear_kernel<32, stages(Variant::Rows32)>, launch, variant, longest);
      case Variant::Rows8Deep:
        return start(linear_kernel<8, stages(Variant::Rows8Deep)>, launch, variant, longest);
    }
  }
  Variant variant_for(std::uint32_t rows) const override {
    if (description_.major >= 8) return rows <= 8 ? Variant::Rows8Deep : Variant::Rows32;
    return rows <= 8 ? Variant::Rows8 : Variant::Rows16;
  }

 private:
  cudaStream_t stream(Queue queue) const { return streams_[static_cast<std::size_t>(queue)]; }
  /// The runtime's current device belongs to the calling thread.
  void enter() const { check(cudaSetDevice(description_.index), "selecting it"); }

  void check(cudaError_t status, const std::string& operation) const {
    if (status == cudaSuccess) return;
    const bool memory = status == cudaErrorMemoryAllocation;
    cudaGetLastError();  // an allocation that failed must not be found again by the next call
    throw DeviceError(
        memory ? DeviceFault::OutOfMemory : DeviceFault::Failed,
        describe(description_) + ": " + operation + " failed: " + cudaGetErrorString(status) + " (" +
            cudaGetErrorName(status) + ")" +
            (memory ? "" : "; the kernel log (dmesg) names the Xid if the device itself failed"));
  }

  void transfer(Queue queue, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                const char* what) {
    if (bytes == 0) return;
    enter();
    check(cudaMemcpyAsync(to, from, bytes, kind, stream(queue)),
          std::string(what) + " " + std::to_string(bytes) + " bytes");
  }

  /// Events of the distant past are certainly reached once a newer one of the same queue is; keep the last
  /// few hundred.
  void recycle() {
    constexpr Event kKept = 512;
    while (events_.size() > kKept && cudaEventQuery(events_.begin()->second) == cudaSuccess) {
      free_events_.push_back(events_.begin()->second);
      events_.erase(events_.begin());
    }
  }

  template <class Launch>
  void start(void (*kernel)(Launch), const Launch& launch, Variant variant, std::size_t longest) {
    enter();
    const std::uint32_t shared =
        SharedLayout{rows_per_tile(variant), stages(variant)}.total(static_cast<std::uint32_t>(longest));
    const auto key = std::pair(reinterpret_cast<const void*>(kernel), shared);
    auto found = grids_.find(key);
    if (found == grids_.end()) {
      if (shared > description_.shared_bytes_per_block)
        throw DeviceError(DeviceFault::Failed,
                          describe(description_) + ": rows of " + std::to_string(longest * kBlock) +
                              " need " + std::to_string(shared) + " bytes of shared memory, it has " +
                              std::to_string(description_.shared_bytes_per_block));
      check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "reserving shared memory");
      int per_multiprocessor = 0;
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads, shared),
            "sizing a launch");
      found =
          grids_.emplace(key, static_cast<unsigned>(per_multiprocessor * description_.multiprocessors)).first;
    }
    kernel<<<found->second, kThreads, shared, stream(Queue::Compute)>>>(launch);
    check(cudaGetLastError(), "starting a kernel");
  }

  DeviceDescription description_;
  cudaStream_t streams_[2] = {};
  std::map<Event, cudaEvent_t> events_;
  std::vector<cudaEvent_t> free_events_;
  Event last_event_ = 0;
  std::map<std::pair<const void*, std::uint32_t>, unsigned> grids_;
};

}  // namespace

Discovery discover_devices() {
  Discovery result;
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();
    result.why_none = std::string("no usable GPU: ") + cudaGetErrorString(status);
    return result;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    DeviceDescription device;
    device.index = i;
    device.name = properties.name;
    char bus[32] = {};
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, i) == cudaSuccess) device.bus_id = bus;
    device.major = properties.major;
    device.minor = properties.minor;
    device.multiprocessors = properties.multiProcessorCount;
    device.memory_bytes = properties.totalGlobalMem;
    device.shared_bytes_per_block = properties.sharedMemPerBlockOptin;
    result.devices.push_back(std::move(device));
  }
  if (result.devices.empty())
    result.why_none = "no usable GPU: none is visible to this process (CUDA_VISIBLE_DEVICES?)";
  return result;
}

std::unique_ptr<Device> open_device(int index) {
  const Discovery found = discover_devices();
  if (found.devices.empty()) throw DeviceError(DeviceFault::NoDevice, found.why_none);
  for (const DeviceDescription& device : found.devices) {
    if (device.index != index) continue;
    if (device.major < kOldestMajor || (device.major == kOldestMajor && device.minor < kOldestMinor))
      throw DeviceError(DeviceFault::TooOld,
                        describe(device) + " has compute capability " + std::to_string(device.major) + "." +
                            std::to_string(device.minor) + "; the kernels need 7.5 or later");
    return std::make_unique<CudaDevice>(device);
  }
  throw DeviceError(DeviceFault::NoDevice, "GPU " + std::to_string(index) +
                                               " does not exist; this process sees " +
                                               std::to_string(found.devices.size()));
}

}  // namespace dsv41::cuda
