// Start of a profile (profiling.h).
#include "tools/profiling.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr int kClockTag = 4;  // after those of exchange/messages.h

/// Bytes per second that all threads together read from memory: the best of a few passes over more than the
/// caches hold.
double measure_read_bandwidth(ThreadPool& threads) {
  constexpr std::size_t least = std::size_t{64} << 20, most = std::size_t{512} << 20,
                        block = std::size_t{1} << 16;
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const std::size_t bytes = std::clamp(2 * static_cast<std::size_t>(std::max(0L, cache)), least, most);
  std::vector<std::uint64_t> memory(bytes / sizeof(std::uint64_t), 1);
  std::int64_t fastest = 0;
  std::atomic<std::uint64_t> total{0};
  for (int pass = 0; pass < 3; ++pass) {
    const std::int64_t begin = profile_clock_ns();
    threads.parallel_for(bytes / block, 1, [&](Range range) {
      std::uint64_t sums[8] = {};  // independent, so that additions do not limit the reads
      const std::size_t end = range.end * block / sizeof(std::uint64_t);
      for (std::size_t i = range.begin * block / sizeof(std::uint64_t); i < end; i += 8)
        for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += memory[i + lane];
      std::uint64_t sum = 0;
      for (const std::uint64_t lane : sums) sum += lane;
      total.fetch_add(sum, std::memory_order_relaxed);
    });
    const std::int64_t time = std::max<std::int64_t>(1, profile_clock_ns() - begin);
    fastest = pass == 0 ? time : std::min(fastest, time);
  }
  return total.load() == 0 ? 0 : static_cast<double>(bytes) * 1e9 / static_cast<double>(fastest);
}

std::string command_line() {
  std::string text;
  if (std::FILE* file = std::fopen("/proc/self/cmdline", "rb")) {
    for (int c = 0; (c = std::fgetc(file)) != EOF;) text += c == 0 ? ' ' : static_cast<char>(c);
    std::fclose(file);
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

std::string config_summary(const ModelConfig& config) {
  return fmt::format(
      "{} layers, {} draft stages, dim {}, {} heads of {}, {} experts of {}, {} per token, window {}, "
      "index top {}, vocabulary {}",
      config.n_layers, config.n_mtp_layers, config.dim, config.n_heads, config.head_dim,
      config.n_routed_experts, config.moe_inter_dim, config.n_activated_experts, config.window_size,
      config.index_topk, config.vocab_size);
}

}  // namespace

RankMachine measure_machine(Communicator& communicator, Compute& compute) {
  RankMachine machine;
  machine.clocks = relate_clocks(communicator, kClockTag, profile_clock_ns);
  communicator.barrier();
  const double bandwidth = measure_read_bandwidth(compute.threads());
  for (const std::string& text : communicator.gather(fmt::format("{}", bandwidth), 0))
    machine.read_bandwidth.push_back(std::strtod(text.c_str(), nullptr));
  return machine;
}

std::unique_ptr<Recorder> start_recorder(const Options& options, const Communicator& communicator,
                                         const Checkpoint& checkpoint,
                                         const std::optional<Placement>& placement,
                                         const std::vector<StartReport>& reports, const RankMachine& machine,
                                         std::unique_ptr<ProfileFile> file) {
  const ModelConfig& config = checkpoint.config();
  RunInfo run;
  run.program_version = DSV41_VERSION;
  run.command_line = command_line();
  run.config = config_summary(config);
  run.transport = communicator.transport();
  run.placement = placement ? placement->name() : "in this process";
  run.start_time = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  run.clock_zero_ns = profile_clock_ns();
  run.layers = config.n_layers;
  run.blocks = config.n_blocks();
  run.experts =
      std::max(config.n_routed_experts, config.n_mtp_layers > 0 ? config.dspark_n_routed_experts : 0);
  run.experts_per_token =
      std::max(config.n_activated_experts, config.n_mtp_layers > 0 ? config.dspark_n_activated_experts : 0);
  run.dim = config.dim;
  for (const StartReport& report : reports) {
    run.hosts.push_back(report.host);
    run.devices.push_back(report.device);
  }
  for (const ClockRelation& clock : machine.clocks) {
    run.clock_offset_ns.push_back(clock.offset_ns);
    run.clock_error_ns.push_back(clock.error_ns);
  }
  const std::uint32_t expert_ranks = placement ? placement->ranks() : 1;
  for (std::uint32_t r = 0; r < expert_ranks; ++r) {
    const std::uint32_t rank = placement ? r + 1 : 0;
    run.rank_numbers.push_back(rank);
    run.read_bandwidth.push_back(machine.read_bandwidth[rank]);
    run.expert_capacity.push_back(static_cast<std::int64_t>(reports[rank].resident_experts));
  }
  for (std::uint32_t block = 0; block < run.blocks; ++block)
    for (auto& owners = run.owners.emplace_back(); owners.size() < config.experts_of(block);)
      owners.push_back(placement ? placement->owner(block, static_cast<std::uint32_t>(owners.size())) : 0);
  try {
    file->start(run, options.profile_routes);
  } catch (const ResourceError& error) {  // a full disk stops the profile, not the run
    fmt::print(stderr, "dsv41-mpi: no profile: {}\n", error.what());
    return nullptr;
  }

  RecorderShape shape;
  shape.blocks = run.blocks;
  shape.experts = run.experts;
  shape.experts_per_token = run.experts_per_token;
  shape.ranks = expert_ranks;
  shape.max_rows = static_cast<std::uint32_t>(options.step_rows());
  shape.routes = options.profile_routes;
  return std::make_unique<Recorder>(
      shape, std::move(file), [](const std::string& line) { fmt::print(stderr, "dsv41-mpi: {}\n", line); });
}

}  // namespace dsv41
