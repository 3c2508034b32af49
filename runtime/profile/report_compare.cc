// Comparison of two profiles (reports.h).
#include <fmt/format.h>

#include <iterator>

#include "runtime/profile/reports.h"
#include "runtime/profile/statistics.h"

namespace dsv41 {
namespace {

std::vector<std::int64_t> step_values(const Profile& profile, StepKind kind,
                                      const std::vector<std::int64_t>& column) {
  std::vector<std::int64_t> values;
  for (std::size_t s = 0; s < profile.steps; ++s)
    if (profile.kind(s) == kind) values.push_back(column[s]);
  return values;
}

/// Prefill chunks differ in size: their times are compared per row.
std::vector<std::int64_t> per_row(const Profile& profile, StepKind kind, std::vector<std::int64_t> values) {
  if (kind == StepKind::Decode) return values;
  const auto tokens =
      step_values(profile, kind, profile.step_columns[static_cast<std::size_t>(StepColumn::Tokens)]);
  for (std::size_t i = 0; i < values.size(); ++i)
    if (tokens[i] > 0) values[i] /= tokens[i];
  return values;
}

std::string verdict(const Difference& difference) {
  if (!difference.enough) return "too few steps to tell";
  if (difference.probability >= kSignificance)
    return fmt::format("not significant (p = {:.2f})", difference.probability);
  return fmt::format("{} (p {} {:.4f})", difference.after < difference.before ? "faster" : "slower",
                     difference.probability < 0.0001 ? "<" : "=", std::max(0.0001, difference.probability));
}

std::string row(std::string_view name, const Difference& difference) {
  const double change = difference.before > 0 ? 100 * (difference.after / difference.before - 1) : 0;
  return fmt::format("  {:<20}{:>14.1f}{:>14.1f}{:>+10.1f}%   {}\n", name, difference.before * 1e-3,
                     difference.after * 1e-3, change, verdict(difference));
}

std::string settings(const Profile& before, const Profile& after) {
  std::string text;
  const auto compare = [&](std::string_view name, const auto& a, const auto& b) {
    if (a != b) text += fmt::format("  {}: {} -> {}\n", name, a, b);
  };
  compare("program", before.run.program_version, after.run.program_version);
  compare("command line", before.run.command_line, after.run.command_line);
  compare("transport", before.run.transport, after.run.transport);
  compare("placement", before.run.placement, after.run.placement);
  compare("ranks", before.run.hosts.size(), after.run.hosts.size());
  compare("hosts", fmt::format("{}", fmt::join(before.run.hosts, " ")),
          fmt::format("{}", fmt::join(after.run.hosts, " ")));
  compare("devices", fmt::format("{}", fmt::join(before.run.devices, ", ")),
          fmt::format("{}", fmt::join(after.run.devices, ", ")));
  compare("config", before.run.config, after.run.config);
  return text.empty() ? "  the same settings\n" : text;
}

}  // namespace

std::string compare_text(const Profile& before, const Profile& after) {
  std::string text = fmt::format("A {}, {}\nB {}, {}\n{}", before.path, before.run.start_time, after.path,
                                 after.run.start_time, settings(before, after));
  for (std::size_t k = 0; k < kStepKindNames.size(); ++k) {
    const auto kind = static_cast<StepKind>(k);
    const auto compare = [&](const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
      return difference(per_row(before, kind, step_values(before, kind, a)),
                        per_row(after, kind, step_values(after, kind, b)));
    };
    constexpr auto total = static_cast<std::size_t>(StepColumn::Total);
    const std::size_t steps_before = step_values(before, kind, before.step_columns[total]).size();
    const std::size_t steps_after = step_values(after, kind, after.step_columns[total]).size();
    if (steps_before == 0 && steps_after == 0) continue;
    text += fmt::format("\n{}: {} steps in A, {} in B; us per {}\n", kStepKindNames[k], steps_before,
                        steps_after, kind == StepKind::Decode ? "step" : "row");
    if (steps_before == 0 || steps_after == 0) continue;
    text += fmt::format("  {:<20}{:>14}{:>14}{:>11}   {}\n", "phase", "A", "B", "change", "difference");
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      const Difference change = compare(before.step_phases[phase], after.step_phases[phase]);
      if (change.before > 0 || change.after > 0) text += row(kPhaseInfo[phase].name, change);
    }
    text += row("step", compare(before.step_columns[total], after.step_columns[total]));
  }
  return text;
}

}  // namespace dsv41
