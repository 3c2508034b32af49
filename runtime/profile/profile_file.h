// The profile as a file being written: what is known at start, then batches of steps (schema.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/profile/hdf5_file.h"
#include "runtime/profile/schema.h"

namespace dsv41 {

/// What is known when the run starts: the attributes of /run. Vectors over "all ranks" are in communicator
/// order.
struct RunInfo {
  std::string program_version, command_line, config, transport, placement;
  std::string start_time;  // ISO 8601, UTC
  std::int64_t clock_zero_ns =
      0;  // rank 0's monotonic clock at the start of the run; all times count from it
  std::uint32_t layers = 0, blocks = 0, experts = 0, experts_per_token = 0, dim = 0;
  std::vector<std::string> hosts, devices;    // all ranks
  std::vector<std::int64_t> clock_offset_ns;  // all ranks: rank 0's clock minus the rank's clock
  std::vector<std::int64_t> clock_error_ns;   // all ranks: bound of the offset's error
  std::vector<std::int64_t> rank_numbers;     // of the rank axis of /ranks: communicator ranks
  std::vector<double> read_bandwidth;         // rank axis: bytes/s that memory delivered at start; 0: unknown
  std::vector<std::int64_t>
      expert_capacity;  // rank axis: experts of all blocks that stay resident; 0: all fit
  std::vector<std::vector<std::int64_t>> owners;  // [blocks][experts]: rank axis index; empty: unknown
};

/// Rows of one write. Arrays are [steps, …] of the column's type, in the order of schema.h: the group's
/// columns, then its phases.
struct ProfileBatch {
  std::uint64_t steps = 0;
  std::vector<const void*> step_columns, layer_columns, rank_columns;
  std::uint64_t routes = 0;  // (step, layer, row) with the experts of that row
  const std::int64_t* route_step = nullptr;
  const std::uint32_t* route_layer = nullptr;
  const std::uint32_t* route_row = nullptr;
  const std::int32_t* route_ids = nullptr;    // [routes, experts per token], -1 where a block chooses fewer
  const float* route_weights = nullptr;       // the same shape
  const std::int64_t* counts = nullptr;       // [blocks, experts] since the start of the run
  const std::int64_t* even_counts = nullptr;  // those of steps with an even number
};

class ProfileFile {
 public:
  /// Steps are written this many at a time, until the last ones.
  static constexpr std::uint64_t kChunkSteps = 8;
  /// Rows per chunk of /routes, the one compressed group. Batches hold multiples of it until the last one: a
  /// compressed chunk that is written a second time moves, and a kill in between would lose it.
  static constexpr std::uint64_t kChunkRoutes = 256;

  /// Creates the file, before anything is loaded. UsageError or ResourceError: the path cannot be written.
  explicit ProfileFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t clock_zero_ns() const { return clock_zero_ns_; }

  /// Writes what is known before the first step and creates the tables. Throws ResourceError.
  void start(const RunInfo& run, bool routes);
  /// Adds steps and flushes. Throws ResourceError; after that the file must only be destroyed.
  void write(const ProfileBatch& batch);
  void close();

 private:
  hdf5::Writer::Table add(const std::string& group, const Column& column,
                          std::vector<std::uint64_t> row_shape, std::uint64_t chunk_rows, bool compress);
  hdf5::Writer::Table add_array(const std::string& name, const RunInfo& run, std::string_view meaning);
  void check_space(const ProfileBatch& batch) const;

  std::filesystem::path path_;
  std::int64_t clock_zero_ns_ = 0;
  std::uint64_t step_bytes_ = 0, route_bytes_ = 0;  // uncompressed
  hdf5::Writer file_;
  std::vector<hdf5::Writer::Table> step_tables_, layer_tables_, rank_tables_, route_tables_;
  hdf5::Writer::Table counts_ = 0, even_counts_ = 0;
};

/// Columns of phases in the order in which batches hold them after kStepColumns / kLayerColumns.
std::vector<Phase> step_phases();
std::vector<Phase> layer_phases();

}  // namespace dsv41
