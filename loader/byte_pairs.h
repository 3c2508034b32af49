// Byte pair encoding of one piece of text: neighbours are merged in the order of the merge list.
// O(n log n) in the length of the piece. Ids and merges are checked by the caller (loader/tokenizer_file.h).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace dsv41 {

class BytePairs {
 public:
  struct Merge {
    std::uint32_t left, right, result;
  };

  /// byte_ids: the id of every single byte; merges in order of rank, no pair twice.
  BytePairs(const std::array<std::uint32_t, 256>& byte_ids, std::span<const Merge> merges);

  struct Symbol {
    std::uint32_t id, rank;  // rank of the merge with the next symbol
    std::uint32_t previous, next;
  };
  /// Buffers that are reused from piece to piece; not shared between threads.
  struct Workspace {
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> queue;
  };

  /// Appends the ids of a piece of fewer than 2^31 bytes.
  void encode(std::string_view piece, Workspace& workspace, std::vector<std::uint32_t>& ids) const;

 private:
  struct Slot {
    std::uint64_t pair;
    std::uint32_t rank;
  };
  std::uint32_t rank_of(std::uint32_t left, std::uint32_t right) const;

  std::array<std::uint32_t, 256> byte_ids_;
  std::vector<std::uint32_t> results_;  // by rank
  std::vector<Slot> slots_;             // open addressing, at most half full
  std::uint64_t seed_;                  // differs per process: a file cannot be made to collide
};

}  // namespace dsv41
