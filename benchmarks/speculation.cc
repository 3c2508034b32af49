// dsv41-bench speculation: what drafting and verifying cost at full geometry, and from which acceptance on
// they pay. Weights are noise, so acceptance is simulated: every draft agrees with probability p.
#include <cmath>
#include <cstdio>

#include "benchmarks/step_runner.h"

namespace dsv41::bench {
namespace {

/// Tokens per step when each of `drafts` drafts in turn agrees with probability p.
double expected_tokens(double p, std::size_t drafts) {
  double tokens = 1, reach = 1;
  for (std::size_t i = 0; i < drafts; ++i) tokens += reach *= p;
  return tokens;
}

/// The smallest p for which a step of `cost` seconds is no slower than serial steps; above 1: none.
double break_even(double cost, double serial, std::size_t drafts) {
  if (expected_tokens(1, drafts) * serial < cost) return 2;
  double low = 0, high = 1;
  for (int i = 0; i < 50; ++i) {
    const double p = (low + high) / 2;
    (expected_tokens(p, drafts) * serial < cost ? low : high) = p;
  }
  return high;
}

struct Costs {
  std::vector<double> step_s;  // [drafts]: a step of 1 + drafts rows per sequence
  double draft_s = 1e300;      // seeding and drafting
};

Costs measure(StepRunner& runner, std::size_t sequences, std::uint32_t context, std::size_t drafts,
              double seconds) {
  Costs costs{std::vector<double>(drafts + 1, 1e300)};
  std::vector<Sequence> states;
  for (std::size_t i = 0; i < sequences; ++i) states.push_back(runner.sequence(context));
  const auto start = Clock::now();
  for (int round = 0; round < 3 || seconds_since(start) < seconds; ++round)
    for (std::size_t count = 0; count <= drafts; ++count) {
      Step step;
      for (Sequence& state : states) step.add(state, runner.tokens(1 + count), 1 + count);
      costs.step_s[count] = std::min(costs.step_s[count], runner.forward(step, StepKind::Decode).seconds);
      costs.draft_s = std::min(costs.draft_s, runner.draft(step).seconds);
      for (Sequence& state : states) state.rollback(context);
    }
  return costs;
}

/// Steps with rollback and simulated agreement, as the scheduler runs them; tokens per second.
double rehearse(StepRunner& runner, std::uint32_t context, std::size_t drafts, double p, double seconds) {
  std::mt19937_64 engine(11);
  std::uniform_real_distribution<double> draw(0, 1);
  Sequence state = runner.sequence(context);
  double tokens = 0, spent = 0;
  while (spent < seconds) {
    Step step;
    step.add(state, runner.tokens(1 + drafts), 1 + drafts);
    spent += runner.forward(step, StepKind::Decode).seconds;
    std::size_t accepted = 0;
    while (accepted < drafts && draw(engine) < p) ++accepted;
    tokens += static_cast<double>(1 + accepted);
    state.rollback(state.length() - static_cast<std::uint32_t>(drafts - accepted));
    spent += runner.draft(step).seconds;
  }
  return tokens / spent;
}

}  // namespace

Json run_speculation(const Options& options) {
  SyntheticModel model(options.config, options.pool_mib << 20);
  if (!model.weights().draft) throw std::invalid_argument("the config has no draft stages");
  const std::size_t drafts = model.config().dspark_block_size;
  Json results = Json::array();
  for (const std::size_t threads : thread_counts(options))
    for (const std::size_t sequences : options.sequences) {
      const auto context = static_cast<std::uint32_t>(options.contexts.front());
      StepRunner runner(model, options, threads, sequences * (drafts + 1), sequences);
      const Costs costs = measure(runner, sequences, context, drafts, options.seconds);
      const double serial = costs.step_s[0];
      Json lengths = Json::array();
      for (std::size_t count = 1; count <= drafts; ++count) {
        const double cost = costs.step_s[count] + costs.draft_s;
        Json speed;
        for (const double p : {0.5, 0.6, 0.7, 0.8, 0.9})
          speed[std::to_string(p).substr(0, 3)] = expected_tokens(p, count) * serial / cost;
        const double even = break_even(cost, serial, count);
        std::fprintf(
            stderr,
            "sequences %zu  drafts %zu  step %7.1f ms (serial %7.1f)  draft %6.1f ms  break-even p %.2f\n",
            sequences, count, costs.step_s[count] * 1e3, serial * 1e3, costs.draft_s * 1e3, even);
        lengths.push_back({{"drafts", count},
                           {"step_ms", costs.step_s[count] * 1e3},
                           {"break_even_acceptance", even > 1 ? Json(nullptr) : Json(even)},
                           {"times_serial_by_acceptance", speed}});
      }
      Json result{{"threads", threads},
                  {"sequences", sequences},
                  {"context", context},
                  {"serial_step_ms", serial * 1e3},
                  {"draft_ms", costs.draft_s * 1e3},
                  {"lengths", lengths}};
      if (sequences == 1) {
        const double rate = rehearse(runner, context, drafts, 0.8, std::max(5.0, options.seconds));
        std::fprintf(stderr, "all %zu drafts, p 0.8, with rollback: %.2f tokens/s, serial %.2f\n", drafts,
                     rate, 1 / serial);
        result["rehearsed_tokens_per_s_p0.8"] = rate;
        result["serial_tokens_per_s"] = 1 / serial;
      }
      results.push_back(std::move(result));
    }
  return results;
}

}  // namespace dsv41::bench
