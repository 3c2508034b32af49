#include "runtime/exchange/shared_segments.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string_view>

namespace dsv41 {
namespace {

constexpr std::string_view kPrefix = "vader_segment.";  // .HOST.USER.JOB.RANK

}  // namespace

std::vector<std::string> mapped_segments() {
  std::vector<std::string> segments;
  std::ifstream maps("/proc/self/maps");  // "begin-end rw-s offset device inode   /path"
  for (std::string line; std::getline(maps, line);) {
    const std::size_t begin = line.find('/');
    if (begin == std::string::npos) continue;
    const std::string path = line.substr(begin);
    if (!std::string_view(path).substr(path.rfind('/') + 1).starts_with(kPrefix)) continue;
    if (path.ends_with(" (deleted)")) continue;
    if (std::find(segments.begin(), segments.end(), path) == segments.end()) segments.push_back(path);
  }
  return segments;
}

std::string remove_segment_name(const std::vector<std::string>& mapped, int rank) {
  const std::string suffix = "." + std::to_string(rank);
  for (const std::string& path : mapped)
    if (path.ends_with(suffix) && ::unlink(path.c_str()) == 0) return path;
  return {};
}

void restore_segment_name(const std::string& name) {
  if (name.empty()) return;
  const int descriptor = ::open(name.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (descriptor >= 0) ::close(descriptor);
}

}  // namespace dsv41
