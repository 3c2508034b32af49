// Large allocations, /proc/meminfo and the limits of control groups (memory.h).
#include "loader/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <system_error>

#include "loader/error.h"

namespace dsv41 {
namespace {

std::optional<std::uint64_t> number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

/// The number behind `key` in a file of lines "key number" or "key:  number kB".
std::optional<std::uint64_t> field(const std::filesystem::path& file, std::string_view key) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(": \t", key.size());
    if (begin == key.size() || begin == std::string::npos) continue;
    return number(std::string_view(line).substr(begin));
  }
  return std::nullopt;
}

std::optional<std::uint64_t> only_number(const std::filesystem::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return number(word);  // "max": no limit
}

}  // namespace

LargeMemory::LargeMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw ResourceError(
        fmt::format("{} bytes of memory are refused: {}", bytes, std::generic_category().message(errno)));
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // where there are none, ordinary pages do
  data_ = static_cast<std::byte*>(memory);
}

LargeMemory::~LargeMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

std::optional<std::uint64_t> available_memory(const std::filesystem::path& root) {
  std::optional<std::uint64_t> available = field(root / "proc/meminfo", "MemAvailable");
  if (available) *available *= 1024;
  const auto limit = [&](std::uint64_t bytes) { available = std::min(available.value_or(bytes), bytes); };

  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;  // version 2
    const std::filesystem::path mount = root / "sys/fs/cgroup";
    for (std::filesystem::path group = line.substr(4);; group = group.parent_path()) {
      const auto most = only_number(mount / group / "memory.max");
      const auto used = only_number(mount / group / "memory.current");
      // Cached file pages count as used, and are given up when memory is wanted.
      const auto cached = field(mount / group / "memory.stat", "inactive_file").value_or(0);
      if (most && used) limit(*most - std::min(*most, *used - std::min(*used, cached)));
      if (group.empty()) break;
    }
  }
  return available;
}

}  // namespace dsv41
