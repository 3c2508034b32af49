// The emulated device (emulated_device.h).
#include "kernels/cuda/emulated_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "kernels/cuda/expert_kernel.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace dsv41::cuda {
namespace {

constexpr std::size_t kAlignment = 256;  // as a real device's allocations
constexpr int kRubbish = 0xA5;           // what new memory holds

template <class Launch, class Body>
void run_kernel(const EmulatedOptions& options, std::uint32_t shared_bytes, const Launch& launch, Body body) {
  emulation::run({.blocks = options.thread_blocks,
                  .threads = kThreads,
                  .shared_bytes = shared_bytes,
                  .order = options.order},
                 [&] { body(launch); });
}

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(const EmulatedOptions& options) : options_(options) {
    description_.name = "emulated device";
    description_.bus_id = "emulated";
    description_.major = options.tensor_copies ? 9 : 7;
    description_.minor = options.tensor_copies ? 0 : 5;
    description_.multiprocessors = static_cast<int>(options.thread_blocks);
    description_.memory_bytes = description_.free_bytes = options.memory_bytes;
    description_.shared_bytes_per_block = std::size_t{99} << 10;
  }
  ~EmulatedDevice() override {
    while (!allocations_.empty()) release(allocations_.begin()->first);
    for (void* memory : pinned_) ::operator delete (memory, std::align_val_t{kAlignment});
  }

  const DeviceDescription& description() const override { return description_; }
  std::size_t free_bytes() override {
    check();
    return options_.memory_bytes - used_;
  }

