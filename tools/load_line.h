// How far the loading of experts has come.
#pragma once

#include <chrono>
#include <cstdio>

#include "runtime/experts.h"

namespace dsv41 {

/// A bar that is redrawn where the output is a terminal and no launcher collects it; else a line at times.
/// Nothing when there is nothing to load, or when it is loaded before the first line is due.
class LoadLine {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LoadLine(bool quiet, std::FILE* out = stderr, Clock::time_point (*now)() = Clock::now);
  void show(const LoadProgress& progress);
  /// Loading is over: completes what was shown.
  void end();

 private:
  void print(const LoadProgress& progress) const;

  std::FILE* const out_;
  Clock::time_point (*const now_)();
  const bool quiet_, bar_;
  const Clock::time_point start_;
  Clock::time_point last_;
  LoadProgress newest_;
  bool shown_ = false;
};

}  // namespace dsv41
