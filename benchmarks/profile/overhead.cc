// What profiling costs: decoding steps of one run in one process, every other one with the recorder, writes
// included; then the recorder alone at the size of the released model.
//   profile_overhead [CHECKPOINT [STEPS]]
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "loader/checkpoint.h"
#include "runtime/experts.h"
#include "runtime/host_model.h"
#include "runtime/profile/profile_file.h"
#include "runtime/profile/recorder.h"
#include "runtime/sampler.h"

namespace dsv41 {
namespace {

/// CPU time of this process: what a busy machine does not disturb.
double cpu_us() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

RunInfo run_info(std::uint32_t blocks, std::uint32_t experts, std::uint32_t per_token, std::uint32_t ranks) {
  RunInfo run;
  run.clock_zero_ns = profile_clock_ns();
  run.layers = run.blocks = blocks;
  run.experts = experts;
  run.experts_per_token = per_token;
  run.hosts.assign(ranks + 1, "host");
  run.devices.assign(ranks + 1, "cpu");
  run.clock_offset_ns.assign(ranks + 1, 0);
  run.clock_error_ns.assign(ranks + 1, 0);
  run.read_bandwidth.assign(ranks, 0);
  run.expert_capacity.assign(ranks, 0);
  for (std::uint32_t r = 0; r < ranks; ++r) run.rank_numbers.push_back(r + 1);
  return run;
}

std::unique_ptr<Recorder> make_recorder(const std::string& path, const RunInfo& run, bool routes) {
  auto file = std::make_unique<ProfileFile>(path);
  file->start(run, routes);
  RecorderShape shape;
  shape.blocks = run.blocks;
  shape.experts = run.experts;
  shape.experts_per_token = run.experts_per_token;
  shape.ranks = static_cast<std::uint32_t>(run.rank_numbers.size());
  shape.max_rows = 512;
  shape.routes = routes;
  return std::make_unique<Recorder>(shape, std::move(file));
}

void decode(const std::filesystem::path& directory, std::size_t steps, const std::string& path) {
  const Checkpoint checkpoint(directory);
  const ModelConfig& config = checkpoint.config();
  Compute compute(find_backend("auto"), 1);
  HostModel model(checkpoint, compute, 16);
  const auto source = checkpoint_experts(checkpoint);
  const auto experts = local_experts(*source, compute, ExpertLimits::of(config, 16));
  Backbone& backbone = model.connect(*experts);
  const auto recorder = make_recorder(
      path,
      run_info(config.n_blocks(), std::max(config.n_routed_experts, config.dspark_n_routed_experts),
               std::max(config.n_activated_experts, config.dspark_n_activated_experts), 1),
      false);

  Sequence sequence(config);
  Sampler sampler;
  Step step;
  std::uint32_t id = 0;
  // Without, with, with, without, …: what the machine does meanwhile disturbs both alike, and so does the
  // compressor, which closes a group of two tokens at every other step.
  std::vector<double> on, off, ends;
  for (std::size_t i = 0; i < steps; ++i) {
    Recorder* const active = i % 4 == 1 || i % 4 == 2 ? recorder.get() : nullptr;
    model.record(active);
    const double begin = cpu_us();
    step.clear();
    ++step.number;
    if (active) active->begin_step(StepKind::Decode, step.number, 1);
    step.add(sequence, {&id, 1}, 1);
    const auto logits = backbone.forward(step);
    {
      PhaseTimer timer(active, Phase::Sampling);
      id = sampler.sample(logits, {}, sequence.length() - 1);
    }
    const double end = cpu_us();
    (active ? on : off).push_back(end - begin);
    if (!active) continue;
    active->end_step({1});
    ends.push_back(cpu_us() - end);
  }
  // Writes are in the end of few steps. Their number follows the time of the run, half of which is without.
  const double without = median(off), recording = median(on) - without, end = median(ends);
  const double writes =
      (std::accumulate(ends.begin(), ends.end(), 0.0) / static_cast<double>(ends.size()) - end) / 2;
  fmt::print(
      "decode {}: {:.1f} us per step; with a profile {:+.1f} us recording, {:+.1f} us end of step, {:+.1f} "
      "us writes: "
      "{:+.2f} %; {} steps, CPU time\n",
      directory.filename().string(), without, recording, end, writes,
      100 * (recording + end + writes) / without, steps);
}

/// Every call of a decoding step of the released model with this many expert ranks, without the model.
void recorder_alone(std::uint32_t ranks, bool routes, const std::string& path) {
  constexpr std::uint32_t blocks = 43, experts = 384, per_token = 6;
  constexpr std::uint64_t steps = 640;
  const auto recorder = make_recorder(path, run_info(blocks, experts, per_token, ranks), routes);
  std::vector<RankReport> reports(ranks);
  std::vector<Route> chosen(per_token);
  std::uint64_t state = 1;
  const auto random = [&] {
    return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33;
  };
  double total = 0, in_steps = 0;
  const double begin = cpu_us();
  double written = 0;
  for (std::uint64_t step = 0; step < steps; ++step) {
    const double before = cpu_us();
    recorder->begin_step(StepKind::Decode, step, 1);
    for (std::uint32_t block = 0; block < blocks; ++block) {
      BlockTimer in_block(recorder.get(), block);
      for (int i = 0; i < 9; ++i) PhaseTimer timer(recorder.get(), static_cast<Phase>(3 + i % 8));
      for (std::uint32_t i = 0; i < per_token; ++i)
        chosen[i] = {0, static_cast<std::uint32_t>(i * 64 + random() % 64),
                     static_cast<float>(random() % 1000) / 1000};
      recorder->routes(block, chosen);
      for (std::uint32_t r = 0; r < ranks; ++r) {
        const auto now = static_cast<std::uint64_t>(profile_clock_ns());
        reports[r] = {r + 1,
                      1,
                      1,
                      5400,
                      10400,
                      now,
                      now + random() % 400'000,
                      {now + random() % 20'000, random() % 500'000, random() % 5'000, random() % 300'000,
                       random() % 5'000, 18'000'000, 1, 1, 0}};
      }
      recorder->exchange(block, reports);
    }
    const double measured = cpu_us();
    in_steps += measured - before;
    recorder->end_step({1});
    written += cpu_us() - measured;
  }
  recorder->close();
  total = cpu_us() - begin;
  fmt::print(
      "released shape, {} expert ranks{}: {:.1f} us per step ({:.1f} recording, {:.1f} end of step and its "
      "share of writes), {:.1f} kB per step on disk\n",
      ranks, routes ? ", routes" : "", total / steps, in_steps / steps, written / steps,
      static_cast<double>(std::filesystem::file_size(path)) / steps / 1e3);
}

}  // namespace
}  // namespace dsv41

int main(int argc, char** argv) {
  const std::filesystem::path directory = argc > 1 ? argv[1] : "tests/checkpoints/capitals";
  const std::size_t steps = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 4000;
  const std::string path = (std::filesystem::temp_directory_path() / "profile_overhead.h5").string();
  dsv41::decode(directory, steps, path);
  for (const std::uint32_t ranks : {1u, 4u, 8u}) dsv41::recorder_alone(ranks, false, path);
  dsv41::recorder_alone(8, true, path);
  std::filesystem::remove(path);
}