  void* allocate(std::size_t bytes) override {
    check();
    if (bytes > free_bytes())
      throw DeviceError(DeviceFault::OutOfMemory, "emulated device: " + std::to_string(bytes) +
                                                      " bytes asked for, " + std::to_string(free_bytes()) +
                                                      " free");
    // Pages of its own, which can be closed, between two that always are.
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t open = ceil_div(std::max<std::size_t>(bytes, 1), page) * page;
    void* const mapped =
        mmap(nullptr, page + open + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::byte* const first = static_cast<std::byte*>(mapped) + page;
    if (mapped == MAP_FAILED || mprotect(first, open, PROT_READ | PROT_WRITE) != 0)
      throw DeviceError(DeviceFault::OutOfMemory,
                        "emulated device: the host has no " + std::to_string(bytes) + " bytes for it");
    // As near to the end as the alignment allows: what runs over it is seen.
    const std::size_t before = (open - bytes) / kAlignment * kAlignment;
    std::memset(first, kRubbish, open);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(first, before);
    __asan_poison_memory_region(first + before + bytes, open - before - bytes);
#endif
    used_ += bytes;
    allocations_[first + before] = {bytes, first, open};
    protect();
    return first + before;
  }
  void release(void* memory) noexcept override {
    const auto found = allocations_.find(memory);
    const auto& [bytes, first, open] = found->second;
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    used_ -= bytes;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(first, open);
#endif
    munmap(first - page, page + open + page);
    allocations_.erase(found);
  }
  void* allocate_pinned(std::size_t bytes) override {
    check();
    void* const memory = ::operator new (bytes, std::align_val_t{kAlignment});
    std::memset(memory, kRubbish, bytes);
    pinned_.insert(memory);
    return memory;
  }
  void release_pinned(void* memory) noexcept override {
    pinned_.erase(memory);
    ::operator delete (memory, std::align_val_t{kAlignment});
  }

  /// Opens guarded memory; calls nest.
  void open() {
    if (++openings_ == 1) protect();
  }
  void close() {
    if (--openings_ == 0) protect();
  }

  void upload(Queue queue, void* device, const void* host, std::size_t bytes) override {
    if (queue == Queue::Copy && ++uploads_ == options_.hang_copy)
      put(queue, [this] { hung(Queue::Copy) = true; });
    else
      copy(queue, device, host, bytes);
  }
  void download(Queue queue, void* host, const void* device, std::size_t bytes) override {
    copy(queue, host, device, bytes);
  }
  void copy(Queue queue, void* to, const void* from, std::size_t bytes) override {
    put(queue, [=] { std::memcpy(to, from, bytes); });
  }

  Event record(Queue queue) override {
    const Event event = ++last_event_;
    pending_[event] = queue;
    put(queue, [this, event] { pending_.erase(event); });
    return event;
  }
  void wait(Queue queue, Event event) override {
    put(
        queue, [] {}, event);
  }
  bool reached(Event event) override {
    check();
    const auto found = pending_.find(event);
    if (found == pending_.end()) return true;
    step(found->second);
    return pending_.find(event) == pending_.end();
  }
  void synchronize(Event event) override {
    check();
    for (auto found = pending_.find(event); found != pending_.end(); found = pending_.find(event)) {
      step(found->second);
      if (hung(Queue::Compute) || hung(Queue::Copy))
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  float elapsed_ms(Event, Event) override {
    return 0;
  }

  void launch(const ExpertLaunch& launch, Variant variant) override {
    start(ceil_div(std::max(launch.dim, launch.inter), kBlock), variant, launch,
          [](auto rows, auto stage_count) {
            return [](const ExpertLaunch& l) {
              run_experts<decltype(rows)::value, decltype(stage_count)::value>(l);
            };
          });
  }
  void launch(const LinearLaunch& launch, Variant variant) override {
    start(ceil_div(launch.k, kBlock), variant, launch, [](auto rows, auto stage_count) {
      return
          [](const LinearLaunch& l) { run_linear<decltype(rows)::value, decltype(stage_count)::value>(l); };
    });
  }
  Variant variant_for(std::uint32_t rows) const override {
    if (options_.tensor_copies) return rows <= 8 ? Variant::Rows8Deep : Variant::Rows32;
    return rows <= 8 ? Variant::Rows8 : Variant::Rows16;
  }

 private:
  template <unsigned kValue>
  using Constant = std::integral_constant<unsigned, kValue>;

  template <class Launch, class Select>
  void start(std::size_t longest, Variant variant, const Launch& launch, const Select& select) {
    const std::uint32_t shared =
        SharedLayout{rows_per_tile(variant), stages(variant)}.total(static_cast<std::uint32_t>(longest));
    const std::uint64_t number = ++launches_;
    put(Queue::Compute, [=, this] {
      if (number == options_.fail_launch) {
        failed_ = true;
        check();
      }
      if (number == options_.hang_launch) {
        hung(Queue::Compute) = true;
        return;
      }
      switch (variant) {
        case Variant::Rows8:
          return run_kernel(options_, shared, launch,
                            select(Constant<8>{}, Constant<stages(Variant::Rows8)>{}));
        case Variant::Rows8Deep:
          return run_kernel(options_, shared, launch,
                            select(Constant<8>{}, Constant<stages(Variant::Rows8Deep)>{}));
        case Variant::Rows16:
          return run_kernel(options_, shared, launch,
                            select(Constant<16>{}, Constant<stages(Variant::Rows16)>{}));
        case Variant::Rows32:
          return run_kernel(options_, shared, launch,
                            select(Constant<32>{}, Constant<stages(Variant::Rows32)>{}));
      }
    });
  }

  void protect() {
    if (!options_.guarded) return;
    for (const auto& [memory, allocation] : allocations_)
      mprotect(allocation.first, allocation.open,
               openings_ > 0 && !failed_ ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

  struct Work {
    std::function<void()> run;
    Event after = 0;  // of the other queue
  };
  std::deque<Work>& queue_of(Queue queue) {
    return queue == Queue::Compute ? compute_ : copy_;
  }
  bool& hung(Queue queue) {
    return queue == Queue::Compute ? compute_hung_ : copy_hung_;
  }
  void put(Queue queue, std::function<void()> work, Event after = 0) {
    check();
    queue_of(queue).push_back({std::move(work), after});
  }
  void check() const {
    if (failed_) throw DeviceError(DeviceFault::Failed, "emulated device: the launch was told to fail");
  }
  /// Does the queue's next work, or of what that waits for.
  void step(Queue queue) {
    if (hung(queue)) return;
    auto& works = queue_of(queue);
    if (const auto awaited = pending_.find(works.front().after); awaited != pending_.end())
      return step(awaited->second);
    const std::function<void()> work = std::move(works.front().run);
    works.pop_front();
    const EmulatedAccess access(*this);
    work();
  }

  EmulatedOptions options_;
  DeviceDescription description_;
  std::size_t used_ = 0;
  struct Allocation {
    std::size_t bytes = 0;
    std::byte* first = nullptr;  // of the pages around it
    std::size_t open = 0;        // bytes of these pages
  };
  std::map<void*, Allocation> allocations_;  // of device memory
  std::set<void*> pinned_;
  unsigned openings_ = 0;
  std::deque<Work> compute_, copy_;
  std::map<Event, Queue> pending_;
  Event last_event_ = 0;
  std::uint64_t launches_ = 0, uploads_ = 0;
  bool failed_ = false, compute_hung_ = false, copy_hung_ = false;
};

}  // namespace

std::unique_ptr<Device> emulated_device(const EmulatedOptions& options) {
  return std::make_unique<EmulatedDevice>(options);
}

EmulatedAccess::EmulatedAccess(Device& device) : device_(device) {
  static_cast<EmulatedDevice&>(device_).open();
}
EmulatedAccess::~EmulatedAccess() {
  static_cast<EmulatedDevice&>(device_).close();
}

}  // namespace dsv41::cuda
