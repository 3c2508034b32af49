// A step: the only shape in which work enters the model. Rows of one or several sequences, any number per
// sequence.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/sequence.h"

namespace dsv41 {

/// The rows of one sequence in a step: consecutive positions from the sequence's length on.
struct Segment {
  Sequence* sequence = nullptr;
  std::size_t first_row = 0;  // in the step
  std::size_t rows = 0;
  std::uint32_t start = 0;  // position of the first row
};

struct Step {
  std::uint64_t number = 0;
  std::vector<Segment> segments;
  std::vector<std::uint32_t> tokens;      // [rows]
  std::vector<std::uint32_t> positions;   // [rows]
  std::vector<std::uint32_t> logit_rows;  // rows whose logits are wanted, ascending

  std::size_t rows() const { return tokens.size(); }
  void clear();
  /// Appends the next tokens of a sequence; logits of the last `logits` of them are wanted. One call per
  /// sequence.
  void add(Sequence& sequence, std::span<const std::uint32_t> next, std::size_t logits);
};

}  // namespace dsv41
