// Writing of the profile (profile_file.h). Tables of steps are not compressed: deflating them costs more than
// the one percent of a step that a profile may take. Their chunks are overwritten in place, so that a kill
// between two flushes leaves what the last flush left.
#include "runtime/profile/profile_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <system_error>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr std::uint64_t kMostChunkRows = 512, kChunkBytes = 16 << 10;
constexpr std::uint64_t kSpareBytes = 4 << 20;  // left free for the file's own structures and its close

std::vector<Phase> phases_where(const std::function<bool(const PhaseInfo&)>& condition) {
  std::vector<Phase> phases;
  for (std::size_t phase = 0; phase < kPhases; ++phase)
    if (condition(kPhaseInfo[phase])) phases.push_back(static_cast<Phase>(phase));
  return phases;
}

/// Name and meaning of a phase's column; the strings must outlive it.
struct PhaseColumn {
  std::string name;
  Column column;
  explicit PhaseColumn(Phase phase)
      : name(fmt::format("{}_ns", phase_name(phase))),
        column{name, hdf5::Type::Int64, "ns", kPhaseInfo[static_cast<std::size_t>(phase)].meaning} {}
};

/// Steps per chunk of a table whose rows have this many elements.
std::uint64_t chunk_steps(std::uint64_t row_elements) {
  return std::clamp<std::uint64_t>(std::bit_floor(kChunkBytes / (8 * row_elements + 1)),
                                   ProfileFile::kChunkSteps, kMostChunkRows);
}

}  // namespace

std::vector<Phase> step_phases() {
  return phases_where([](const PhaseInfo&) { return true; });
}
std::vector<Phase> layer_phases() {
  return phases_where([](const PhaseInfo& info) { return info.in_layers; });
}

ProfileFile::ProfileFile(const std::filesystem::path& path) : path_(path), file_(path) {
  file_.attribute("/", "format", kProfileFormat);
  file_.attribute("/", "schema_version", kProfileSchemaVersion);
  file_.flush();
}

hdf5::Writer::Table ProfileFile::add(const std::string& group, const Column& column,
                                     std::vector<std::uint64_t> row_shape, std::uint64_t chunk_rows,
                                     bool compress) {
  const std::string name = fmt::format("{}/{}", group, column.name);
  const auto table = file_.create_table(name, {column.type, std::move(row_shape), chunk_rows, compress});
  file_.attribute(name, "units", column.unit);
  file_.attribute(name, "meaning", column.meaning);
  return table;
}

hdf5::Writer::Table ProfileFile::add_array(const std::string& name, const RunInfo& run,
                                           std::string_view meaning) {
  const auto table = file_.create_array(name, hdf5::Type::Int64, {run.blocks, run.experts});
  file_.attribute(name, "units", "1");
  file_.attribute(name, "meaning", meaning);
  return table;
}

