// Parallel loops over independent outputs only: that is what keeps results free of the number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/views.h"

namespace dsv41 {

/// A fixed set of threads; the calling thread is one of them. One loop runs at a time; loops do not nest.
class ThreadPool {
 public:
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t size() const { return workers_.size() + 1; }

  /// body(Range) for disjoint ranges that cover [0, count); every range but the last is a multiple of `grain` long.
  /// An exception of any body is rethrown here, once.
  template <class Body>
  void parallel_for(std::size_t count, std::size_t grain, Body&& body) {
    run(count, grain, [](void* context, Range range) { (*static_cast<std::remove_reference_t<Body>*>(context))(range); },
        &body);
  }

 private:
  using Function = void (*)(void* context, Range range);
  void run(std::size_t count, std::size_t grain, Function function, void* context);

  struct State;
  std::unique_ptr<State> state_;
  std::vector<std::thread> workers_;
};

}  // namespace dsv41
