#include "tests/runtime/profile/support/made_profile.h"

namespace dsv41 {

Profile made_profile(std::size_t steps) {
  constexpr std::size_t blocks = 2, ranks = 2, experts = 6;
  constexpr std::int64_t us = 1000, skew = 5'000'000;  // the clock of rank 2 is 5 ms behind
  Profile profile;
  profile.path = "made.h5";
  RunInfo& run = profile.run;
  run.program_version = "1.0";
  run.command_line = "dsv41-mpi";
  run.placement = "cyclic";
  run.transport = "none";
  run.hosts = {"a", "a", "b"};
  run.devices = {"cpu", "cpu", "cpu"};
  run.clock_offset_ns = {0, 0, skew};
  run.clock_error_ns = {0, 100, 200};
  run.rank_numbers = {1, 2};
  run.read_bandwidth = {2e9, 0};
  run.expert_capacity = {0, 0};
  run.layers = run.blocks = blocks;
  run.experts = experts;
  run.experts_per_token = 2;
  profile.steps = steps;
  profile.blocks = blocks;
  profile.ranks = ranks;
  profile.experts = experts;
  for (auto& column : profile.step_columns) column.assign(steps, 0);
  for (auto& column : profile.step_phases) column.assign(steps, 0);
  for (auto& column : profile.layer_columns) column.assign(steps * blocks, 0);
  for (const Phase phase : layer_phases())
    profile.layer_phases[static_cast<std::size_t>(phase)].assign(steps * blocks, 0);
  for (auto& column : profile.rank_columns) column.assign(steps * blocks * ranks, 0);
  profile.counts.assign(blocks * experts, 0);
  profile.even_counts = profile.counts;
  for (std::size_t block = 0; block < blocks; ++block)
    for (std::size_t e = 0; e < experts; ++e) profile.owners.push_back(static_cast<std::int64_t>(e % ranks));

  for (std::size_t s = 0; s < steps; ++s) {
    const auto start = static_cast<std::int64_t>(s) * 1100 * us;
    step_cell(profile, StepColumn::Step, s) = static_cast<std::int64_t>(s);
    step_cell(profile, StepColumn::Kind, s) = s == 0 ? 0 : 1;
    step_cell(profile, StepColumn::Tokens, s) = s == 0 ? 10 : 1;
    step_cell(profile, StepColumn::Emitted, s) = 1;
    step_cell(profile, StepColumn::Start, s) = start;
    step_cell(profile, StepColumn::Total, s) = 1000 * us;
    phase_cell(profile, Phase::Head, s) = 200 * us;
    phase_cell(profile, Phase::Other, s) = 60 * us;
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::int64_t begin = start + static_cast<std::int64_t>(block) * 370 * us;
      const auto layer = [&](Phase phase, std::int64_t ns) {
        profile.layer_phases[static_cast<std::size_t>(phase)][s * blocks + block] = ns;
        phase_cell(profile, phase, s) += ns;
      };
      layer(Phase::Attention, 100 * us);
      layer(Phase::Routing, 20 * us);
      layer(Phase::SharedExpert, 50 * us);
      layer(Phase::ExchangeWait, 200 * us);
      profile.layer_columns[static_cast<std::size_t>(LayerColumn::Start)][s * blocks + block] = begin;
      profile.layer_columns[static_cast<std::size_t>(LayerColumn::Total)][s * blocks + block] = 370 * us;
      for (std::size_t r = 0; r < ranks; ++r) {
        const std::int64_t sent = begin + 120 * us, compute = r == 0 ? 200 * us : 100 * us;
        cell(profile, RankColumn::Sent, s, block, r) = sent;
        cell(profile, RankColumn::Received, s, block, r) = sent + 10 * us - (r == 1 ? skew : 0);
        cell(profile, RankColumn::Receive, s, block, r) = 5 * us;
        cell(profile, RankColumn::Compute, s, block, r) = compute;
        cell(profile, RankColumn::Replied, s, block, r) = sent + 10 * us + 5 * us + compute + 15 * us;
        cell(profile, RankColumn::Routes, s, block, r) = r == 0 ? 2 : 1;
        cell(profile, RankColumn::CacheHits, s, block, r) = 3;
        cell(profile, RankColumn::CacheMisses, s, block, r) = 1;
        cell(profile, RankColumn::BytesRead, s, block, r) = 200'000;
      }
    }
  }
  return profile;
}

}  // namespace dsv41
