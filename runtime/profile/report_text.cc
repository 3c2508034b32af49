// A summary as text, JSON and CSV (report_summary.h).
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "runtime/profile/report_summary.h"

namespace dsv41 {
namespace {

constexpr std::size_t kLayersShown = 8;

/// ns with a unit that fits.
std::string time_text(double ns) {
  if (ns >= 1e9) return fmt::format("{:.2f} s", ns * 1e-9);
  if (ns >= 1e6) return fmt::format("{:.2f} ms", ns * 1e-6);
  if (ns >= 1e3) return fmt::format("{:.1f} us", ns * 1e-3);
  return fmt::format("{:.0f} ns", ns);
}
std::string time_text(std::int64_t ns) {
  return time_text(static_cast<double>(ns));
}

std::string bytes_text(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.2f} GB", bytes * 1e-9);
  if (bytes >= 1e6) return fmt::format("{:.2f} MB", bytes * 1e-6);
  if (bytes >= 1e3) return fmt::format("{:.1f} kB", bytes * 1e-3);
  return fmt::format("{:.0f} B", bytes);
}

std::string block_name(const Profile& profile, std::size_t block) {
  return block < profile.run.layers ? fmt::format("layer {}", block)
                                    : fmt::format("draft {}", block - profile.run.layers);
}

nlohmann::ordered_json json_of(const Distribution& distribution) {
  return {{"count", distribution.count},
          {"median_ns", distribution.median},
          {"p90_ns", distribution.p90},
          {"max_ns", distribution.max},
          {"sum_ns", distribution.sum}};
}

class Text {
 public:
  template <class... Values>
  void line(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Values>(values)...);
    text_ += '\n';
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

void print_kinds(Text& out, const Summary& summary) {
  for (const KindSummary& kind : summary.kinds) {
    const std::string_view name = kStepKindNames[static_cast<std::size_t>(kind.kind)];
    out.line("");
    out.line("{}: {} steps, {} rows, {} tokens out, {}, {:.2f} tokens/s", name, kind.step.count, kind.tokens,
             kind.emitted, time_text(kind.step.sum), kind.tokens_per_second);
    if (kind.drafted > 0) out.line("  drafts: {} of {} accepted", kind.accepted, kind.drafted);
    out.line("  {:<20}{:>12}{:>12}{:>12}{:>9}", "phase", "median", "p90", "max", "share");
    for (const PhaseSummary& phase : kind.phases)
      out.line("  {:<20}{:>12}{:>12}{:>12}{:>8.1f}%", phase_name(phase.phase), time_text(phase.time.median),
               time_text(phase.time.p90), time_text(phase.time.max), 100 * phase.share);
    out.line("  {:<20}{:>12}{:>12}{:>12}{:>8.1f}%", "step", time_text(kind.step.median),
             time_text(kind.step.p90), time_text(kind.step.max), 100.0);
  }
}

void print_layers(Text& out, const Profile& profile, const Summary& summary) {
  if (summary.layers.empty()) return;
  out.line("");
  out.line("slowest layers");
  out.line("  {:<20}{:>12}{:>12}{:>12}{:>9}   {}", "layer", "median", "p90", "max", "share", "most of it");
  for (std::size_t i = 0; i < std::min(kLayersShown, summary.layers.size()); ++i) {
    const LayerSummary& layer = summary.layers[i];
    out.line("  {:<20}{:>12}{:>12}{:>12}{:>8.1f}%   {} ({:.0f}%)", block_name(profile, layer.block),
             time_text(layer.time.median), time_text(layer.time.p90), time_text(layer.time.max),
             100 * layer.share, phase_name(layer.largest), 100 * layer.largest_share);
  }
}

void print_exchange(Text& out, const Profile& profile, const Summary& summary) {
  out.line("");
  out.line("{}", summary.messages ? "exchange, median per request (request and reply: on the way)"
                                  : "experts in this process, median per call");
  out.line("  {:<6}{:>9}{:>11}{:>11}{:>11}{:>11}{:>11}{:>9}{:>11}{:>11}", "rank", "requests", "request",
           "receive", "compute", "reply", "idle", "last", "bytes out", "bytes in");
  std::int64_t error = 0;
  for (const RankSummary& rank : summary.ranks) {
    out.line("  {:<6}{:>9}{:>11}{:>11}{:>11}{:>11}{:>11}{:>8.1f}%{:>11}{:>11}", rank.rank, rank.requests,
             time_text(rank.request.median), time_text(rank.receive.median), time_text(rank.compute.median),
             time_text(rank.reply.median), time_text(rank.wait.median), 100 * rank.slowest_share,
             bytes_text(static_cast<double>(rank.bytes_out)), bytes_text(static_cast<double>(rank.bytes_in)));
    error = std::max(error, profile.run.clock_error_ns[rank.rank]);
  }
  if (summary.messages) out.line("  clocks of other ranks are known to within {}", time_text(error));
  out.line("  imbalance (slowest rank / mean): compute {:.2f}, (token, expert) pairs {:.2f}",
           summary.compute_imbalance, summary.routes_imbalance);
}

void print_memory(Text& out, const Summary& summary) {
  out.line("");
  out.line("expert weights");
  out.line("  {:<6}{:>10}{:>10}{:>10}{:>12}{:>14}{:>14}", "rank", "hits", "misses", "hit rate", "read",
           "effective", "of measured");
  for (const RankSummary& rank : summary.ranks) {
    const std::uint64_t lookups = rank.cache_hits + rank.cache_misses;
    out.line("  {:<6}{:>10}{:>10}{:>10}{:>12}{:>9.2f} GB/s{:>14}", rank.rank, rank.cache_hits,
             rank.cache_misses,
             lookups == 0 ? "-"
                          : fmt::format("{:.1f}%", 100.0 * static_cast<double>(rank.cache_hits) /
                                                       static_cast<double>(lookups)),
             bytes_text(static_cast<double>(rank.bytes_read)), rank.gigabytes_per_second,
             rank.measured_gigabytes_per_second > 0
                 ? fmt::format("{:.0f}% of {:.1f}",
                               100 * rank.gigabytes_per_second / rank.measured_gigabytes_per_second,
                               rank.measured_gigabytes_per_second)
                 : std::string("not measured"));
  }
}

}  // namespace

std::string summary_text(const Profile& profile, const Summary& summary) {
  Text out;
  const RunInfo& run = profile.run;
  out.line("{}: dsv41-mpi {}, {}", profile.path, run.program_version, run.start_time);
  out.line("{}", run.command_line);
  out.line("{} ranks, {} of them with experts; transport {}; placement {}", run.hosts.size(), profile.ranks,
           run.transport, run.placement);
  out.line("{} layers and {} draft stages of {} experts, {} per token", run.layers, run.blocks - run.layers,
           run.experts, run.experts_per_token);
  print_kinds(out, summary);
  print_layers(out, profile, summary);
  print_exchange(out, profile, summary);
  out.line("");
  out.line("critical path, share of all steps");
  for (const CriticalPath::Part& part : summary.critical_path.parts)
    out.line("  {:<42}{:>8.1f}%", part.name, 100 * part.share);
  print_memory(out, summary);
  return out.take();
}

std::string summary_json(const Profile& profile, const Summary& summary) {
  nlohmann::ordered_json json;
  const RunInfo& run = profile.run;
  json["file"] = profile.path;
  json["run"] = {{"program_version", run.program_version},
                 {"command_line", run.command_line},
                 {"start_time", run.start_time},
                 {"transport", run.transport},
                 {"placement", run.placement},
                 {"hosts", run.hosts},
                 {"devices", run.devices},
                 {"layers", run.layers},
                 {"blocks", run.blocks},
                 {"experts", run.experts},
                 {"experts_per_token", run.experts_per_token}};
  json["kinds"] = nlohmann::ordered_json::array();
  for (const KindSummary& kind : summary.kinds) {
    nlohmann::ordered_json phases;
    for (const PhaseSummary& phase : kind.phases) {
      auto entry = json_of(phase.time);
      entry["share"] = phase.share;
      phases[std::string(phase_name(phase.phase))] = entry;
    }
    json["kinds"].push_back({{"kind", kStepKindNames[static_cast<std::size_t>(kind.kind)]},
                             {"tokens", kind.tokens},
                             {"emitted", kind.emitted},
                             {"drafted", kind.drafted},
                             {"accepted", kind.accepted},
                             {"tokens_per_second", kind.tokens_per_second},
                             {"step", json_of(kind.step)},
                             {"phases", phases}});
  }
  json["layers"] = nlohmann::ordered_json::array();
  for (const LayerSummary& layer : summary.layers)
    json["layers"].push_back({{"block", layer.block},
                              {"time", json_of(layer.time)},
                              {"share", layer.share},
                              {"largest_phase", phase_name(layer.largest)},
                              {"largest_phase_share", layer.largest_share}});
  json["ranks"] = nlohmann::ordered_json::array();
  for (const RankSummary& rank : summary.ranks)
    json["ranks"].push_back({{"rank", rank.rank},
                             {"host", rank.host},
                             {"device", rank.device},
                             {"requests", rank.requests},
                             {"routes", rank.routes},
                             {"request", json_of(rank.request)},
                             {"receive", json_of(rank.receive)},
                             {"compute", json_of(rank.compute)},
                             {"reply", json_of(rank.reply)},
                             {"idle", json_of(rank.wait)},
                             {"last_share", rank.slowest_share},
                             {"bytes_out", rank.bytes_out},
                             {"bytes_in", rank.bytes_in},
                             {"cache_hits", rank.cache_hits},
                             {"cache_misses", rank.cache_misses},
                             {"bytes_read", rank.bytes_read},
                             {"gigabytes_per_second", rank.gigabytes_per_second},
                             {"measured_gigabytes_per_second", rank.measured_gigabytes_per_second}});
  json["compute_imbalance"] = summary.compute_imbalance;
  json["routes_imbalance"] = summary.routes_imbalance;
  for (const CriticalPath::Part& part : summary.critical_path.parts)
    json["critical_path"][part.name] = part.share;
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string steps_csv(const Profile& profile) {
  std::string csv;
  for (const Column& column : kStepColumns) fmt::format_to(std::back_inserter(csv), "{},", column.name);
  for (std::size_t phase = 0; phase < kPhases; ++phase)
    fmt::format_to(std::back_inserter(csv), "{}_ns{}", kPhaseInfo[phase].name,
                   phase + 1 < kPhases ? ',' : '\n');
  for (std::size_t s = 0; s < profile.steps; ++s) {
    for (std::size_t column = 0; column < kStepColumns.size(); ++column) {
      if (static_cast<StepColumn>(column) == StepColumn::Kind)
        fmt::format_to(std::back_inserter(csv), "{},",
                       kStepKindNames[static_cast<std::size_t>(profile.kind(s))]);
      else
        fmt::format_to(std::back_inserter(csv), "{},", profile.step_columns[column][s]);
    }
    for (std::size_t phase = 0; phase < kPhases; ++phase)
      fmt::format_to(std::back_inserter(csv), "{}{}", profile.step_phases[phase][s],
                     phase + 1 < kPhases ? ',' : '\n');
  }
  return csv;
}

}  // namespace dsv41
