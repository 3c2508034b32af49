// Memory that a program takes in one piece for the whole run, and how much the machine has left of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

namespace dsv41 {

/// Anonymous memory from the system, aligned to pages, in huge pages where the system gives them. Zeros.
class LargeMemory {
 public:
  LargeMemory() = default;
  /// Throws ResourceError with the number of bytes.
  explicit LargeMemory(std::size_t bytes);
  ~LargeMemory();
  LargeMemory(LargeMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LargeMemory& operator=(LargeMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Bytes that this process can still take without swapping: what the machine has available, or what the
/// control groups of the process leave, if that is less. Nothing when the system does not say.
/// root: where /proc and /sys are, for tests.
std::optional<std::uint64_t> available_memory(const std::filesystem::path& root = "/");

}  // namespace dsv41
