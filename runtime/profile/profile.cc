// Reading of profiles (profile.h). The file is untrusted: shapes are compared with /run before anything is
// indexed.
#include "runtime/profile/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr std::int64_t kMostBlocks = 1 << 12, kMostExperts = 1 << 16, kMostRanks = 1 << 16;

class ProfileReader {
 public:
  explicit ProfileReader(const std::filesystem::path& path) : path_(path.string()), file_(path) {}

  Profile read() {
    check_format();
    profile_.path = path_;
    read_run();
    read_steps();
    read_experts();
    if (file_.has("/routes")) read_routes();
    return std::move(profile_);
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw UsageError(fmt::format("{}: {}", path_, reason));
  }

  void check_format() const {
    if (!file_.has_attribute("/", "format") || file_.text("/", "format") != kProfileFormat)
      fail("an HDF5 file, but not a profile of dsv41-mpi (no format attribute)");
    const std::int64_t version = file_.int64("/", "schema_version");
    if (version > kProfileSchemaVersion)
      fail(fmt::format(
          "schema version {} is newer than this program's {}: use the dsv41-profile that belongs to it",
          version, kProfileSchemaVersion));
    if (version < 1) fail(fmt::format("schema version {} does not exist", version));
    if (!file_.has("/run") || !file_.has("/steps/total_ns"))
      fail("empty run: it ended before the first step");
  }

  std::uint32_t size(const char* name, std::int64_t least, std::int64_t most) const {
    const std::int64_t value = file_.int64("/run", name);
    if (value < least || value > most)
      fail(fmt::format("{} {} of /run is not between {} and {} (damaged file?)", name, value, least, most));
    return static_cast<std::uint32_t>(value);
  }

  void read_run() {
    RunInfo& run = profile_.run;
    run.program_version = file_.text("/run", "program_version");
    run.command_line = file_.text("/run", "command_line");
    run.config = file_.text("/run", "config");
    run.transport = file_.text("/run", "transport");
    run.placement = file_.text("/run", "placement");
    run.start_time = file_.text("/run", "start_time");
    run.clock_zero_ns = file_.int64("/run", "clock_zero_ns");
    run.blocks = size("blocks", 1, kMostBlocks);
    run.layers = size("layers", 0, run.blocks);
    run.experts = size("experts", 1, kMostExperts);
    run.experts_per_token = size("experts_per_token", 1, run.experts);
    run.dim = size("dim", 0, std::numeric_limits<std::int32_t>::max());
    const std::size_t all_ranks = size("ranks", 1, kMostRanks);
    run.hosts = file_.texts("/run", "hosts");
    run.devices = file_.texts("/run", "devices");
    run.clock_offset_ns = file_.int64s("/run", "clock_offset_ns");
    run.clock_error_ns = file_.int64s("/run", "clock_error_ns");
    run.rank_numbers = file_.int64s("/run", "rank_numbers");
    run.read_bandwidth = file_.doubles("/run", "read_bandwidth");
    run.expert_capacity = file_.int64s("/run", "expert_capacity");

    const std::size_t expert_ranks = run.rank_numbers.size();
    if (run.hosts.size() != all_ranks || run.devices.size() != all_ranks ||
        run.clock_offset_ns.size() != all_ranks || run.clock_error_ns.size() != all_ranks)
      fail(fmt::format("attributes of /run do not describe {} ranks (damaged file?)", all_ranks));
    if (expert_ranks == 0 || run.read_bandwidth.size() != expert_ranks ||
        run.expert_capacity.size() != expert_ranks)
      fail(fmt::format("attributes of /run do not describe {} expert ranks (damaged file?)", expert_ranks));
    for (const std::int64_t rank : run.rank_numbers)
      if (rank < 0 || static_cast<std::size_t>(rank) >= all_ranks)
        fail(fmt::format("rank number {} of {} ranks (damaged file?)", rank, all_ranks));
    profile_.blocks = run.blocks;
    profile_.experts = run.experts;
    profile_.ranks = expert_ranks;
  }

  std::string name(std::string_view group, std::string_view column) const {
    return fmt::format("{}/{}", group, column);
  }
  static std::string phase_column(Phase phase) { return fmt::format("{}_ns", phase_name(phase)); }

  /// Rows of a table whose other extents must be as given.
  std::uint64_t rows(const std::string& table, const std::vector<std::uint64_t>& row_shape) const {
    if (!file_.has(table)) fail(fmt::format("{} is missing (damaged file?)", table));
    const std::vector<std::uint64_t> shape = file_.shape(table);
    if (shape.size() != row_shape.size() + 1 ||
        !std::equal(row_shape.begin(), row_shape.end(), shape.begin() + 1))
      fail(fmt::format("{} has shape [{}] after the rows, expected [{}]", table,
                       fmt::join(shape.begin() + (shape.empty() ? 0 : 1), shape.end(), ", "),
                       fmt::join(row_shape, ", ")));
    return shape[0];
  }

  /// Reads as many of `rows` rows as can be read; shortens `rows` by chunks until that works.
  std::vector<std::int64_t> read_numbers(const std::string& table, std::uint64_t& rows,
                                         std::uint64_t chunk) const {
    for (;;) {
      try {
        return file_.read_int64(table, rows);
      } catch (const UsageError&) {
        if (rows == 0) throw;
        rows = (rows - 1) / chunk * chunk;
      }
    }
  }

