// Which key lies in which of a fixed number of equal slots, least recently used first to go. Bookkeeping
// only.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>

namespace dsv41::cuda {

class SlotCache {
 public:
  using Key = std::uint64_t;
  using Slot = std::uint32_t;

  explicit SlotCache(Slot slots) : slots_(slots) {}

  Slot slots() const { return slots_; }
  Slot used() const { return static_cast<Slot>(places_.size()); }
  bool contains(Key key) const { return places_.contains(key); }

  /// The key's slot, which becomes the most recently used.
  std::optional<Slot> find(Key key) {
    const auto found = places_.find(key);
    if (found == places_.end()) return std::nullopt;
    order_.splice(order_.begin(), order_, found->second);
    return found->second->slot;
  }

  /// A slot for a key that has none: a free one, or that of the least recently used key, which is forgotten.
  Slot place(Key key) {
    if (places_.size() < slots_) {
      order_.push_front({key, static_cast<Slot>(places_.size())});
    } else {
      order_.splice(order_.begin(), order_, std::prev(order_.end()));
      places_.erase(order_.front().key);
      order_.front().key = key;
    }
    places_[key] = order_.begin();
    return order_.front().slot;
  }

 private:
  struct Place {
    Key key;
    Slot slot;
  };
  Slot slots_;
  std::list<Place> order_;  // most recently used first
  std::unordered_map<Key, std::list<Place>::iterator> places_;
};

}  // namespace dsv41::cuda
