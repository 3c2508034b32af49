// Runs steps of a synthetic model, its experts in this process or on other ranks, and says where their time
// went.
#pragma once

#include <array>
#include <memory>
#include <random>
#include <vector>

#include "benchmarks/synthetic_model.h"
#include "runtime/backbone.h"
#include "runtime/drafter.h"
#include "runtime/exchange/communicator.h"
#include "runtime/placement.h"
#include "runtime/profile/recorder.h"

namespace dsv41::bench {

/// What one step or one draft cost.
struct StepCost {
  double seconds = 0;
  std::array<double, kPhases> phase_s{};
  double expert_bytes = 0;  // of expert matrices, on all ranks
};

/// Experts on ranks 1 … of a communicator; all of them use the same options.
struct ExpertRanks {
  Communicator& communicator;
  Placement placement;  // cyclic

  ExpertRanks(Communicator& ranks, const ModelConfig& config);
  /// On rank 0.
  std::unique_ptr<Experts> experts(const ModelConfig& config, std::size_t max_rows) const;
  /// On the others: serves until the host closes its experts.
  void serve(const ModelConfig& config, ExpertSource& source, Compute& compute, std::size_t max_rows) const;
};

class StepRunner {
 public:
  /// model and ranks must outlive the runner; without ranks the experts are the model's own.
  StepRunner(SyntheticModel& model, const Options& options, std::size_t threads, std::size_t max_rows,
             std::size_t sequences, const ExpertRanks* ranks = nullptr);
  /// Ends the expert ranks' part; after a failure the runner's end does it, and says so to them.
  void close() { experts_->close(ExitCode::Ok); }

  Compute& compute() { return compute_; }
  Backbone& backbone() { return *backbone_; }
  Drafter& drafter() { return *drafter_; }
  bool drafts() const { return drafter_ != nullptr; }

  Sequence sequence(std::uint32_t context) const;
  /// `count` random tokens.
  std::vector<std::uint32_t> tokens(std::size_t count);
  /// One forward pass; sequences advance.
  StepCost forward(const Step& step, StepKind kind);
  /// Seeds the draft stages from the last forward pass and drafts for every sequence of `step`.
  StepCost draft(const Step& step);
  /// Bytes per second of the read loop on the runner's threads, over at least `bytes` > 0 that the steps
  /// leave cold.
  double read_rate(double bytes);

 private:
  StepCost since(const ProfileTotals& before, StepKind kind) const;

  SyntheticModel& model_;
  Compute compute_;
  Recorder recorder_;
  ModelContext context_;
  std::unique_ptr<EngramRows> rows_;
  std::unique_ptr<Experts> experts_;
  std::unique_ptr<Backbone> backbone_;
  std::unique_ptr<Drafter> drafter_;
  std::mt19937_64 engine_{7};
  std::uint64_t number_ = 0;
  std::size_t read_at_ = 0;
};

/// {"attention": ms, …} of the phases that took any time.
Json phases_json(const StepCost& cost);

}  // namespace dsv41::bench
