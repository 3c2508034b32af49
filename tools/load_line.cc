#include "tools/load_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "runtime/exchange/communicator.h"

namespace dsv41 {
namespace {

constexpr double kGiB = 1073741824.0;
constexpr std::chrono::milliseconds kRedraw{200}, kLineInterval{2000};
constexpr std::size_t kBarWidth = 30;

}  // namespace

LoadLine::LoadLine(bool quiet, std::FILE* out, Clock::time_point (*now)())
    : out_(out),
      now_(now),
      quiet_(quiet),
      bar_(isatty(fileno(out)) == 1 && !started_by_launcher()),
      start_(now()),
      last_(start_) {}

void LoadLine::show(const LoadProgress& progress) {
  newest_ = progress;
  const auto now = now_();
  if (quiet_ || progress.total_bytes == 0 || now - last_ < (bar_ ? kRedraw : kLineInterval)) return;
  last_ = now;
  shown_ = true;
  print(progress);
}

void LoadLine::end() {
  if (!shown_) return;
  print({newest_.total_bytes, newest_.total_bytes});
  if (bar_) fmt::print(out_, "\n");
  std::fflush(out_);
}

void LoadLine::print(const LoadProgress& progress) const {
  const double done = static_cast<double>(progress.done_bytes),
               total = static_cast<double>(progress.total_bytes);
  const double seconds = std::max(1e-9, std::chrono::duration<double>(now_() - start_).count());
  std::string bar;
  if (bar_) {
    const auto filled = static_cast<std::size_t>(static_cast<double>(kBarWidth) * done / total);
    bar = fmt::format(" [{:<{}}]", std::string(filled, '#'), kBarWidth);
  }
  fmt::print(out_, "{}dsv41-mpi: experts{} {:.2f} of {:.2f} GiB, {:.2f} GiB/s{}", bar_ ? "\r" : "", bar,
             done / kGiB, total / kGiB, done / kGiB / seconds, bar_ ? "\x1b[K" : "\n");
  std::fflush(out_);
}

}  // namespace dsv41
