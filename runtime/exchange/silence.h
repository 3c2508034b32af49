// How long another rank has been silent, as far as this one has listened.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsv41 {

/// Time between two looks counts up to a limit: a rank that was stopped (a suspended job), or that got no
/// core, finds what has been sent to it only afterwards, and must not blame the sender before it has looked.
class Silence {
 public:
  explicit Silence(std::uint64_t timeout_ns) : timeout_ns_(timeout_ns), longest_ns_(timeout_ns / 16) {}

  /// Something has arrived, or listening begins.
  void end(std::uint64_t now_ns) {
    looked_at_ns_ = now_ns;
    silent_ns_ = 0;
  }
  /// After every look that found nothing: whether the timeout is over.
  bool lasts_too_long(std::uint64_t now_ns) {
    silent_ns_ += std::min(now_ns - looked_at_ns_, longest_ns_);
    looked_at_ns_ = now_ns;
    return silent_ns_ > timeout_ns_;
  }

 private:
  std::uint64_t timeout_ns_, longest_ns_;
  std::uint64_t looked_at_ns_ = 0, silent_ns_ = 0;
};

}  // namespace dsv41
