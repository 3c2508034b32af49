// A mapped file opened once more, for reads that bypass the page cache (docs/residency.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "loader/safetensors.h"

namespace dsv41 {

class DirectFile {
 public:
  /// No file system asks for more than this of offsets, lengths and memory.
  static constexpr std::size_t kLargestAlignment = 4096;

  /// Opens the file again. Throws CheckpointError when it cannot be opened, or when another file stands under
  /// its name by now.
  explicit DirectFile(const MappedFile& mapped);
  ~DirectFile();
  DirectFile(DirectFile&& other) noexcept;
  DirectFile& operator=(DirectFile&& other) noexcept;

  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }
  /// Whether reads bypass the page cache: not every file system lets them.
  bool direct() const { return direct_; }
  /// Offsets, lengths and memory of a read are multiples of it; a power of two, 1 through the page cache.
  std::size_t alignment() const { return alignment_; }

  std::uint64_t round_down(std::uint64_t offset) const { return offset & ~std::uint64_t{alignment_ - 1}; }
  std::uint64_t round_up(std::uint64_t offset) const { return round_down(offset + alignment_ - 1); }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::size_t alignment_ = 1;
};

}  // namespace dsv41
