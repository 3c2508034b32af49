// What the running program calls to be measured. Inside a step: clock reads and additions into buffers that
// were sized at start, no allocation, no system call. Between steps: every few of them a write to the
// profile, if there is one (docs/runtime.md, "HDF5 profile"). Used by the host's main thread only.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/experts.h"
#include "runtime/profile/schema.h"

namespace dsv41 {

class ProfileFile;

inline std::int64_t profile_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Sizes that are fixed for the run.
struct RecorderShape {
  std::uint32_t blocks = 0;             // backbone layers, then draft stages
  std::uint32_t experts = 0;            // the most of any block
  std::uint32_t experts_per_token = 0;  // the most of any block
  std::uint32_t ranks = 1;              // that own experts: N, or 1 when they are in this process
  std::uint32_t max_rows = 0;           // rows per step
  bool routes = false;                  // keep every route
};

/// What a step has led to: tokens added to the output, rows that were drafts, and drafts that agreed.
struct StepOutcome {
  std::uint32_t emitted = 0, drafted = 0, accepted = 0;
};

/// Sums over the run, for the summary at its end.
struct ProfileTotals {
  struct Kind {
    std::uint64_t steps = 0, tokens = 0, emitted = 0;
    std::int64_t total_ns = 0;
    std::array<std::int64_t, kPhases> phase_ns{};
  };
  std::array<Kind, kStepKindNames.size()> kinds;
  struct Rank {
    std::int64_t compute_ns = 0, wait_ns = 0, receive_ns = 0, send_ns = 0;
    std::uint64_t tokens = 0, routes = 0, cache_hits = 0, cache_misses = 0, bytes_read = 0, bytes_out = 0,
                  bytes_in = 0;
  };
  std::vector<Rank> ranks;
  /// Sums over all blocks of all steps of the slowest rank's compute time, and of the mean over ranks.
  double slowest_compute_ns = 0, mean_compute_ns = 0;
  double imbalance() const { return mean_compute_ns > 0 ? slowest_compute_ns / mean_compute_ns : 1; }
};

class Recorder {
 public:
  /// file: where to write, or nothing for totals only. The file's clock zero becomes the recorder's.
  /// warn: gets one line, once, if the file cannot be continued; the run goes on.
  explicit Recorder(const RecorderShape& shape, std::unique_ptr<ProfileFile> file = nullptr,
                    std::function<void(const std::string&)> warn = {});
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// A step lasts from its rows to the tokens chosen from it. One that an error ended is forgotten by the
  /// next one, or by flush().
  void begin_step(StepKind kind, std::uint64_t step, std::uint32_t tokens);
  void end_step(const StepOutcome& outcome);

  // What PhaseTimer and BlockTimer call. Phases nest: the inner one pauses the outer one.
  Phase enter(Phase phase) {
    if (!in_step_) return Phase::Other;
    charge(profile_clock_ns());
    return std::exchange(phase_, phase);
  }
  void leave(Phase outer) {
    if (!in_step_) return;
    charge(profile_clock_ns());
    phase_ = outer;
  }
  void enter_block(std::uint32_t block);
  void leave_block();

  /// The expert ranks' parts in a call of this block: Experts::reports() after finish().
  void exchange(std::uint32_t block, std::span<const RankReport> reports);
  /// Engram rows of the step at hand: asked for, distinct, of these in memory; bytes read for the others.
  void engram(std::uint64_t asked, std::uint64_t distinct, std::uint64_t cached, std::uint64_t bytes);
  /// Which experts the rows chose in this block, ordered by row. origins: the row of the step for each row
  /// that routes name; empty where they are the same.
  void routes(std::uint32_t block, std::span<const Route> routes,
              std::span<const std::uint32_t> origins = {});

  const ProfileTotals& totals() const { return totals_; }
  /// Writes what is buffered, as far as possible without throwing: at the end, and before the program is
  /// ended by a signal or a failure.
  void flush();
  /// flush(), then close the file.
  void close();

 private:
  struct Buffers;

  void charge(std::int64_t now) {
    cells_[static_cast<std::size_t>(phase_)] += now - mark_;
    mark_ = now;
  }
  void write(std::uint64_t steps, std::uint64_t routes);

  bool in_step_ = false;
  Phase phase_ = Phase::Other;
  std::int64_t mark_ = 0;          // when the running phase was last charged
  std::int64_t* cells_ = nullptr;  // phase times of the current block, or of what is outside blocks
  std::unique_ptr<Buffers> buffers_;
  ProfileTotals totals_;
};

// Timers of scopes. A null recorder costs a comparison.

/// Charges a scope to a phase: one line where the phase begins.
class PhaseTimer {
 public:
  PhaseTimer(Recorder* recorder, Phase phase) : recorder_(recorder) {
    if (recorder_) outer_ = recorder_->enter(phase);
  }
  ~PhaseTimer() {
    if (recorder_) recorder_->leave(outer_);
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  Recorder* recorder_;
  Phase outer_ = Phase::Other;
};

/// Charges a scope to a block (layer or draft stage). Blocks do not nest.
class BlockTimer {
 public:
  BlockTimer(Recorder* recorder, std::uint32_t block) : recorder_(recorder) {
    if (recorder_) recorder_->enter_block(block);
  }
  ~BlockTimer() {
    if (recorder_) recorder_->leave_block();
  }
  BlockTimer(const BlockTimer&) = delete;
  BlockTimer& operator=(const BlockTimer&) = delete;

 private:
  Recorder* recorder_;
};

}  // namespace dsv41
