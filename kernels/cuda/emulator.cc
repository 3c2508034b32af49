// The emulator: a scheduler of ucontext fibers, one per CUDA thread, all on the calling thread.
#include "kernels/cuda/emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace dsv41::cuda::emulation {
namespace {

constexpr unsigned kLanes = 32;
constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kExchangeBytes = 32;
constexpr std::uint64_t kPausesWithoutProgress = 200000;

/// Stack memory with an inaccessible page below it.
class Stack {
 public:
  Stack()
      : memory_(
            mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_, kPage, PROT_NONE);
  }
  ~Stack() { munmap(memory_, kStackBytes + kPage); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* bottom() const { return static_cast<std::byte*>(memory_) + kPage; }

 private:
  void* memory_;
};

/// Stacks are kept between launches of one thread.
thread_local std::vector<std::unique_ptr<Stack>> free_stacks;

struct Copy {
  void* destination;
  const void* source;
  std::size_t bytes;
};

struct Warp {
  unsigned arrived = 0;
  Collective operation = Collective::None;
  unsigned parity = 0;
  // Two sets of slots: a lane may already offer its next operands while others still read the previous ones.
  alignas(16) std::byte slots[2][kLanes * kExchangeBytes];
};

struct Block {
  std::vector<Warp> warps;
  std::unique_ptr<std::byte[]> shared;
  unsigned arrived = 0, running = 0;
};

enum class State { Ready, Waiting, Done };

struct Thread {
  unsigned index = 0;
  Block* block = nullptr;
  State state = State::Ready;
  std::unique_ptr<Stack> stack;
  ucontext_t context{};
  std::vector<Copy> open;  // the group that is not committed yet
  std::deque<std::vector<Copy>> groups;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
  void* fiber = nullptr;
#endif
};

class Scheduler {
 public:
  Scheduler(const Launch& launch, const std::function<void()>& kernel)
      : kernel_(kernel), blocks_(launch.blocks) {
    if (launch.blocks == 0 || launch.threads == 0 || launch.threads % kLanes != 0)
      throw std::logic_error("emulator: a launch needs blocks, and threads in whole warps");
    for (Block& block : blocks_) {
      block.warps.resize(launch.threads / kLanes);
      block.running = launch.threads;
      // new, not a container: out-of-bounds accesses of shared memory must hit the sanitizer's guard.
      block.shared = std::make_unique<std::byte[]>(launch.shared_bytes);
      std::memset(block.shared.get(), 0xA5, launch.shared_bytes);
      for (unsigned i = 0; i < launch.threads; ++i) add_thread(block, i);
    }
    if (launch.order == Order::Descending) std::reverse(threads_.begin(), threads_.end());
    if (launch.order == Order::Shuffled) {
      std::mt19937 generator(20240607);
      std::shuffle(threads_.begin(), threads_.end(), generator);
    }
  }

  void run() {
    std::size_t left = threads_.size();
    while (left > 0) {
      bool ran = false;
      for (const auto& thread : threads_) {
        if (thread->state != State::Ready) continue;
        ran = true;
        resume(*thread);
        if (failure_) std::rethrow_exception(failure_);
        if (thread->state == State::Done) --left;
      }
      if (!ran) throw std::logic_error("emulator: threads wait for each other at different barriers");
    }
  }

  ~Scheduler() {
    for (const auto& thread : threads_) {
#if defined(__SANITIZE_THREAD__)
      __tsan_destroy_fiber(thread->fiber);
#endif
      free_stacks.push_back(std::move(thread->stack));
    }
  }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  Thread& current() {
    return *current_;
  }
  void progressed() {
    pauses_ = 0;
  }
  void paused() {
    if (++pauses_ > kPausesWithoutProgress)
      throw std::logic_error("emulator: threads poll for something that never comes");
  }

  /// Back to the scheduler; returns when the thread has its next turn.
  void yield() {
    Thread& thread = *current_;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&thread.fake_stack, bottom_, size_);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fiber_, 0);
#endif
    swapcontext(&thread.context, &context_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(thread.fake_stack, &bottom_, &size_);
#endif
  }

  template <class Predicate>
  void wake(Predicate&& predicate) {
    for (const auto& thread : threads_)
      if (thread->state == State::Waiting && predicate(*thread)) thread->state = State::Ready;
  }

