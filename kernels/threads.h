// Parallel loops over independent outputs only: that is what keeps results free of the number of threads.
#pragma once

#include <cstddef>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels/views.h"

namespace dsv41 {

/// A fixed set of threads; the calling thread is one of them. One loop runs at a time; loops do not nest.
/// Where the process has exactly one CPU per thread, as a launcher that binds ranks gives it, the others are
/// bound to one each. Between loops the other threads spin for some microseconds, then yield, then sleep. A
/// loop never waits for a thread that did not wake up in time to take part: with more ranks than cores that
/// would cost whole time slices.
class ThreadPool {
 public:
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t size() const { return workers_.size() + 1; }

  /// body(Range) for disjoint ranges that cover [0, count); every range but the last is a multiple of `grain`
  /// long. An exception of any body is rethrown here, once.
  template <class Body>
  void parallel_for(std::size_t count, std::size_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        count, grain, [](void* context, Range range) { (*static_cast<Plain*>(context))(range); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  using Function = void (*)(void* context, Range range);
  void run(std::size_t count, std::size_t grain, Function function, void* context);

  void stop();

  struct State;
  std::unique_ptr<State> state_;
  std::vector<std::thread> workers_;
};

}  // namespace dsv41
