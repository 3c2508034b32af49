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

/// Map from a name to a number, by open addressing. Names are not copied: whoever owns them must outlive the
/// index. The hash is seeded per process, so that no crafted header makes every probe collide.
class NameIndex {
 public:
  explicit NameIndex(std::size_t expected = 0);
  /// The number already stored under an equal name, or nothing after inserting (name, number).
  std::optional<std::uint32_t> insert(std::string_view name, std::uint32_t number);
  std::optional<std::uint32_t> find(std::string_view name) const;
  std::size_t size() const { return names_.size(); }

 private:
  static constexpr std::uint32_t kFree = 0xFFFFFFFF;
  struct Slot {  // small: the memory that is touched is what an index costs
    std::uint32_t hash = 0;
    std::uint32_t entry = kFree;  // position in names_ and numbers_
  };

  std::size_t slot_of(std::string_view name, std::uint32_t hash) const;
  void grow();

  std::vector<Slot> slots_;  // a power of two, at most two thirds full
  std::vector<std::string_view> names_;
  std::vector<std::uint32_t> numbers_;
};

}  // namespace dsv41
