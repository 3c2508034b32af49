// Profiles made in memory with known numbers, for tests of reports.
#pragma once

#include <cstdint>
#include <functional>

#include "runtime/profile/profile.h"

namespace dsv41 {

/// Steps of 1 ms in two layers of 6 experts on two ranks: step 0 is a prefill of 10 rows. Every layer: 100 us
/// attention, 20 us routing, 50 us shared expert, 200 us exchange wait; per request 10 us on the way, 5 us
/// receive, 200 us compute on rank 1 and 100 us on rank 2, 15 us back. The rest of a step is head and other.
Profile made_profile(std::size_t steps);

inline std::int64_t& cell(Profile& profile, RankColumn column, std::size_t s, std::size_t block,
                          std::size_t r) {
  return profile
      .rank_columns[static_cast<std::size_t>(column)][(s * profile.blocks + block) * profile.ranks + r];
}
inline std::int64_t& phase_cell(Profile& profile, Phase phase, std::size_t s) {
  return profile.step_phases[static_cast<std::size_t>(phase)][s];
}
inline std::int64_t& step_cell(Profile& profile, StepColumn column, std::size_t s) {
  return profile.step_columns[static_cast<std::size_t>(column)][s];
}

}  // namespace dsv41
