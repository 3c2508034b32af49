// Writing reports (report.h).
#include "loader/audit/report.h"

#include <fmt/format.h>

#include <iterator>
#include <nlohmann/json.hpp>

namespace dsv41::audit {
namespace {

/// One decimal, rounded down: 96,073 of 96,085 must not read as 100.0 %.
std::string percent(std::uint64_t part, std::uint64_t whole) {
  if (whole == 0) return "0.0%";
  const std::uint64_t per_mille = part * 1000 / whole;
  return fmt::format("{}.{}%", per_mille / 10, per_mille % 10);
}

struct Mark {
  const char* word;
  const char* colour;
};

Mark mark_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::Pass:
      return {"pass", "\x1b[32m"};
    case Outcome::Fail:
      return {"FAIL", "\x1b[31m"};
    case Outcome::Undecided:
      break;
  }
  return {"wait", "\x1b[33m"};
}

using Buffer = std::back_insert_iterator<std::string>;

void headline(const AuditReport& report, Buffer out) {
  fmt::format_to(out, "DeepSeek-V4.1-Flash header audit: {} shard{} in {}\n", report.shards,
                 report.shards == 1 ? "" : "s", report.directory);
  fmt::format_to(out, "  mode: {}\n", report.header_prefix ? "header prefixes" : "complete shards");
  if (report.indexed) {
    fmt::format_to(out, "  index: {} tensors over {} shards, {} local, {} not downloaded\n",
                   grouped(report.shipped_tensors), report.local_shards.size() + report.pending_shards.size(),
                   report.local_shards.size(), report.pending_shards.size());
    fmt::format_to(
        out, "  readable: {} of {} tensors ({}); the index tells which exist, headers tell their shapes\n",
        grouped(report.tensors), grouped(report.shipped_tensors),
        percent(report.tensors, report.shipped_tensors));
  } else {
    fmt::format_to(out, "  index: none\n  readable: {} tensors\n", grouped(report.tensors));
  }
}

void byte_table(const AuditReport& report, Buffer out) {
  const auto line = [&](std::string_view title, std::uint64_t tensors, std::uint64_t bytes) {
    fmt::format_to(out, "  {:<36}{:>10}{:>14}\n", title, grouped(tensors), binary_size(bytes));
  };
  fmt::format_to(out, "\n  {:<36}{:>10}{:>14}\n", "category", "tensors", "bytes");
  for (const CategoryTotal& category : report.categories)
    if (category.tensors > 0) line(category.title, category.tensors, category.bytes);
  line("total", report.tensors, report.bytes);
  if (report.largest.bytes > 0)
    fmt::format_to(out, "  largest tensor: {} {} {}, {}\n", report.largest.name, report.largest.dtype,
                   report.largest.shape, binary_size(report.largest.bytes));
}

}  // namespace

std::string text_report(const AuditReport& report, bool quiet, bool colour) {
  std::string text;
  const Buffer out(text);
  if (!quiet) {
    headline(report, out);
    text += '\n';
  }
  for (const Check& check : report.checks) {
    if (quiet && check.outcome == Outcome::Pass) continue;
    const Mark mark = mark_of(check.outcome);
    fmt::format_to(out, "  {}{}{}  {}{}{}\n", colour ? mark.colour : "", mark.word, colour ? "\x1b[0m" : "",
                   check.name, check.detail.empty() ? "" : ": ", check.detail);
  }
  if (quiet) return text;
  byte_table(report, out);
  fmt::format_to(out, "\n{}/{} checks passed, {} undecided, {} failed\n", report.count(Outcome::Pass),
                 report.checks.size(), report.count(Outcome::Undecided), report.count(Outcome::Fail));
  return text;
}

std::string json_report(const AuditReport& report) {
  using Json = nlohmann::ordered_json;
  Json categories = Json::object();
  for (const CategoryTotal& category : report.categories)
    categories[std::string(category.key)] = {{"tensors", category.tensors}, {"bytes", category.bytes}};
  Json checks = Json::array();
  for (const Check& check : report.checks)
    checks.push_back(
        {{"name", check.name}, {"status", outcome_name(check.outcome)}, {"detail", check.detail}});
  Json json = {{"checkpoint_dir", report.directory},
               {"mode", report.header_prefix ? "header-prefix" : "complete-shards"},
               {"shards", report.shards},
               {"complete", report.complete},
               {"tensors", report.tensors},
               {"bytes", report.bytes},
               {"index",
                {{"indexed", report.indexed},
                 {"shipped_tensors", report.shipped_tensors},
                 {"local_shards", report.local_shards},
                 {"pending_shards", report.pending_shards}}},
               {"categories", categories},
               {"checks", checks}};
  if (report.payload) {
    const PayloadReport& payload = *report.payload;
    json["payload"] = {{"manifest", payload.manifest.string()},
                       {"interrupted", payload.interrupted},
                       {"tensors", payload.tensors},
                       {"bytes", payload.bytes},
                       {"read_bytes", payload.read_bytes},
                       {"hole_bytes", payload.hole_bytes},
                       {"resumed_bytes", payload.resumed_bytes},
                       {"seconds", payload.seconds},
                       {"compared", payload.compared},
                       {"added", payload.added},
                       {"not_here", payload.not_here},
                       {"skipped_shards", payload.skipped},
                       {"mismatches", payload.mismatches},
                       {"nan_tensors", payload.nan_tensors},
                       {"zero_scales", payload.zero_scales},
                       {"zero_tensors", payload.zero_tensors}};
  }
  // File names need not be UTF-8.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace dsv41::audit