 private:
  void add_thread(Block& block, unsigned index) {
    auto thread = std::make_unique<Thread>();
    thread->index = index;
    thread->block = &block;
    if (free_stacks.empty()) {
      thread->stack = std::make_unique<Stack>();
    } else {
      thread->stack = std::move(free_stacks.back());
      free_stacks.pop_back();
#if defined(__SANITIZE_ADDRESS__)
      __asan_unpoison_memory_region(thread->stack->bottom(), kStackBytes);  // frames that never returned
#endif
    }
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack->bottom();
    thread->context.uc_stack.ss_size = kStackBytes;
    thread->context.uc_link = nullptr;
    makecontext(&thread->context, &Scheduler::enter, 0);
#if defined(__SANITIZE_THREAD__)
    thread->fiber = __tsan_create_fiber(0);
#endif
    threads_.push_back(std::move(thread));
  }

  void resume(Thread& thread) {
    current_ = &thread;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, thread.stack->bottom(), kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
    fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(thread.fiber, 0);
#endif
    swapcontext(&context_, &thread.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    current_ = nullptr;
  }

  static void enter();

  const std::function<void()>& kernel_;
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<Thread>> threads_;
  Thread* current_ = nullptr;
  std::exception_ptr failure_;
  std::uint64_t pauses_ = 0;
  ucontext_t context_{};
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* fiber_ = nullptr;
#endif
};

thread_local Scheduler* scheduler = nullptr;

void Scheduler::enter() {
  Scheduler& self = *scheduler;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self.bottom_, &self.size_);
#endif
  try {
    self.kernel_();
    Thread& thread = self.current();
    if (!thread.open.empty() || !thread.groups.empty())
      throw std::logic_error("emulator: a thread returned with copies under way");
  } catch (...) {
    self.failure_ = std::current_exception();
  }
  self.progressed();
  self.current().state = State::Done;
  --self.current().block->running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(nullptr, self.bottom_, self.size_);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(self.fiber_, 0);
#endif
  setcontext(&self.context_);
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& kernel) {
  Scheduler current(launch, kernel);
  Scheduler* const outer = scheduler;
  scheduler = &current;
  try {
    current.run();
  } catch (...) {
    scheduler = outer;
    throw;
  }
  scheduler = outer;
}

unsigned thread_index() {
  return scheduler->current().index;
}
std::byte* shared_memory() {
  return scheduler->current().block->shared.get();
}

void sync_block() {
  Thread& thread = scheduler->current();
  Block& block = *thread.block;
  if (++block.arrived == block.warps.size() * kLanes) {
    block.arrived = 0;
    scheduler->progressed();
    scheduler->wake([&](const Thread& other) { return other.block == &block; });
    return;
  }
  thread.state = State::Waiting;
  scheduler->yield();
}

void pause() {
  scheduler->paused();
  scheduler->yield();
}

void exchange(Collective operation, const void* mine, std::size_t bytes, void* all) {
  if (bytes > kExchangeBytes) throw std::logic_error("emulator: operands too large");
  Thread& thread = scheduler->current();
  const unsigned lane = thread.index % kLanes, warp_index = thread.index / kLanes;
  Warp& warp = thread.block->warps[warp_index];
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation)
    throw std::logic_error("emulator: lanes of a warp meet at different operations");
  const unsigned parity = warp.parity;
  std::memcpy(warp.slots[parity] + lane * bytes, mine, bytes);
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    warp.parity ^= 1u;
    scheduler->progressed();
    scheduler->wake([&](const Thread& other) {
      return other.block == thread.block && other.index / kLanes == warp_index;
    });
  } else {
    thread.state = State::Waiting;
    scheduler->yield();
  }
  std::memcpy(all, warp.slots[parity], kLanes * bytes);
}

void copy_later(void* destination, const void* source, std::size_t bytes) {
  if ((reinterpret_cast<std::uintptr_t>(destination) | reinterpret_cast<std::uintptr_t>(source)) % 16 != 0)
    throw std::logic_error("emulator: a copy of 16 bytes needs addresses that are multiples of 16");
  scheduler->current().open.push_back({destination, source, bytes});
}

void commit_copies() {
  Thread& thread = scheduler->current();
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

void wait_copies(int pending) {
  Thread& thread = scheduler->current();
  while (thread.groups.size() > static_cast<std::size_t>(pending)) {
    for (const Copy& copy : thread.groups.front()) std::memcpy(copy.destination, copy.source, copy.bytes);
    thread.groups.pop_front();
  }
}

}  // namespace dsv41::cuda::emulation
