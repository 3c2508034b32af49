// dsv41-bench decode: whole decode steps at full geometry, by context length, number of sequences and rows,
// beside the time that their bytes take at the read bandwidth of the same run. Under mpirun rank 0 is the
// host and the others hold the experts; --threads is for each rank, and the bandwidth the host's. Several
// rows then run both whole and in halves (runtime/overlap.h).
#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "benchmarks/step_runner.h"

namespace dsv41::bench {
namespace {

struct Case {
  std::uint32_t context;
  std::size_t sequences, rows;  // rows of each sequence: the pending token and drafts
  bool halves;
};

struct Sample {
  StepCost cost;
  double bytes, limit;  // of the step; seconds that reading as many bytes takes
  double times_limit() const { return cost.seconds / limit; }
};

/// Every step stands between two readings of as many bytes, since memory may change its speed from one second
/// to the next. The figures are those of the step with the median ratio.
Json measure(StepRunner& runner, const SyntheticModel& model, const Options& options, const Case& c) {
  runner.backbone().set_overlap(c.halves ? Overlap::Mode::Always : Overlap::Mode::Never);
  std::vector<Sequence> sequences;
  for (std::size_t i = 0; i < c.sequences; ++i) sequences.push_back(runner.sequence(c.context));
  std::vector<Sample> samples;
  double seconds_per_byte = 0, best_seconds = 1e300;
  const auto start = Clock::now();
  for (std::size_t i = 0; i < 4 || seconds_since(start) < options.seconds; ++i) {
    Step step;
    for (Sequence& sequence : sequences) step.add(sequence, runner.tokens(c.rows), c.rows);
    const StepCost cost = runner.forward(step, StepKind::Decode);
    for (Sequence& sequence : sequences) sequence.rollback(c.context);
    const double bytes = model.host_bytes().layers + model.host_bytes().head + cost.expert_bytes;
    const double before = std::exchange(seconds_per_byte, 1 / runner.read_rate(bytes));
    if (i == 0) continue;  // sizes buffers
    samples.push_back({cost, bytes, bytes * (before + seconds_per_byte) / 2});
    best_seconds = std::min(best_seconds, cost.seconds);
  }
  std::sort(samples.begin(), samples.end(),
            [](const Sample& a, const Sample& b) { return a.times_limit() < b.times_limit(); });
  const Sample& median = samples[samples.size() / 2];
  const double rows = static_cast<double>(c.sequences * c.rows);
  std::fprintf(
      stderr,
      "context %8u  sequences %2zu  rows %zu  %s  %8.1f ms beside %.1f GB/s: %5.2f x limit  %7.2f rows/s\n",
      c.context, c.sequences, c.rows, c.halves ? "halves" : "whole ", median.cost.seconds * 1e3,
      median.bytes / median.limit / 1e9, median.times_limit(), rows / median.cost.seconds);
  return {{"context", c.context},
          {"sequences", c.sequences},
          {"rows_per_sequence", c.rows},
          {"in_halves", c.halves},
          {"ms", median.cost.seconds * 1e3},
          {"best_ms", best_seconds * 1e3},
          {"repetitions", samples.size()},
          {"host_weight_bytes", median.bytes - median.cost.expert_bytes},
          {"expert_bytes", median.cost.expert_bytes},
          {"read_bytes_per_s", median.bytes / median.limit},
          {"limit_ms", median.limit * 1e3},
          {"times_limit", median.times_limit()},
          {"rows_per_s", rows / median.cost.seconds},
          {"state_bytes_per_sequence", sequences[0].bytes()},
          {"phases_ms", phases_json(median.cost)}};
}

}  // namespace

Json run_decode(const Options& options) {
  const ModelConfig config = read_config(options.config);
  std::unique_ptr<Communicator> communicator;
  std::optional<ExpertRanks> ranks;
  if (started_by_launcher()) communicator = make_mpi_communicator();
  if (communicator && communicator->size() > 1) ranks.emplace(*communicator, config);
  std::size_t most_rows = 0, most_sequences = 0;
  std::vector<Case> cases;
  const auto rows = options.rows.empty() ? std::vector<std::size_t>{1} : options.rows;
  for (const std::size_t context : options.contexts)
    for (const std::size_t sequences : options.sequences)
      for (const std::size_t count : rows) {
        if (context == 0 || context + count > config.max_positions())
          throw std::invalid_argument("--contexts " + std::to_string(context) + " is outside of the model's");
        cases.push_back({static_cast<std::uint32_t>(context), sequences, count, false});
        if (ranks && sequences * count > 1) cases.push_back(cases.back()), cases.back().halves = true;
        most_rows = std::max(most_rows, sequences * count);
        most_sequences = std::max(most_sequences, sequences);
      }

  if (ranks && communicator->rank() > 0) {
    const auto source = synthetic_experts(config, options.pool_mib << 20);
    for (const std::size_t threads : thread_counts(options)) {
      Compute compute(find_backend(options.backend.c_str()), threads);
      ranks->serve(config, *source, compute, most_rows);
    }
    return nullptr;
  }
  SyntheticModel model(options.config, options.pool_mib << 20, !ranks);
  Json results = Json::array();
  for (const std::size_t threads : thread_counts(options)) {
    StepRunner runner(model, options, threads, most_rows, most_sequences, ranks ? &*ranks : nullptr);
    for (const Case& c : cases) {
      Json result = measure(runner, model, options, c);
      result["threads"] = threads;
      result["expert_ranks"] = ranks ? ranks->placement.ranks() : 0;
      results.push_back(std::move(result));
    }
    runner.close();
  }
  return results;
}

}  // namespace dsv41::bench
