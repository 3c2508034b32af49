// How many drafts to verify: from the stages' confidence against the measured cost of a row. The choice
// follows the clock, the output never does.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dsv41 {

struct SpeculationOptions {
  enum class Mode { Off, Fixed, Auto };
  Mode mode = Mode::Off;
  std::size_t length = 0;  // Fixed: drafts per step at most
};

struct SpeculationCounts {
  std::uint64_t drafted = 0, accepted = 0;             // tokens that went into steps, and those that agreed
  std::vector<std::uint64_t> drafted_at, accepted_at;  // by place in the draft
  double draft_seconds = 0;                            // proposing tokens
  double verify_seconds = 0;                           // steps that held drafts, their other rows included
  std::uint64_t wasted_rows() const { return drafted - accepted; }
};

class Speculation {
 public:
  Speculation(const SpeculationOptions& options, std::size_t block_size);

  /// Whether to draft after this step. Auto pauses, longer each time, while drafting does not pay.
  bool wanted();
  /// Drafts of one sequence to verify: a prefix of at most `most`. confidence: a logit for each.
  std::size_t length(std::span<const float> confidence, std::size_t most) const;

  void step_took(std::size_t rows, std::size_t sequences, double seconds);
  void draft_took(double seconds);
  /// One sequence's outcome.
  void verified(std::size_t drafted, std::size_t accepted);

  const SpeculationCounts& counts() const { return counts_; }

 private:
  /// Seconds of a step of that many rows, and what one more row adds, by a fading least-squares line.
  double step_seconds(double rows) const;
  double row_seconds() const;
  bool pays() const;

  SpeculationOptions options_;
  SpeculationCounts counts_;
  double weight_ = 0, rows_ = 0, rows2_ = 0, time_ = 0, rows_time_ = 0;  // sums of the line
  double sequences_ = 1, drafted_ = 0, accepted_ = 0, draft_time_ = 0;   // fading means per sequence and step
  std::uint32_t pause_ = 0, next_pause_ = 8, trial_ = 0;
};

}  // namespace dsv41
