// The thread pool behind parallel_for. Ranges are handed out by one atomic counter; nothing is allocated per
// loop.
#include "kernels/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

namespace dsv41 {
namespace {

constexpr int kSpins = 2000;  // pauses before yielding: some tens of microseconds, the gap between two loops
constexpr int kYields = 50;   // yields before sleeping
constexpr std::size_t kShares = 4;  // ranges per thread, so that a slow thread does not hold up the others

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The door of a loop: its number in the upper half, whether it is open, and how many workers are inside. A
// worker goes in with one compare-and-swap; the caller closes the door and waits only for those who are
// inside.
constexpr std::uint64_t kNumberStep = std::uint64_t{1} << 32;
constexpr std::uint64_t kOpen = std::uint64_t{1} << 31;
constexpr std::uint64_t kInside = kOpen - 1;
constexpr std::uint64_t loop_number(std::uint64_t door) {
  return door / kNumberStep;
}

/// The CPUs that this thread may run on, ascending; empty where the system does not say.
std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

/// Best effort: a thread that cannot be bound runs wherever the system likes.
void bind(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
}

}  // namespace

struct ThreadPool::State {
  // Written by the caller while the door is closed and nobody is inside.
  Function function = nullptr;
  void* context = nullptr;
  std::size_t count = 0, share = 0;

  alignas(64) std::atomic<std::uint64_t> door{0};
  alignas(64) std::atomic<std::size_t> next{0};
  alignas(64) std::atomic<std::size_t> sleepers{0};
  std::atomic<bool> stop{false};

  std::mutex mutex;  // guards sleeping and `error`
  std::condition_variable wake;
  std::exception_ptr error;

  void take_ranges() {
    for (;;) {
      const std::size_t begin = next.fetch_add(share, std::memory_order_relaxed);
      if (begin >= count) return;
      try {
        function(context, {begin, std::min(begin + share, count)});
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count, std::memory_order_relaxed);  // nobody needs to start another range
      }
    }
  }

  /// Waits for a loop other than `seen`, or for the end of the pool; returns the door.
  std::uint64_t wait_for_loop(std::uint64_t seen) {
    const auto news = [&](std::uint64_t value) { return loop_number(value) != seen || stop.load(); };
    for (int i = 0; i < kSpins + kYields; ++i) {
      const std::uint64_t value = door.load(std::memory_order_acquire);
      if (news(value)) return value;
      if (i < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
    std::unique_lock lock(mutex);
    // Sequentially consistent on both sides: either we see the new loop, or its caller sees us and notifies.
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return news(door.load()); });
    sleepers.fetch_sub(1);
    return door.load();
  }

  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      std::uint64_t value = wait_for_loop(seen);
      if (stop.load()) return;
      seen = loop_number(value);
      bool inside = false;
      while (!inside && (value & kOpen) != 0 && loop_number(value) == seen)
        inside = door.compare_exchange_weak(value, value + 1, std::memory_order_acq_rel,
                                            std::memory_order_acquire);
      if (!inside) continue;
      take_ranges();
      door.fetch_sub(1, std::memory_order_release);
    }
  }

  void wake_sleepers() {
    if (sleepers.load() == 0) return;
    { const std::lock_guard lock(mutex); }  // a thread between its check and its sleep holds the mutex
    wake.notify_all();
  }
};

ThreadPool::ThreadPool(std::size_t threads) : state_(std::make_unique<State>()) {
  const std::size_t workers = threads > 1 ? threads - 1 : 0;
  workers_.reserve(workers);
  const std::vector<int> cpus = allowed_cpus();
  try {
    for (std::size_t i = 0; i < workers; ++i)
      workers_.emplace_back([state = state_.get()] { state->work(); });
    // One CPU for each thread: the workers stay on theirs, and near the memory that they touched first. The
    // calling thread is not ours to bind: what it starts later would inherit that.
    if (cpus.size() == threads)
      for (std::size_t i = 0; i < workers; ++i) bind(workers_[i], cpus[i + 1]);
  } catch (...) {  // the system refused a thread: those that run must end before the state goes
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  state_->stop.store(true);
  state_->wake_sleepers();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::size_t count, std::size_t grain, Function function, void* context) {
  if (count == 0) return;
  grain = std::max<std::size_t>(grain, 1);
  if (workers_.empty() || count <= grain) return function(context, {0, count});

  State& state = *state_;
  state.function = function;
  state.context = context;
  state.count = count;
  state.share = ceil_div(ceil_div(count, size() * kShares), grain) * grain;
  state.next.store(0, std::memory_order_relaxed);
  state.door.store((loop_number(state.door.load(std::memory_order_relaxed)) + 1) * kNumberStep | kOpen);
  state.wake_sleepers();

  state.take_ranges();
  std::uint64_t value = state.door.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int i = 0; (value & kInside) != 0; ++i) {
    if (i < kSpins)
      pause();
    else
      std::this_thread::yield();
    value = state.door.load(std::memory_order_acquire);
  }
  if (state.error) std::rethrow_exception(std::exchange(state.error, nullptr));
}

}  // namespace dsv41
