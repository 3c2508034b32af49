// Direct reads and holes (payload_reader.h).
#include "loader/audit/payload_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <system_error>

#include "loader/audit/payload_plan.h"
#include "loader/error.h"

namespace dsv41::audit {
namespace {

constexpr std::uint64_t kAlignment = 4096;  // of O_DIRECT: offset, length and memory
constexpr std::uint64_t kBufferBytes = kWindowBytes + 2 * kAlignment;

}  // namespace

void PayloadReader::Free::operator()(std::byte* bytes) const {
  std::free(bytes);
}

PayloadReader::PayloadReader()
    : buffer_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, kBufferBytes))) {
  if (!buffer_) throw std::bad_alloc();
}

PayloadReader::~PayloadReader() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void PayloadReader::open(const std::filesystem::path& file) {
  if (descriptor_ >= 0 && file == file_) return;
  if (descriptor_ >= 0) ::close(descriptor_);
  file_ = file;
  hole_begin_ = hole_end_ = 0;
  descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (descriptor_ < 0 && errno == EINVAL)  // a file system without direct reads
    descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0)
    throw CheckpointError(
        fmt::format("{}: cannot open: {}", file.string(), std::generic_category().message(errno)));
}

bool PayloadReader::is_hole(std::uint64_t begin, std::uint64_t end) {
  if (hole_begin_ <= begin && end <= hole_end_) return true;
  const off_t data = ::lseek(descriptor_, static_cast<off_t>(begin), SEEK_DATA);
  hole_begin_ = begin;
  if (data >= 0)
    hole_end_ = static_cast<std::uint64_t>(data);
  else if (errno == ENXIO)  // no data from here to the end of the file
    hole_end_ = static_cast<std::uint64_t>(std::max<off_t>(0, ::lseek(descriptor_, 0, SEEK_END)));
  else
    hole_end_ = begin;  // a file system that cannot tell
  return end <= hole_end_;
}

std::optional<std::span<const std::byte>> PayloadReader::read(const std::filesystem::path& file,
                                                              std::uint64_t offset, std::uint64_t bytes) {
  open(file);
  if (is_hole(offset, offset + bytes)) return std::nullopt;
  const std::uint64_t begin = offset / kAlignment * kAlignment;
  const std::uint64_t end = (offset + bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::uint64_t done = 0;
  while (begin + done < offset + bytes) {
    const ssize_t got =
        ::pread(descriptor_, buffer_.get() + done, end - begin - done, static_cast<off_t>(begin + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      throw CheckpointError(
          fmt::format("{}: cannot read at offset {}: {}", file.string(), begin + done,
                      got < 0 ? std::generic_category().message(errno) : "the file has become shorter"));
    const std::uint64_t before = done;
    done += static_cast<std::uint64_t>(got);
    if (begin + done >= offset + bytes) break;
    done = done / kAlignment * kAlignment;  // a direct read must go on aligned
    if (done == before)
      throw CheckpointError(
          fmt::format("{}: the file has become shorter than {} bytes", file.string(), offset + bytes));
  }
  return std::span<const std::byte>(buffer_.get() + (offset - begin), bytes);
}

}  // namespace dsv41::audit
