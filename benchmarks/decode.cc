// dsv41-bench decode: whole decode steps at full geometry, by context length, number of sequences and rows,
// beside the time that their bytes take at the read bandwidth of the same run. Under mpirun rank 0 is the
// host and the others hold the experts; --threads is for each rank, and the bandwidth the host's. Several
// rows then run both whole and in halves (runtime/overlap.h).
#include <cstdio>
#include <optional>

#include "benchmarks/step_runner.h"

namespace dsv41::bench {
namespace {

struct Case {
  std::uint32_t context;
  std::size_t sequences, rows;  // rows of each sequence: the pending token and drafts
  bool halves;
};

Json measure(StepRunner& runner, const SyntheticModel& model, const Options& options, const Case& c) {
  runner.backbone().set_overlap(c.halves ? Overlap::Mode::Always : Overlap::Mode::Never);
  std::vector<Sequence> sequences;
  for (std::size_t i = 0; i < c.sequences; ++i) sequences.push_back(runner.sequence(c.context));
  StepCost best;
  best.seconds = 1e300;
  std::vector<double> times;
  double read = 0,
         bytes = 0;  // bandwidth is measured over as many bytes as a step's: it varies within a step
  const auto start = Clock::now();
  for (std::size_t i = 0; i < 4 || seconds_since(start) < options.seconds; ++i) {
    Step step;
    for (Sequence& sequence : sequences) step.add(sequence, runner.tokens(c.rows), c.rows);
    const StepCost cost = runner.forward(step, StepKind::Decode);
    for (Sequence& sequence : sequences) sequence.rollback(c.context);
    if (i == 0) continue;  // sizes buffers
    bytes = model.host_bytes().layers + model.host_bytes().head + cost.expert_bytes;
    read = std::max(read, runner.read_rate(bytes));
    times.push_back(cost.seconds);
    if (cost.seconds < best.seconds) best = cost;
  }
  std::sort(times.begin(), times.end());
  bytes = model.host_bytes().layers + model.host_bytes().head + best.expert_bytes;
  const double limit = bytes / read, rows = static_cast<double>(c.sequences * c.rows);
  std::fprintf(stderr, "context %8u  sequences %2zu  rows %zu  %s  %8.1f ms  %5.2f x limit  %7.2f rows/s\n",
               c.context, c.sequences, c.rows, c.halves ? "halves" : "whole ", best.seconds * 1e3,
               best.seconds / limit, rows / best.seconds);
  return {{"context", c.context},
          {"sequences", c.sequences},
          {"rows_per_sequence", c.rows},
          {"in_halves", c.halves},
          {"best_ms", best.seconds * 1e3},
          {"median_ms", times[times.size() / 2] * 1e3},
          {"repetitions", times.size()},
          {"host_weight_bytes", bytes - best.expert_bytes},
          {"expert_bytes", best.expert_bytes},
          {"read_bytes_per_s", read},
          {"limit_ms", limit * 1e3},
          {"times_limit", best.seconds / limit},
          {"rows_per_s", rows / best.seconds},
          {"state_bytes_per_sequence", sequences[0].bytes()},
          {"phases_ms", phases_json(best)}};
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
