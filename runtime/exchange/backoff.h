// How a rank waits: polling, but never at the expense of a rank that works on the same core.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace dsv41 {

class Backoff {
 public:
  explicit Backoff(bool oversubscribed) : yields_(oversubscribed ? kYieldsOversubscribed : kYields) {}

  /// To be called after every fruitless poll.
  void wait() {
    if (polls_ < yields_) {
      ++polls_;
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 5 / 4, kLongestSleep);
  }
  /// Something arrived.
  void reset() {
    polls_ = 0;
    sleep_ = kShortestSleep;
  }

 private:
  using Microseconds = std::chrono::duration<double, std::micro>;
  static constexpr unsigned kYields = 20000;  // of the order of 10 ms with one message-layer poll each
  static constexpr unsigned kYieldsOversubscribed = 50;
  static constexpr Microseconds kShortestSleep{20}, kLongestSleep{1000};
  unsigned yields_;
  unsigned polls_ = 0;
  Microseconds sleep_ = kShortestSleep;
};

}  // namespace dsv41
