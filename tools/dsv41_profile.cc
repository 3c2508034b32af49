// dsv41-profile: reads a profile of dsv41-mpi and says where the time went (tools/profile.md). Needs no MPI.
#include <fmt/format.h>

#include <boost/program_options.hpp>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "loader/error.h"
#include "runtime/profile/profile.h"
#include "runtime/profile/report_summary.h"
#include "runtime/profile/reports.h"

namespace {

namespace options = boost::program_options;
using namespace dsv41;

template <class Write>
void write_file(const std::string& path, Write write) {
  std::ofstream file(path, std::ios::binary);
  if (file) write(file);
  file.close();
  if (!file) throw UsageError(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
  fmt::print(stderr, "wrote {}\n", path);
}

/// "A:B": positions of the first and the last step; either may be missing.
Profile cut(const Profile& profile, const std::string& range) {
  const std::size_t colon = range.find(':');
  const auto number = [&](std::string_view text, std::size_t fallback) {
    if (text.empty()) return fallback;
    std::size_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size())
      throw UsageError(fmt::format("--steps {}: expected FIRST:LAST", range));
    return value;
  };
  if (colon == std::string::npos) throw UsageError(fmt::format("--steps {}: expected FIRST:LAST", range));
  const std::size_t first = number(std::string_view(range).substr(0, colon), 0);
  const std::size_t last =
      std::min(number(std::string_view(range).substr(colon + 1), profile.steps - 1), profile.steps - 1);
  if (first > last)
    throw UsageError(fmt::format("--steps {}: the profile holds steps 0 to {}", range, profile.steps - 1));
  return select_steps(profile, first, last);
}

void report(const options::variables_map& chosen, const Profile& profile) {
  bool other_output = false;
  const auto path = [&](const char* option) {
    other_output = other_output || chosen.count(option);
    return chosen.count(option) ? chosen[option].as<std::string>() : std::string();
  };
  if (const std::string trace = path("trace"); !trace.empty())
    write_file(trace, [&](std::ostream& out) { write_trace(profile, out); });
  if (const std::string plot = path("plot"); !plot.empty())
    write_file(plot, [&](std::ostream& out) { out << plot_svg(profile); });
  if (const std::string placement = path("placement"); !placement.empty()) {
    const PlacementReport balanced = balanced_placement(profile);
    write_file(placement, [&](std::ostream& out) { out << balanced.json; });
    fmt::print("{}", balanced.text);
  }
  if (chosen.count("csv")) fmt::print("{}", steps_csv(profile));
  if (chosen.count("json")) fmt::print("{}", summary_json(profile, summarize(profile)));
  if (!other_output && !chosen.count("csv") && !chosen.count("json"))
    fmt::print("{}", summary_text(profile, summarize(profile)));
}

int run(int argc, char** argv) {
  options::options_description visible(
      "dsv41-profile FILE.h5 [options]\ndsv41-profile --compare A.h5 B.h5\n\nWhere the time of a run of "
      "dsv41-mpi --profile went. "
      "Without options: a summary.\n\nOptions");
  std::vector<std::string> files;
  visible.add_options()("csv", "one line per step, to standard output")(
      "json", "the summary as JSON, to standard output")(
      "trace", options::value<std::string>()->value_name("OUT.json"),
      "trace for Perfetto (ui.perfetto.dev), one track per rank")(
      "plot", options::value<std::string>()->value_name("OUT.svg"),
      "time per step and counts per expert as a picture")(
      "placement", options::value<std::string>()->value_name("OUT.json"),
      "experts to ranks, balanced on measured counts, for dsv41-mpi --placement file:OUT.json")(
      "compare", "two files: what changed, and whether it is more than noise")(
      "steps", options::value<std::string>()->value_name("A:B"), "only these steps, counted from 0")(
      "help", "this text");
  options::options_description all;
  all.add(visible).add_options()("file", options::value(&files));
  options::positional_options_description positions;
  positions.add("file", -1);
  options::variables_map chosen;
  try {
    options::store(options::command_line_parser(argc, argv).options(all).positional(positions).run(), chosen);
    options::notify(chosen);
  } catch (const options::error& error) {
    throw UsageError(fmt::format("{} (see --help)", error.what()));
  }
  if (chosen.count("help")) {
    std::string text = (std::ostringstream() << visible).str();
    fmt::print("{}", text);
    return 0;
  }
  const bool compare = chosen.count("compare") > 0;
  if (files.size() != (compare ? 2u : 1u))
    throw UsageError(compare ? "--compare takes two profiles (see --help)"
                             : "which profile? dsv41-profile FILE.h5 (see --help)");
  std::vector<Profile> profiles;
  for (const std::string& file : files) {
    profiles.push_back(read_profile(file));
    if (chosen.count("steps")) profiles.back() = cut(profiles.back(), chosen["steps"].as<std::string>());
  }
  if (compare)
    fmt::print("{}", compare_text(profiles[0], profiles[1]));
  else
    report(chosen, profiles[0]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    fmt::print(stderr, "dsv41-profile: {}\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "dsv41-profile: {}\n", error.what());
    return static_cast<int>(ExitCode::Resources);
  }
}
