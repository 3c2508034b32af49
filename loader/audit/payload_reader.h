// Reads windows of a shard past the page cache, and knows where the file has holes. One reader per thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>

namespace dsv41::audit {

class PayloadReader {
 public:
  PayloadReader();
  ~PayloadReader();
  PayloadReader(const PayloadReader&) = delete;
  PayloadReader& operator=(const PayloadReader&) = delete;

  /// Bytes [offset, offset + bytes) of the file, valid until the next call; nothing when all of them are a
  /// hole. Throws CheckpointError naming the file and the offset.
  std::optional<std::span<const std::byte>> read(const std::filesystem::path& file, std::uint64_t offset,
                                                 std::uint64_t bytes);

 private:
  void open(const std::filesystem::path& file);
  bool is_hole(std::uint64_t begin, std::uint64_t end);

  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, Free> buffer_;
  std::filesystem::path file_;
  int descriptor_ = -1;
  std::uint64_t hole_begin_ = 0, hole_end_ = 0;  // of the last hole found
};

}  // namespace dsv41::audit
