#include "benchmarks/step_runner.h"

#include "runtime/expert_rank.h"
#include "runtime/profile/profile_file.h"

namespace dsv41::bench {

ExpertRanks::ExpertRanks(Communicator& ranks, const ModelConfig& config)
    : communicator(ranks),
      placement(Placement::make("cyclic", config, static_cast<std::uint32_t>(ranks.size() - 1))) {}

std::unique_ptr<Experts> ExpertRanks::experts(const ModelConfig& config, std::size_t max_rows) const {
  auto experts = remote_experts(communicator, placement, ExpertGeometry::of(config),
                                ExpertLimits::of(config, static_cast<std::uint32_t>(max_rows)));
  experts->await_ready({});
  return experts;
}

void ExpertRanks::serve(const ModelConfig& config, ExpertSource& source, Compute& compute,
                        std::size_t max_rows) const {
  run_expert_rank(communicator, placement, source, compute,
                  ExpertLimits::of(config, static_cast<std::uint32_t>(max_rows)));
}

StepRunner::StepRunner(SyntheticModel& model, const Options& options, std::size_t threads,
                       std::size_t max_rows, std::size_t sequences, const ExpertRanks* ranks)
    : model_(model),
      compute_(find_backend(options.backend.c_str()), threads),
      recorder_({model.config().n_blocks(),
                 std::max(model.config().n_routed_experts, model.config().dspark_n_routed_experts),
                 std::max(model.config().n_activated_experts, model.config().dspark_n_activated_experts),
                 ranks != nullptr ? ranks->placement.ranks() : 1, static_cast<std::uint32_t>(max_rows),
                 false}),
      context_{model.config(), model.weights(), compute_, max_rows, nullptr, &recorder_},
      rows_(model.engram_rows()),
      experts_(ranks != nullptr
                   ? ranks->experts(model.config(), max_rows)
                   : local_experts(model.experts(), compute_,
                                   ExpertLimits::of(model.config(), static_cast<std::uint32_t>(max_rows)))),
      backbone_(std::make_unique<Backbone>(context_, model.token_map(), *experts_, *rows_)) {
  const std::size_t room = max_rows / std::max(model.config().dspark_block_size, 1u);
  if (model.weights().draft && std::min(room, sequences) > 0)
    drafter_ = std::make_unique<Drafter>(context_, *experts_, std::min(room, sequences));
}

Sequence StepRunner::sequence(std::uint32_t context) const {
  Sequence sequence(model_.config());
  model_.fill(sequence, context);
  experts_->keep_alive();
  return sequence;
}

std::vector<std::uint32_t> StepRunner::tokens(std::size_t count) {
  std::vector<std::uint32_t> out(count);
  for (std::uint32_t& token : out) token = static_cast<std::uint32_t>(engine_() % model_.config().vocab_size);
  return out;
}

StepCost StepRunner::forward(const Step& step, StepKind kind) {
  const ProfileTotals before = recorder_.totals();
  recorder_.begin_step(kind, ++number_, static_cast<std::uint32_t>(step.rows()));
  backbone_->forward(step);
  recorder_.end_step({});
  return since(before, kind);
}

StepCost StepRunner::draft(const Step& step) {
  const ProfileTotals before = recorder_.totals();
  std::vector<DraftSource::Ask> asks;
  for (const Segment& segment : step.segments) asks.push_back({segment.sequence, tokens(1)[0], {}});
  recorder_.begin_step(StepKind::Mixed, ++number_, static_cast<std::uint32_t>(asks.size()));
  {
    PhaseTimer timer(&recorder_, Phase::Draft);
    drafter_->seed(step, backbone_->main_hidden());
    drafter_->draft(number_, asks);
  }
  recorder_.end_step({});
  return since(before, StepKind::Mixed);
}

StepCost StepRunner::since(const ProfileTotals& before, StepKind kind) const {
  const auto& now = recorder_.totals().kinds[static_cast<std::size_t>(kind)];
  const auto& then = before.kinds[static_cast<std::size_t>(kind)];
  StepCost cost;
  cost.seconds = static_cast<double>(now.total_ns - then.total_ns) * 1e-9;
  for (std::size_t phase = 0; phase < kPhases; ++phase)
    cost.phase_s[phase] = static_cast<double>(now.phase_ns[phase] - then.phase_ns[phase]) * 1e-9;
  for (std::size_t rank = 0; rank < before.ranks.size(); ++rank)
    cost.expert_bytes += static_cast<double>(recorder_.totals().ranks[rank].bytes_read) -
                         static_cast<double>(before.ranks[rank].bytes_read);
  return cost;
}

double StepRunner::read_rate(double bytes) {
  const Buffer& codes = model_.codes();
  const std::size_t pass = std::min<std::size_t>(codes.size(), std::size_t{512} << 20);
  double seconds = 0, read = 0;
  for (; read < bytes; read += static_cast<double>(pass), read_at_ += pass) {
    if (read_at_ + pass > codes.size()) read_at_ = 0;
    seconds +=
        static_cast<double>(pass) / bench::read_rate(compute_.threads(), codes.data() + read_at_, pass);
  }
  return read / seconds;
}

Json phases_json(const StepCost& cost) {
  Json out;
  for (std::size_t phase = 0; phase < kPhases; ++phase)
    if (cost.phase_s[phase] > 0) out[std::string(kPhaseInfo[phase].name)] = cost.phase_s[phase] * 1e3;
  return out;
}

}  // namespace dsv41::bench
