// Which key lies in which of a fixed number of equal slots, least recently used first to go. Bookkeeping
// only: experts in GPU memory, experts on a CPU rank and Engram rows all live by it. Memory is taken once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace dsv41 {

class SlotCache {
 public:
  using Key = std::uint64_t;
  using Slot = std::uint32_t;

  /// 24 bytes of bookkeeping per slot, or up to 32.
  explicit SlotCache(Slot slots) : entries_(slots) {
    if (slots >= kNone / 2) throw std::length_error("slot cache: too many slots");
    buckets_.assign(std::bit_ceil(std::max<std::size_t>(2 * std::size_t{slots}, 2)), kNone);
  }

  Slot slots() const { return static_cast<Slot>(entries_.size()); }
  Slot used() const { return used_; }
  bool contains(Key key) const { return buckets_[bucket_of(key)] != kNone; }

  /// The key's slot, which becomes the most recently used.
  std::optional<Slot> find(Key key) {
    const Slot slot = buckets_[bucket_of(key)];
    if (slot == kNone) return std::nullopt;
    unlink(slot);
    push_front(slot);
    return slot;
  }

  /// A slot for a key that has none: a free one, or that of the least recently used key, which is forgotten.
  Slot place(Key key) {
    return *place_if(key, [](Slot) { return true; });
  }

  /// The same among slots whose key may be forgotten: the least recently used one for which evictable(slot).
  template <class Evictable>
  std::optional<Slot> place_if(Key key, const Evictable& evictable) {
    Slot slot = used_;
    if (used_ < slots()) {
      ++used_;
    } else {
      slot = last_;
      while (slot != kNone && !evictable(slot)) slot = entries_[slot].newer;
      if (slot == kNone) return std::nullopt;
      erase_bucket(bucket_of(entries_[slot].key));
      unlink(slot);
    }
    entries_[slot].key = key;
    buckets_[bucket_of(key)] = slot;
    push_front(slot);
    return slot;
  }

  void clear() {
    std::fill(buckets_.begin(), buckets_.end(), kNone);
    used_ = 0;
    first_ = last_ = kNone;
  }

 private:
  static constexpr Slot kNone = ~Slot{0};
  struct Entry {
    Key key = 0;
    Slot newer = kNone, older = kNone;
  };

  std::size_t home_of(Key key) const {
    return static_cast<std::size_t>(key * 0x9E3779B97F4A7C15u >> 32) & (buckets_.size() - 1);
  }
  /// Where the key is, or the free bucket where it would be: at most half of the buckets are taken.
  std::size_t bucket_of(Key key) const {
    std::size_t at = home_of(key);
    while (buckets_[at] != kNone && entries_[buckets_[at]].key != key) at = (at + 1) & (buckets_.size() - 1);
    return at;
  }
  /// Closes the gap, so that searches for what was displaced behind it still arrive.
  void erase_bucket(std::size_t gap) {
    const std::size_t mask = buckets_.size() - 1;
    for (std::size_t at = (gap + 1) & mask; buckets_[at] != kNone; at = (at + 1) & mask) {
      if (((at - home_of(entries_[buckets_[at]].key)) & mask) < ((at - gap) & mask)) continue;
      buckets_[gap] = buckets_[at];
      gap = at;
    }
    buckets_[gap] = kNone;
  }

  void unlink(Slot slot) {
    const Entry& entry = entries_[slot];
    (entry.newer == kNone ? first_ : entries_[entry.newer].older) = entry.older;
    (entry.older == kNone ? last_ : entries_[entry.older].newer) = entry.newer;
  }
  void push_front(Slot slot) {
    entries_[slot].newer = kNone;
    entries_[slot].older = first_;
    (first_ == kNone ? last_ : entries_[first_].newer) = slot;
    first_ = slot;
  }

  std::vector<Entry> entries_;
  std::vector<Slot> buckets_;  // open addressing, linear probing
  Slot used_ = 0, first_ = kNone, last_ = kNone;
};

}  // namespace dsv41
