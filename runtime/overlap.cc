#include "runtime/overlap.h"

#include <algorithm>
#include <bit>

namespace dsv41 {
namespace {

constexpr std::uint32_t kTrials = 3;     // steps of each way before one is chosen; first ones size buffers
constexpr std::uint32_t kInterval = 64;  // steps between two trials of the slower way
constexpr double kWeight = 0.25;         // of a step that is slower than the mean

}  // namespace

std::size_t Overlap::octave_of(std::size_t rows) {
  return std::min<std::size_t>(std::bit_width(rows), std::tuple_size_v<decltype(octaves_)> - 1);
}

bool Overlap::wanted(std::size_t rows) const {
  if (rows < 2 || mode_ == Mode::Never) return false;
  if (mode_ == Mode::Always) return true;
  const Octave& octave = octaves_[octave_of(rows)];
  const auto& [whole, halves] = octave.ways;
  if (std::min(whole.steps, halves.steps) < kTrials) return halves.steps < whole.steps;
  return octave.faster() != (octave.since_trial >= kInterval);
}

void Overlap::step_took(std::size_t rows, bool halves, std::uint64_t layer_rows, double seconds) {
  if (layer_rows == 0) return;
  Octave& octave = octaves_[octave_of(rows)];
  octave.since_trial = octave.since_trial >= kInterval ? 0 : octave.since_trial + 1;
  Way& way = octave.ways[halves ? 1 : 0];
  const double measured = seconds / static_cast<double>(layer_rows);
  const double change = measured - way.seconds_per_row;
  if (way.steps++ == 0)
    way.seconds_per_row = measured;
  else
    way.seconds_per_row += change < 0 ? change : change * kWeight;
}

}  // namespace dsv41
