// Whether a step runs as two halves: while the experts of one half are away on other ranks, the other half is
// computed here. Rows then share fewer readings of a weight, so that it pays only where there is enough to
// wait for. The choice follows the clock, the output never does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dsv41 {

class Overlap {
 public:
  enum class Mode { Never, Always, Measured };
  explicit Overlap(Mode mode = Mode::Never) : mode_(mode) {}

  /// Whether the next step, of `rows` rows, is to run as two halves; never when there is but one row.
  bool wanted(std::size_t rows) const;
  /// What that step took. layer_rows: rows times layers that it computed; none: it says nothing.
  void step_took(std::size_t rows, bool halves, std::uint64_t layer_rows, double seconds);

 private:
  /// Steps of one way to run them.
  struct Way {
    std::uint32_t steps = 0;
    double seconds_per_row = 0;  // of a layer; rises slowly, since a step may be slow for any reason
  };
  /// Steps whose numbers of rows are in the same octave.
  struct Octave {
    std::array<Way, 2> ways;  // whole, in halves
    std::uint32_t since_trial = 0;
    bool faster() const { return ways[1].seconds_per_row < ways[0].seconds_per_row; }
  };
  static std::size_t octave_of(std::size_t rows);

  Mode mode_;
  std::array<Octave, 32> octaves_;
};

}  // namespace dsv41
