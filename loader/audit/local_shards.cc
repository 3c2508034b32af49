// Finding and reading shard headers (local_shards.h).
#include "loader/audit/local_shards.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "loader/error.h"

namespace dsv41::audit {
namespace {

constexpr std::size_t kPadding = 128;  // what simdjson may read beyond a text

/// A file opened for positioned reads. Not mapped: a download in progress may shrink it under us.
class OpenFile {
 public:
  explicit OpenFile(const std::filesystem::path& path) {
    // O_NONBLOCK: opening a named pipe must not wait for a writer.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status {};
    if (descriptor_ >= 0 && ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode))
      bytes_ = static_cast<std::uint64_t>(status.st_size);
    else
      error_ = descriptor_ < 0 ? std::generic_category().message(errno) : "not a regular file";
  }
  ~OpenFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  const std::string& error() const { return error_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Bytes read at offset; fewer than asked at the end of the file.
  std::size_t read(void* out, std::size_t count, std::uint64_t offset) const {
    std::size_t done = 0;
    while (done < count) {
      const ssize_t got = ::pread(descriptor_, static_cast<char*>(out) + done, count - done,
                                  static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

 private:
  int descriptor_ = -1;
  std::uint64_t bytes_ = 0;
  std::string error_;
};

std::uint64_t little_endian(const unsigned char* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | bytes[i];
  return value;
}

bool looks_like_shard(const std::filesystem::path& path) {
  const OpenFile file(path);
  unsigned char start[9];
  if (!file.error().empty() || file.read(start, sizeof start, 0) != sizeof start) return false;
  const std::uint64_t header_bytes = little_endian(start);
  return header_bytes >= 2 && header_bytes <= HeaderLimits{}.header_bytes && start[8] == '{';
}

}  // namespace

std::vector<std::string> find_shards(const std::filesystem::path& directory, bool header_prefix) {
  std::vector<std::string> names;
  try {
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      std::error_code ignored;
      if (!entry.is_regular_file(ignored)) continue;
      const bool suffix = entry.path().extension() == ".safetensors";
      if (suffix || (header_prefix && looks_like_shard(entry.path())))
        names.push_back(entry.path().filename().string());
    }
  } catch (const std::filesystem::filesystem_error& error) {
    throw CheckpointError(
        fmt::format("{}: cannot list the directory: {}", directory.string(), error.code().message()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

LocalShard read_shard(const std::filesystem::path& directory, const std::string& file_name,
                      bool header_prefix) {
  LocalShard shard;
  shard.file_name = file_name;
  const OpenFile file(directory / file_name);
  shard.file_bytes = file.bytes();
  const auto refuse = [&](std::string reason) {
    shard.findings.push_back(fmt::format("{}: {}", file_name, reason));
    return std::move(shard);
  };
  if (!file.error().empty()) return refuse(file.error());
  unsigned char length[8];
  if (file.read(length, sizeof length, 0) != sizeof length)
    return refuse(
        fmt::format("{} bytes are too few for a safetensors file (truncated download?)", shard.file_bytes));
  const std::uint64_t header_bytes = little_endian(length);
  if (header_bytes > HeaderLimits{}.header_bytes)
    return refuse(fmt::format("header length of {} bytes is above the limit of {} (not a safetensors file?)",
                              header_bytes, HeaderLimits{}.header_bytes));
  if (header_bytes > shard.file_bytes - 8)
    return refuse(fmt::format("header of {} bytes in a file of {} (truncated download?)", header_bytes,
                              shard.file_bytes));
  const std::size_t start_bytes = 8 + static_cast<std::size_t>(header_bytes);
  // Room behind the header spares the parser a copy.
  const std::unique_ptr<std::byte[]> start(new std::byte[start_bytes + kPadding]);
  std::memset(start.get() + start_bytes, ' ', kPadding);
  if (file.read(start.get(), start_bytes, 0) != start_bytes) return refuse("the header could not be read");
  shard.header_digest = XXH3_64bits(start.get(), start_bytes);
  try {
    shard.header =
        parse_safetensors_leniently({start.get(), start_bytes + kPadding},
                                    header_prefix ? 0 : shard.file_bytes, file_name, shard.findings);
    shard.readable = true;
  } catch (const CheckpointError& error) {
    shard.findings.assign(1, error.what());
  }
  return shard;
}

void run_in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  threads = static_cast<unsigned>(std::min<std::size_t>({threads, count, 16}));
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_guard;
  const auto loop = [&] {
    try {
      for (std::size_t i; (i = next.fetch_add(1)) < count;) work(i);
    } catch (...) {
      const std::lock_guard lock(failure_guard);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> others;
  for (unsigned t = 1; t < threads; ++t) others.emplace_back(loop);
  loop();
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace dsv41::audit
