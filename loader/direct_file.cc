// Opening past the page cache, and what the file system asks of such reads (direct_file.h).
#include "loader/direct_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

#include "loader/error.h"

namespace dsv41 {
namespace {

/// What the kernel says about this file, or the largest that occurs.
std::size_t alignment_of(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx facts {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 &&
      (facts.stx_mask & STATX_DIOALIGN) != 0 && facts.stx_dio_offset_align != 0) {
    const std::size_t alignment = std::max(facts.stx_dio_offset_align, facts.stx_dio_mem_align);
    if (std::has_single_bit(alignment) && alignment <= DirectFile::kLargestAlignment) return alignment;
  }
#else
  (void)descriptor;
#endif
  return DirectFile::kLargestAlignment;
}

/// Whether a read that keeps to the alignment is taken: some file systems open directly and then refuse.
bool reads_directly(int descriptor, std::size_t alignment) {
  const std::unique_ptr<void, decltype(&std::free)> buffer(
      std::aligned_alloc(DirectFile::kLargestAlignment, DirectFile::kLargestAlignment), &std::free);
  return buffer && ::pread(descriptor, buffer.get(), alignment, 0) >= 0;
}

}  // namespace

DirectFile::DirectFile(const MappedFile& mapped) : path_(mapped.path()) {
  const auto fail = [&](std::string_view what) {
    const std::string reason = std::generic_category().message(errno);
    if (descriptor_ >= 0) ::close(descriptor_);
    throw CheckpointError(fmt::format("{}: {}: {}", path_.string(), what, reason));
  };
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
  if (descriptor_ >= 0) {
    alignment_ = alignment_of(descriptor_);
    direct_ = reads_directly(descriptor_, alignment_);
    if (!direct_) ::close(std::exchange(descriptor_, -1));
  } else if (errno != EINVAL) {
    fail("cannot open for direct reads");
  }
  if (!direct_) {
    alignment_ = 1;
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) fail("cannot open again");
    ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
  }
  struct stat now {
  }, then{};
  if (::fstat(descriptor_, &now) != 0 || ::fstat(mapped.descriptor(), &then) != 0) fail("cannot inspect");
  if (now.st_dev != then.st_dev || now.st_ino != then.st_ino) {
    ::close(descriptor_);
    throw CheckpointError(fmt::format("{}: has been replaced since it was opened", path_.string()));
  }
}

DirectFile::~DirectFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

DirectFile::DirectFile(DirectFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      direct_(other.direct_),
      alignment_(other.alignment_) {}

DirectFile& DirectFile::operator=(DirectFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(direct_, other.direct_);
  std::swap(alignment_, other.alignment_);
  return *this;
}

}  // namespace dsv41