  void read_steps() {
    struct Table {
      std::string name;
      std::vector<std::uint64_t> row_shape;
      std::vector<std::int64_t>* target;
    };
    const std::uint64_t blocks = profile_.blocks, ranks = profile_.ranks;
    std::vector<Table> tables;
    for (std::size_t i = 0; i < kStepColumns.size(); ++i)
      tables.push_back({name("/steps", kStepColumns[i].name), {}, &profile_.step_columns[i]});
    for (const Phase phase : step_phases())
      tables.push_back(
          {name("/steps", phase_column(phase)), {}, &profile_.step_phases[static_cast<std::size_t>(phase)]});
    for (std::size_t i = 0; i < kLayerColumns.size(); ++i)
      tables.push_back({name("/layers", kLayerColumns[i].name), {blocks}, &profile_.layer_columns[i]});
    for (const Phase phase : layer_phases())
      tables.push_back({name("/layers", phase_column(phase)),
                        {blocks},
                        &profile_.layer_phases[static_cast<std::size_t>(phase)]});
    for (std::size_t i = 0; i < kRankColumns.size(); ++i)
      tables.push_back({name("/ranks", kRankColumns[i].name), {blocks, ranks}, &profile_.rank_columns[i]});

    // A writer that was killed in the middle of a write has extended some tables and not others, or extended
    // a table whose last chunk is not there yet.
    std::uint64_t steps = std::numeric_limits<std::uint64_t>::max();
    for (const Table& table : tables) steps = std::min(steps, rows(table.name, table.row_shape));
    for (const Table& table : tables)
      *table.target = read_numbers(table.name, steps, ProfileFile::kChunkSteps);
    // … or left rows of fill: every step that ran took time.
    const auto& total = profile_.step_columns[static_cast<std::size_t>(StepColumn::Total)];
    while (steps > 0 && total[steps - 1] <= 0) --steps;
    if (steps == 0) fail("empty run: no step was recorded");
    for (const Table& table : tables) {
      std::uint64_t elements = steps;
      for (const std::uint64_t extent : table.row_shape) elements *= extent;
      table.target->resize(elements);
    }
    profile_.steps = steps;
    for (std::size_t s = 0; s < steps; ++s)
      if (const std::int64_t kind = profile_.step(StepColumn::Kind, s);
          kind < 0 || kind >= static_cast<std::int64_t>(kStepKindNames.size()))
        fail(fmt::format("kind {} of step {} does not exist (damaged file?)", kind, s));
  }

  std::vector<std::int64_t> expert_array(const std::string& array) const {
    if (rows(array, {profile_.experts}) != profile_.blocks)
      fail(fmt::format("{} does not hold {} blocks", array, profile_.blocks));
    return file_.read_int64(array, profile_.blocks);
  }

  void read_experts() {
    profile_.counts = expert_array("/experts/counts");
    profile_.even_counts = expert_array("/experts/counts_even_steps");
    profile_.owners = expert_array("/experts/owner");
    for (const std::int64_t owner : profile_.owners)
      if (owner < -1 || owner >= static_cast<std::int64_t>(profile_.ranks))
        fail(fmt::format("owner {} among {} expert ranks (damaged file?)", owner, profile_.ranks));
    for (std::size_t i = 0; i < profile_.counts.size(); ++i) {
      if (profile_.even_counts[i] < 0) fail("negative expert count (damaged file?)");
      // The arrays are written one after the other, which a reader of a running program may see.
      profile_.counts[i] = std::max(profile_.counts[i], profile_.even_counts[i]);
    }
  }

  void read_routes() {
    Profile::Routes& routes = profile_.routes;
    routes.width = profile_.run.experts_per_token;
    std::uint64_t entries = std::numeric_limits<std::uint64_t>::max();
    for (const char* column : {"/routes/step", "/routes/layer", "/routes/row"})
      entries = std::min(entries, rows(column, {}));
    for (const char* column : {"/routes/ids", "/routes/weights"})
      entries = std::min(entries, rows(column, {routes.width}));
    const auto read = [&](const char* column) {
      return read_numbers(column, entries, ProfileFile::kChunkRoutes);
    };
    routes.step = read("/routes/step");
    routes.layer = read("/routes/layer");
    routes.row = read("/routes/row");
    routes.ids = read("/routes/ids");
    routes.weights = file_.read_float("/routes/weights", entries);
    // Entries of steps that are not there, and rows of fill (no entry is without experts), belong to a killed
    // writer.
    const std::int64_t last_step = profile_.step(StepColumn::Step, profile_.steps - 1);
    while (entries > 0 &&
           (routes.step[entries - 1] > last_step || routes.ids[(entries - 1) * routes.width] < 0 ||
            routes.weights[(entries - 1) * routes.width] == 0.0f))
      --entries;
    for (auto* column : {&routes.step, &routes.layer, &routes.row}) column->resize(entries);
    routes.ids.resize(entries * routes.width);
    routes.weights.resize(entries * routes.width);
    for (const std::int64_t layer : routes.layer)
      if (layer < 0 || layer >= static_cast<std::int64_t>(profile_.blocks))
        fail(fmt::format("route in block {} of {}", layer, profile_.blocks));
    for (const std::int64_t expert : routes.ids)
      if (expert < -1 || expert >= static_cast<std::int64_t>(profile_.experts))
        fail(fmt::format("route to expert {} of {}", expert, profile_.experts));
  }

  std::string path_;
  hdf5::Reader file_;
  Profile profile_;
};

}  // namespace

Profile read_profile(const std::filesystem::path& path) {
  // A program that is writing may be in the middle of it, for about a millisecond.
  constexpr int attempts = 4;
  for (int attempt = 1;; ++attempt) {
    try {
      return ProfileReader(path).read();
    } catch (const UsageError&) {
      if (attempt == attempts) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

}  // namespace dsv41