void ProfileFile::start(const RunInfo& run, bool routes) {
  clock_zero_ns_ = run.clock_zero_ns;
  const std::uint64_t ranks = run.rank_numbers.size();

  file_.create_group("/run");
  const auto text = [&](const char* name, const std::string& value) { file_.attribute("/run", name, value); };
  const auto number = [&](const char* name, std::int64_t value) { file_.attribute("/run", name, value); };
  text("program_version", run.program_version);
  text("command_line", run.command_line);
  text("config", run.config);
  text("transport", run.transport);
  text("placement", run.placement);
  text("start_time", run.start_time);
  number("clock_zero_ns", run.clock_zero_ns);
  number("layers", run.layers);
  number("blocks", run.blocks);
  number("experts", run.experts);
  number("experts_per_token", run.experts_per_token);
  number("dim", run.dim);
  number("ranks", static_cast<std::int64_t>(run.hosts.size()));
  file_.attribute("/run", "hosts", std::span(run.hosts));
  file_.attribute("/run", "devices", std::span(run.devices));
  file_.attribute("/run", "clock_offset_ns", std::span(run.clock_offset_ns));
  file_.attribute("/run", "clock_error_ns", std::span(run.clock_error_ns));
  file_.attribute("/run", "rank_numbers", std::span(run.rank_numbers));
  file_.attribute("/run", "read_bandwidth", std::span(run.read_bandwidth));
  file_.attribute("/run", "expert_capacity", std::span(run.expert_capacity));

  file_.create_group("/steps");
  for (const Column& column : kStepColumns)
    step_tables_.push_back(add("/steps", column, {}, kMostChunkRows, false));
  for (const Phase phase : step_phases())
    step_tables_.push_back(add("/steps", PhaseColumn(phase).column, {}, kMostChunkRows, false));

  file_.create_group("/layers");
  file_.attribute("/layers", "axes", "step, block (layers, then draft stages)");
  for (const Column& column : kLayerColumns)
    layer_tables_.push_back(add("/layers", column, {run.blocks}, chunk_steps(run.blocks), false));
  for (const Phase phase : layer_phases())
    layer_tables_.push_back(
        add("/layers", PhaseColumn(phase).column, {run.blocks}, chunk_steps(run.blocks), false));

  file_.create_group("/ranks");
  file_.attribute("/ranks", "axes", "step, block, expert rank (see rank_numbers of /run)");
  for (const Column& column : kRankColumns)
    rank_tables_.push_back(
        add("/ranks", column, {run.blocks, ranks}, chunk_steps(run.blocks * ranks), false));

  file_.create_group("/experts");
  file_.attribute("/experts", "axes", "block, expert");
  counts_ = add_array("/experts/counts", run, "rows that chose the expert, since the start of the run");
  even_counts_ = add_array("/experts/counts_even_steps", run, "the same over steps with an even number");
  const auto owners =
      add_array("/experts/owner", run, "position on the rank axis of the expert's rank; -1: no such expert");
  std::vector<std::int64_t> flat(std::size_t{run.blocks} * run.experts, -1);
  for (std::size_t block = 0; block < run.owners.size(); ++block)
    std::copy(run.owners[block].begin(), run.owners[block].end(),
              flat.begin() + static_cast<std::ptrdiff_t>(block * run.experts));
  file_.overwrite(owners, flat.data());

  if (routes) {
    file_.create_group("/routes");
    file_.attribute("/routes", "axes", "one entry per step, block and row, in the order of the run");
    const std::uint64_t width = run.experts_per_token;
    const auto table = [&](const Column& column, std::vector<std::uint64_t> row_shape) {
      route_tables_.push_back(add("/routes", column, std::move(row_shape), kChunkRoutes, true));
    };
    table({"step", hdf5::Type::Int64, "1", "number of the step"}, {});
    table({"layer", hdf5::Type::UInt32, "1", "block: layers, then draft stages"}, {});
    table({"row", hdf5::Type::UInt32, "1", "row of the step"}, {});
    table({"ids", hdf5::Type::Int32, "1", "chosen experts, ascending; -1 where the block chooses fewer"},
          {width});
    table({"weights", hdf5::Type::Float32, "1", "weight of each chosen expert"}, {width});
  }
  step_bytes_ = 8 * (step_tables_.size() + run.blocks * (layer_tables_.size() + ranks * rank_tables_.size()));
  route_bytes_ = 16 + 8 * std::uint64_t{run.experts_per_token};
  file_.flush();
}

void ProfileFile::check_space(const ProfileBatch& batch) const {
  // A full disk in the middle of a write may leave a file that does not open; this one stays as it is.
  const std::uint64_t needed = kSpareBytes + batch.steps * step_bytes_ + batch.routes * route_bytes_;
  std::error_code unknown;
  const std::filesystem::space_info space = std::filesystem::space(path_, unknown);
  if (!unknown && space.available < needed)
    throw ResourceError(
        fmt::format("{}: only {} bytes are free on the disk", path_.string(), space.available));
}

void ProfileFile::write(const ProfileBatch& batch) {
  check_space(batch);
  const auto append = [&](const std::vector<hdf5::Writer::Table>& tables,
                          const std::vector<const void*>& columns) {
    for (std::size_t i = 0; i < tables.size(); ++i) file_.append(tables[i], columns.at(i), batch.steps);
  };
  append(step_tables_, batch.step_columns);
  append(layer_tables_, batch.layer_columns);
  append(rank_tables_, batch.rank_columns);
  if (!route_tables_.empty() && batch.routes > 0) {
    const void* columns[] = {batch.route_step, batch.route_layer, batch.route_row, batch.route_ids,
                             batch.route_weights};
    for (std::size_t i = 0; i < route_tables_.size(); ++i)
      file_.append(route_tables_[i], columns[i], batch.routes);
  }
  file_.overwrite(counts_, batch.counts);  // first, so that they are never less than those of even steps
  file_.overwrite(even_counts_, batch.even_counts);
  file_.flush();
}

void ProfileFile::close() {
  file_.close();
}

}  // namespace dsv41
