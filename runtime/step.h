// A step: the only shape in which work enters the model. Rows of one or several sequences, any number per
// sequence.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "loader/config.h"
#include "runtime/sequence.h"

namespace dsv41 {

/// The rows of one sequence: consecutive positions.
struct Segment {
  Sequence* sequence = nullptr;
  std::size_t first_row = 0;
  std::size_t rows = 0;
  std::uint32_t start = 0;        // position of the first row
  std::uint32_t wanted_from = 0;  // first position whose final hidden state anybody will ask for
};

struct Step {
  std::uint64_t number = 0;
  std::vector<Segment> segments;
  std::vector<std::uint32_t> tokens;      // [rows]
  std::vector<std::uint32_t> positions;   // [rows]
  std::vector<std::uint32_t> logit_rows;  // rows whose logits are wanted, ascending

  std::size_t rows() const { return tokens.size(); }
  void clear();
  /// Appends the next tokens of a sequence, from its length on; logits of the last `logits` of them are
  /// wanted. One call per sequence. prompt_end: the position after the last token of a prompt that is being
  /// filled; what only tokens before it would need may be skipped (RowPlan). 0: nothing may.
  void add(Sequence& sequence, std::span<const std::uint32_t> next, std::size_t logits,
           std::uint32_t prompt_end = 0);
};

/// The rows of a step that are still computed at some layer: of each segment a suffix.
struct RowSet {
  std::vector<Segment> segments;
  std::vector<std::uint32_t> positions;  // [rows]
  std::vector<std::uint32_t> origins;    // [rows] row of the step

  std::size_t rows() const { return positions.size(); }
  /// Rows [begin, end) of a step.
  void assign(const Step& step, std::size_t begin, std::size_t end);
};

/// Which rows each layer has to compute (docs/runtime.md, "Skipped rows"). After the last Full layer nothing
/// makes compressed KV any more, so a row's output matters only to the W-1 positions after it, one layer up.
/// Exact: what is left out cannot reach a wanted result.
class RowPlan {
 public:
  /// draft_windows: the draft stages will ask for main_hidden of the last W tokens.
  RowPlan(const ModelConfig& config, bool draft_windows);

  /// The rows of `in` whose output of `layer` is needed; their order is kept.
  void narrow(const RowSet& in, std::uint32_t layer, RowSet& out) const;
  /// Whether a row's output of `layer` is needed when positions from `wanted_from` on are.
  bool needed(std::uint32_t layer, std::uint32_t position, std::uint32_t wanted_from) const {
    return reach_[layer] == kAll || std::uint64_t{position} + reach_[layer] >= wanted_from;
  }

 private:
  static constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::vector<std::uint64_t> reach_;  // [n_layers] how many positions before a wanted one
};

}  // namespace dsv41
