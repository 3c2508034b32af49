// How far the loading of experts has come, on standard error.
#pragma once

#include <chrono>

#include "runtime/experts.h"

namespace dsv41 {

/// A bar that is redrawn where standard error is a terminal and no launcher collects it; else a line at
/// times. Nothing when there is nothing to load, or when it is loaded before the first line is due.
class LoadLine {
 public:
  explicit LoadLine(bool quiet);
  void show(const LoadProgress& progress);
  /// Loading is over: completes what was shown.
  void end();

 private:
  using Clock = std::chrono::steady_clock;
  void print(const LoadProgress& progress) const;

  const bool quiet_, bar_;
  const Clock::time_point start_;
  Clock::time_point last_;
  LoadProgress newest_;
  bool shown_ = false;
};

}  // namespace dsv41
