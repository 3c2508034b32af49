// Byte pair encoding over a linked list of symbols and a queue of candidate merges.
#include "loader/byte_pairs.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <random>

namespace dsv41 {
namespace {

constexpr std::uint32_t kNone = 0xFFFFFFFFu;
constexpr std::uint64_t kNoPair = ~std::uint64_t{0};

std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 31)) * 0x7FB5D329728EA185u;
  value = (value ^ (value >> 27)) * 0x81DADEF4BC2DD44Du;
  return value ^ (value >> 33);
}

std::uint64_t pair_of(std::uint32_t left, std::uint32_t right) {
  return std::uint64_t{left} << 32 | right;
}

}  // namespace

BytePairs::BytePairs(const std::array<std::uint32_t, 256>& byte_ids, std::span<const Merge> merges)
    : byte_ids_(byte_ids) {
  std::random_device device;
  seed_ = std::uint64_t{device()} << 32 | device();
  slots_.assign(std::bit_ceil(2 * merges.size() + 2), Slot{kNoPair, 0});
  results_.reserve(merges.size());
  for (const Merge& merge : merges) {
    const std::uint64_t pair = pair_of(merge.left, merge.right);
    std::size_t i = mix(pair ^ seed_) & (slots_.size() - 1);
    while (slots_[i].pair != kNoPair) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = {pair, static_cast<std::uint32_t>(results_.size())};
    results_.push_back(merge.result);
  }
}

std::uint32_t BytePairs::rank_of(std::uint32_t left, std::uint32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  std::size_t i = mix(pair ^ seed_) & (slots_.size() - 1);
  while (slots_[i].pair != kNoPair) {
    if (slots_[i].pair == pair) return slots_[i].rank;
    i = (i + 1) & (slots_.size() - 1);
  }
  return kNone;
}

void BytePairs::encode(std::string_view piece, Workspace& workspace, std::vector<std::uint32_t>& ids) const {
  if (piece.empty()) return;
  auto& symbols = workspace.symbols;  // no structured binding: clang 14 cannot capture one in a lambda
  auto& queue = workspace.queue;
  const auto count = static_cast<std::uint32_t>(piece.size());
  symbols.resize(count);
  queue.clear();
  for (std::uint32_t i = 0; i < count; ++i)
    symbols[i] = {byte_ids_[static_cast<std::uint8_t>(piece[i])], kNone, i - 1,
                  i + 1 < count ? i + 1 : kNone};

  // An entry is rank, then position: the lowest rank is merged first, the leftmost of equal ranks.
  const auto update = [&](std::uint32_t at) {
    const std::uint32_t next = symbols[at].next;
    symbols[at].rank = next == kNone ? kNone : rank_of(symbols[at].id, symbols[next].id);
    if (symbols[at].rank != kNone) queue.push_back(pair_of(symbols[at].rank, at));
    return symbols[at].rank != kNone;
  };
  for (std::uint32_t i = 0; i < count; ++i) update(i);
  std::make_heap(queue.begin(), queue.end(), std::greater<>());

  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const auto rank = static_cast<std::uint32_t>(queue.back() >> 32);
    const auto at = static_cast<std::uint32_t>(queue.back());
    queue.pop_back();
    Symbol& symbol = symbols[at];
    if (symbol.rank != rank) continue;  // a neighbour was merged since the entry was made
    const std::uint32_t eaten = symbol.next;
    symbols[eaten].rank = kNone;
    symbol.id = results_[rank];
    symbol.next = symbols[eaten].next;
    if (symbol.next != kNone) symbols[symbol.next].previous = at;
    if (update(at)) std::push_heap(queue.begin(), queue.end(), std::greater<>());
    if (symbol.previous != kNone && update(symbol.previous))
      std::push_heap(queue.begin(), queue.end(), std::greater<>());
  }
  for (std::uint32_t i = 0; i != kNone; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace dsv41
