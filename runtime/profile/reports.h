// Pictures, traces, comparisons and placements made from profiles. Each returns or writes text; none changes
// a profile.
#pragma once

#include <iosfwd>
#include <string>

#include "runtime/profile/profile.h"

namespace dsv41 {

/// Trace events in the JSON that Perfetto and chrome://tracing open: one track per rank, all times on rank
/// 0's clock, arrows from requests to replies. Begin and end of steps, blocks and requests are measured; the
/// phases inside a block have their measured lengths in a fixed order.
void write_trace(const Profile& profile, std::ostream& out);

/// One SVG file without references: stacked time per step for each kind of step, and a heat map of expert
/// counts.
std::string plot_svg(const Profile& profile);

/// What changed between two runs: settings, speed, phases; whether each difference is significant.
std::string compare_text(const Profile& before, const Profile& after);

struct PlacementReport {
  std::string json;  // what --placement file:PATH reads
  std::string text;  // the comparison with contiguous and cyclic
};

/// Experts to ranks, balanced per block on the counts of steps with an even number, scored on the others. A
/// rank gets at most its capacity (equal shares where the profile names none) and work in proportion to its
/// measured speed. Throws UsageError when nothing was counted or there is only one rank with experts.
PlacementReport balanced_placement(const Profile& profile);

}  // namespace dsv41
