// Trace events (reports.h). Format: the JSON object form of Chrome's trace event format, times in
// microseconds.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "runtime/profile/reports.h"

namespace dsv41 {
namespace {

class Trace {
 public:
  explicit Trace(std::ostream& out) : out_(out) { out_ << R"({"displayTimeUnit":"ms","traceEvents":[)"; }
  ~Trace() { out_ << "\n]}\n"; }

  void name_track(std::size_t rank, const std::string& name) {
    event(fmt::format(R"({{"ph":"M","name":"process_name","pid":{},"tid":0,"args":{{"name":{}}}}})", rank,
                      quoted(name)));
    event(
        fmt::format(R"({{"ph":"M","name":"process_sort_index","pid":{},"tid":0,"args":{{"sort_index":{}}}}})",
                    rank, rank));
  }
  void slice(std::size_t rank, std::string_view name, std::int64_t begin_ns, std::int64_t length_ns,
             const std::string& arguments = "") {
    event(fmt::format(R"({{"ph":"X","name":"{}","pid":{},"tid":0,"ts":{},"dur":{}{}}})", name, rank,
                      microseconds(begin_ns), microseconds(length_ns),
                      arguments.empty() ? "" : fmt::format(R"(,"args":{{{}}})", arguments)));
  }
  /// An arrow between the slices that lie at these times.
  void arrow(std::string_view name, std::size_t from, std::int64_t from_ns, std::size_t to,
             std::int64_t to_ns) {
    ++arrows_;
    event(fmt::format(R"({{"ph":"s","name":"{}","cat":"exchange","id":{},"pid":{},"tid":0,"ts":{}}})", name,
                      arrows_, from, microseconds(from_ns)));
    event(
        fmt::format(R"({{"ph":"f","bp":"e","name":"{}","cat":"exchange","id":{},"pid":{},"tid":0,"ts":{}}})",
                    name, arrows_, to, microseconds(to_ns)));
  }

 private:
  static std::string microseconds(std::int64_t ns) {
    return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", std::abs(ns) / 1000, std::abs(ns) % 1000);
  }
  static std::string quoted(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  void event(const std::string& json) {
    out_ << (first_ ? "\n" : ",\n") << json;
    first_ = false;
  }

  std::ostream& out_;
  bool first_ = true;
  std::uint64_t arrows_ = 0;
};

/// Blocks of large steps take turns, half by half. On the track a block ends where the next one begins.
std::int64_t end_of_block(const Profile& profile, std::size_t s, std::size_t block) {
  const std::int64_t begin = profile.layer(LayerColumn::Start, s, block);
  std::int64_t end = begin + profile.layer(LayerColumn::Total, s, block);
  if (block + 1 < profile.blocks && profile.layer(LayerColumn::Start, s, block + 1) > begin)
    end = std::min(end, profile.layer(LayerColumn::Start, s, block + 1));
  return end;
}

void trace_block(Trace& trace, const Profile& profile, std::size_t s, std::size_t block) {
  const std::int64_t begin = profile.layer(LayerColumn::Start, s, block),
                     end = end_of_block(profile, s, block);
  const std::string name = block < profile.run.layers ? fmt::format("layer {}", block)
                                                      : fmt::format("draft {}", block - profile.run.layers);
  trace.slice(0, name, begin, end - begin);
  const std::int64_t step_begin = profile.step(StepColumn::Start, s);
  std::int64_t at = begin;
  for (const Phase phase : layer_phases()) {
    const std::int64_t length = profile.layer_phase_ns(phase, s, block);
    if (length > 0 && at < end) trace.slice(0, phase_name(phase), at, std::min(length, end - at));
    at += length;
  }
  for (std::size_t r = 0; r < profile.ranks; ++r) {
    const std::size_t rank = profile.communicator_rank(r);
    if (!profile.asked(s, block, r) || rank == 0) continue;
    const std::int64_t sent = profile.rank(RankColumn::Sent, s, block, r),
                       replied = profile.rank(RankColumn::Replied, s, block, r);
    const std::int64_t received =
        profile.rank(RankColumn::Received, s, block, r) + profile.clock_offset_ns(r);
    const std::int64_t receive = profile.rank(RankColumn::Receive, s, block, r),
                       compute = profile.rank(RankColumn::Compute, s, block, r);
    trace.slice(rank, name, received, receive + compute,
                fmt::format(R"("step":{},"tokens":{},"pairs":{},"experts":{},"bytes_read":{})",
                            profile.step(StepColumn::Step, s), profile.rank(RankColumn::Tokens, s, block, r),
                            profile.rank(RankColumn::Routes, s, block, r),
                            profile.rank(RankColumn::Experts, s, block, r),
                            profile.rank(RankColumn::BytesRead, s, block, r)));
    trace.slice(rank, "receive", received, receive);
    trace.slice(rank, "compute", received + receive, compute);
    trace.arrow("request", 0, std::clamp(sent, begin, end), rank, received);
    trace.arrow("reply", rank, received + receive + compute, 0,
                std::clamp(replied, step_begin, step_begin + profile.step(StepColumn::Total, s)));
  }
}

}  // namespace

void write_trace(const Profile& profile, std::ostream& out) {
  Trace trace(out);
  for (std::size_t rank = 0; rank < profile.run.hosts.size(); ++rank)
    trace.name_track(
        rank, fmt::format("rank {} ({}, {})", rank, rank == 0 ? "host" : "experts", profile.run.hosts[rank]));
  for (std::size_t s = 0; s < profile.steps; ++s) {
    trace.slice(0,
                fmt::format("{} {}", kStepKindNames[static_cast<std::size_t>(profile.kind(s))],
                            profile.step(StepColumn::Step, s)),
                profile.step(StepColumn::Start, s), profile.step(StepColumn::Total, s),
                fmt::format(R"("tokens":{},"emitted":{},"bytes_out":{},"bytes_in":{})",
                            profile.step(StepColumn::Tokens, s), profile.step(StepColumn::Emitted, s),
                            profile.step(StepColumn::BytesOut, s), profile.step(StepColumn::BytesIn, s)));
    for (std::size_t block = 0; block < profile.blocks; ++block)
      if (profile.layer(LayerColumn::Start, s, block) >= 0) trace_block(trace, profile, s, block);
  }
}

}  // namespace dsv41
