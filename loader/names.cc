// Arena and hash index of tensor names (names.h).
#include "loader/names.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

namespace dsv41 {
namespace {

constexpr std::size_t kChunk = 256u << 10;

std::uint32_t hash_of(std::string_view name) {
  static const std::uint64_t seed = (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  return static_cast<std::uint32_t>(XXH3_64bits_withSeed(name.data(), name.size(), seed));
}

}  // namespace

std::string_view NameArena::add(std::string_view text) {
  if (text.size() > capacity_ - used_) {
    capacity_ = std::max(kChunk, text.size());
    chunks_.emplace_back(new char[capacity_]);
    used_ = 0;
  }
  char* place = chunks_.empty() ? nullptr : chunks_.back().get() + used_;
  if (!text.empty()) std::memcpy(place, text.data(), text.size());
  used_ += text.size();
  return {place, text.size()};
}

NameIndex::NameIndex(std::size_t expected)
    : slots_(std::bit_ceil(std::max<std::size_t>(16, expected + expected / 2 + 1))) {
  names_.reserve(expected);
  numbers_.reserve(expected);
}

std::size_t NameIndex::slot_of(std::string_view name, std::uint32_t hash) const {
  std::size_t slot = hash & (slots_.size() - 1);
  while (slots_[slot].entry != kFree && (slots_[slot].hash != hash || names_[slots_[slot].entry] != name))
    slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

void NameIndex::grow() {
  std::vector<Slot> old(2 * slots_.size());
  old.swap(slots_);
  for (const Slot& slot : old)
    if (slot.entry != kFree) slots_[slot_of(names_[slot.entry], slot.hash)] = slot;
}

std::optional<std::uint32_t> NameIndex::insert(std::string_view name, std::uint32_t number) {
  if (names_.size() + names_.size() / 2 + 1 >= slots_.size()) grow();
  const std::uint32_t hash = hash_of(name);
  Slot& slot = slots_[slot_of(name, hash)];
  if (slot.entry != kFree) return numbers_[slot.entry];
  slot = {hash, static_cast<std::uint32_t>(names_.size())};
  names_.push_back(name);
  numbers_.push_back(number);
  return std::nullopt;
}

std::optional<std::uint32_t> NameIndex::find(std::string_view name) const {
  const Slot& slot = slots_[slot_of(name, hash_of(name))];
  if (slot.entry == kFree) return std::nullopt;
  return numbers_[slot.entry];
}

}  // namespace dsv41
