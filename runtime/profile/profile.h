// A profile in memory, as dsv41-profile reads it (schema.h says what the columns mean).
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/profile/profile_file.h"
#include "runtime/profile/schema.h"

namespace dsv41 {

struct Profile {
  std::string path;
  RunInfo run;
  std::size_t steps = 0, blocks = 0, ranks = 0, experts = 0;  // ranks: those that own experts

  std::array<std::vector<std::int64_t>, kStepColumns.size()> step_columns;    // [steps]
  std::array<std::vector<std::int64_t>, kPhases> step_phases;                 // [steps]
  std::array<std::vector<std::int64_t>, kLayerColumns.size()> layer_columns;  // [steps, blocks]
  std::array<std::vector<std::int64_t>, kPhases> layer_phases;  // [steps, blocks]; empty where not in layers
  std::array<std::vector<std::int64_t>, kRankColumns.size()> rank_columns;  // [steps, blocks, ranks]
  std::vector<std::int64_t> counts, even_counts;                            // [blocks, experts]
  std::vector<std::int64_t> owners;  // [blocks, experts]; -1: no such expert

  struct Routes {
    std::size_t width = 0;                            // experts per token
    std::vector<std::int64_t> step, layer, row, ids;  // ids: [entries, width]
    std::vector<float> weights;                       // [entries, width]
  } routes;                                           // empty without --profile-routes

  std::int64_t step(StepColumn column, std::size_t s) const {
    return step_columns[static_cast<std::size_t>(column)][s];
  }
  std::int64_t phase_ns(Phase phase, std::size_t s) const {
    return step_phases[static_cast<std::size_t>(phase)][s];
  }
  std::int64_t layer(LayerColumn column, std::size_t s, std::size_t block) const {
    return layer_columns[static_cast<std::size_t>(column)][s * blocks + block];
  }
  std::int64_t layer_phase_ns(Phase phase, std::size_t s, std::size_t block) const {
    const auto& column = layer_phases[static_cast<std::size_t>(phase)];
    return column.empty() ? 0 : column[s * blocks + block];
  }
  std::int64_t rank(RankColumn column, std::size_t s, std::size_t block, std::size_t r) const {
    return rank_columns[static_cast<std::size_t>(column)][(s * blocks + block) * ranks + r];
  }
  /// Whether the rank had a request in this block of this step.
  bool asked(std::size_t s, std::size_t block, std::size_t r) const {
    return rank(RankColumn::Replied, s, block, r) >= 0;
  }
  StepKind kind(std::size_t s) const { return static_cast<StepKind>(step(StepColumn::Kind, s)); }
  /// Communicator rank of a position on the rank axis, and what to add to that rank's times.
  std::size_t communicator_rank(std::size_t r) const { return static_cast<std::size_t>(run.rank_numbers[r]); }
  std::int64_t clock_offset_ns(std::size_t r) const { return run.clock_offset_ns[communicator_rank(r)]; }
};

/// Reads a profile, also one that is being written or whose writer was killed: all tables are cut to the
/// steps that every one of them holds. Throws UsageError with one line: not HDF5, not a profile, damaged,
/// newer schema, no steps.
Profile read_profile(const std::filesystem::path& path);

}  // namespace dsv41
