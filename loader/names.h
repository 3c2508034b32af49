// Names in bulk: an arena that keeps 96,085 tensor names without one allocation each, and a hash index over
// them. Uses xxhash only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace dsv41 {

/// Copies text into chunks that never move; the views it hands out live as long as the arena.
class NameArena {
 public:
  std::string_view add(std::string_view text);

 private:
  std::vector<std::unique_ptr<char[]>> chunks_;
  std::size_t used_ = 0, capacity_ = 0;  // of the last chunk
};

/// Open-addressing map from a name to a number. Names are not copied: whoever owns them must outlive the
/// index. The hash is seeded per process, so that a crafted header cannot make every probe collide.
class NameIndex {
 public:
  explicit NameIndex(std::size_t expected = 0);
  /// The number already stored under `name`, or nothing after inserting (name, number).
  std::optional<std::uint32_t> insert(std::string_view name, std::uint32_t number);
  std::optional<std::uint32_t> find(std::string_view name) const;
  std::size_t size() const { return size_; }

 private:
  struct Slot {
    std::string_view name;
    std::uint32_t hash = 0;
    std::uint32_t number = kFree;
  };
  static constexpr std::uint32_t kFree = 0xFFFFFFFF;

  std::size_t slot_of(std::string_view name, std::uint32_t hash) const;
  void grow();

  std::vector<Slot> slots_;  // a power of two, at most half full
  std::size_t size_ = 0;
};

}  // namespace dsv41
