// The sums behind report_summary.h; printing is in report_text.cc.
#include "runtime/profile/report_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace dsv41 {
namespace {

constexpr std::size_t kStepKinds = kStepKindNames.size();

double ratio(double numerator, double denominator) {
  return denominator > 0 ? numerator / denominator : 0;
}

KindSummary summarize_kind(const Profile& profile, StepKind kind, const std::vector<std::size_t>& steps) {
  KindSummary summary;
  summary.kind = kind;
  std::vector<std::int64_t> values;
  const auto collect = [&](auto&& value_of) {
    values.clear();
    for (const std::size_t s : steps) values.push_back(value_of(s));
    return distribution(values);
  };
  summary.step = collect([&](std::size_t s) { return profile.step(StepColumn::Total, s); });
  for (const std::size_t s : steps) {
    summary.tokens += static_cast<std::uint64_t>(profile.step(StepColumn::Tokens, s));
    summary.emitted += static_cast<std::uint64_t>(profile.step(StepColumn::Emitted, s));
    summary.drafted += static_cast<std::uint64_t>(profile.step(StepColumn::Drafted, s));
    summary.accepted += static_cast<std::uint64_t>(profile.step(StepColumn::Accepted, s));
  }
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    const auto time = collect([&](std::size_t s) { return profile.step_phases[phase][s]; });
    if (time.sum == 0) continue;
    summary.phases.push_back({static_cast<Phase>(phase), time,
                              ratio(static_cast<double>(time.sum), static_cast<double>(summary.step.sum))});
  }
  const bool count_emitted = kind != StepKind::Prefill && summary.emitted > 0;
  summary.tokens_per_second = ratio(static_cast<double>(count_emitted ? summary.emitted : summary.tokens),
                                    static_cast<double>(summary.step.sum) * 1e-9);
  return summary;
}

std::vector<LayerSummary> summarize_layers(const Profile& profile) {
  double all_steps = 0;
  for (std::size_t s = 0; s < profile.steps; ++s)
    all_steps += static_cast<double>(profile.step(StepColumn::Total, s));
  std::vector<LayerSummary> layers;
  for (std::size_t block = 0; block < profile.blocks; ++block) {
    LayerSummary layer;
    layer.block = block;
    std::vector<std::int64_t> values;
    std::array<double, kPhases> phase_sums{};
    for (std::size_t s = 0; s < profile.steps; ++s) {
      if (profile.layer(LayerColumn::Start, s, block) < 0) continue;
      values.push_back(profile.layer(LayerColumn::Total, s, block));
      for (std::size_t phase = 0; phase < kPhases; ++phase)
        phase_sums[phase] += static_cast<double>(profile.layer_phase_ns(static_cast<Phase>(phase), s, block));
    }
    layer.time = distribution(values);
    if (layer.time.count == 0) continue;
    layer.share = ratio(static_cast<double>(layer.time.sum), all_steps);
    const auto largest = std::max_element(phase_sums.begin(), phase_sums.end());
    layer.largest = static_cast<Phase>(largest - phase_sums.begin());
    layer.largest_share = ratio(*largest, static_cast<double>(layer.time.sum));
    layers.push_back(layer);
  }
  std::stable_sort(layers.begin(), layers.end(),
                   [](const LayerSummary& a, const LayerSummary& b) { return a.time.sum > b.time.sum; });
  return layers;
}

/// One request as it lies on rank 0's clock.
struct Exchange {
  std::int64_t sent, received, computed, replied;
};
Exchange exchange_of(const Profile& profile, std::size_t s, std::size_t block, std::size_t r) {
  Exchange exchange{};
  exchange.sent = profile.rank(RankColumn::Sent, s, block, r);
  exchange.replied = std::max(exchange.sent, profile.rank(RankColumn::Replied, s, block, r));
  // The correction has an error bound; a request cannot arrive before it was sent.
  exchange.received = std::clamp(profile.rank(RankColumn::Received, s, block, r) + profile.clock_offset_ns(r),
                                 exchange.sent, exchange.replied);
  exchange.computed =
      std::min(exchange.replied, exchange.received + profile.rank(RankColumn::Receive, s, block, r) +
                                     profile.rank(RankColumn::Compute, s, block, r));
  return exchange;
}

std::size_t last_to_reply(const Profile& profile, std::size_t s, std::size_t block) {
  std::size_t slowest = profile.ranks;
  for (std::size_t r = 0; r < profile.ranks; ++r)
    if (profile.asked(s, block, r) &&
        (slowest == profile.ranks || profile.rank(RankColumn::Replied, s, block, r) >
                                         profile.rank(RankColumn::Replied, s, block, slowest)))
      slowest = r;
  return slowest;
}

void summarize_ranks(const Profile& profile, Summary& summary) {
  const std::size_t blocks_of_steps = profile.steps * profile.blocks;
  std::vector<std::uint64_t> slowest(profile.ranks, 0);
  double compute_most = 0, compute_sum = 0, routes_most = 0, routes_sum = 0;
  std::uint64_t exchanges = 0;
  for (std::size_t s = 0; s < profile.steps; ++s)
    for (std::size_t block = 0; block < profile.blocks; ++block) {
      std::int64_t compute = 0, routes = 0;
      for (std::size_t r = 0; r < profile.ranks; ++r) {
        compute = std::max(compute, profile.rank(RankColumn::Compute, s, block, r));
        routes = std::max(routes, profile.rank(RankColumn::Routes, s, block, r));
        compute_sum += static_cast<double>(profile.rank(RankColumn::Compute, s, block, r));
        routes_sum += static_cast<double>(profile.rank(RankColumn::Routes, s, block, r));
      }
      compute_most += static_cast<double>(compute);
      routes_most += static_cast<double>(routes);
      if (const std::size_t last = last_to_reply(profile, s, block); last < profile.ranks) {
        ++slowest[last];
        ++exchanges;
      }
    }
  const double ranks = static_cast<double>(profile.ranks);
  if (compute_sum > 0) summary.compute_imbalance = compute_most / (compute_sum / ranks);
  if (routes_sum > 0) summary.routes_imbalance = routes_most / (routes_sum / ranks);

  for (std::size_t r = 0; r < profile.ranks; ++r) {
    RankSummary rank;
    rank.rank = profile.communicator_rank(r);
    rank.host = profile.run.hosts[rank.rank];
    rank.device = profile.run.devices[rank.rank];
    std::vector<std::int64_t> request, receive, compute, reply, wait;
    request.reserve(blocks_of_steps);
    for (std::size_t s = 0; s < profile.steps; ++s)
      for (std::size_t block = 0; block < profile.blocks; ++block) {
        if (!profile.asked(s, block, r)) continue;
        const Exchange exchange = exchange_of(profile, s, block, r);
        request.push_back(exchange.received - exchange.sent);
        receive.push_back(profile.rank(RankColumn::Receive, s, block, r));
        compute.push_back(profile.rank(RankColumn::Compute, s, block, r));
        reply.push_back(exchange.replied - exchange.computed);
        wait.push_back(profile.rank(RankColumn::Wait, s, block, r));
        const auto count = [&](RankColumn column) {
          return static_cast<std::uint64_t>(profile.rank(column, s, block, r));
        };
        rank.routes += count(RankColumn::Routes);
        rank.cache_hits += count(RankColumn::CacheHits);
        rank.cache_misses += count(RankColumn::CacheMisses);
        rank.bytes_read += count(RankColumn::BytesRead);
        rank.bytes_out += count(RankColumn::BytesOut);
        rank.bytes_in += count(RankColumn::BytesIn);
      }
    rank.requests = request.size();
    rank.request = distribution(request);
    rank.receive = distribution(receive);
    rank.compute = distribution(compute);
    rank.reply = distribution(reply);
    rank.wait = distribution(wait);
    rank.gigabytes_per_second =
        ratio(static_cast<double>(rank.bytes_read), static_cast<double>(rank.compute.sum));
    rank.measured_gigabytes_per_second = profile.run.read_bandwidth[r] * 1e-9;
    rank.slowest_share = ratio(static_cast<double>(slowest[r]), static_cast<double>(exchanges));
    summary.messages = summary.messages || rank.rank != 0;
    summary.ranks.push_back(rank);
  }
}

/// The time that the host waits for replies is charged to what the last rank to reply was doing meanwhile.
CriticalPath critical_path(const Profile& profile, bool messages) {
  std::array<double, kPhases> phases{};
  double request = 0, compute = 0, reply = 0, total = 0;
  for (std::size_t s = 0; s < profile.steps; ++s) {
    total += static_cast<double>(profile.step(StepColumn::Total, s));
    for (std::size_t phase = 0; phase < kPhases; ++phase)
      phases[phase] += static_cast<double>(profile.step_phases[phase][s]);
    for (std::size_t block = 0; messages && block < profile.blocks; ++block) {
      const std::size_t last = last_to_reply(profile, s, block);
      if (last == profile.ranks) continue;
      const Exchange exchange = exchange_of(profile, s, block, last);
      const std::int64_t waited = profile.layer_phase_ns(Phase::ExchangeWait, s, block);
      const std::int64_t from = std::max(exchange.sent, exchange.replied - waited);
      const auto overlap = [&](std::int64_t begin, std::int64_t end) {
        return static_cast<double>(std::max<std::int64_t>(0, end - std::max(begin, from)));
      };
      const double parts[] = {overlap(exchange.sent, exchange.received),
                              overlap(exchange.received, exchange.computed),
                              overlap(exchange.computed, exchange.replied)};
      request += parts[0];
      compute += parts[1];
      reply += parts[2];
      phases[static_cast<std::size_t>(Phase::ExchangeWait)] -= parts[0] + parts[1] + parts[2];
    }
  }
  CriticalPath path;
  const auto add = [&](std::string name, double ns) {
    if (ns > 0) path.parts.push_back({std::move(name), ratio(ns, total)});
  };
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    std::string name = fmt::format("host: {}", kPhaseInfo[phase].name);
    if (messages && static_cast<Phase>(phase) == Phase::ExchangeWait) name = "host: adding replies";
    add(std::move(name), phases[phase]);
  }
  add("request on the way to the slowest rank", request);
  add("slowest rank: experts", compute);
  add("reply on the way from the slowest rank", reply);
  std::stable_sort(
      path.parts.begin(), path.parts.end(),
      [](const CriticalPath::Part& a, const CriticalPath::Part& b) { return a.share > b.share; });
  return path;
}

}  // namespace

Summary summarize(const Profile& profile) {
  Summary summary;
  for (std::size_t kind = 0; kind < kStepKinds; ++kind) {
    std::vector<std::size_t> steps;
    for (std::size_t s = 0; s < profile.steps; ++s)
      if (profile.kind(s) == static_cast<StepKind>(kind)) steps.push_back(s);
    if (!steps.empty()) summary.kinds.push_back(summarize_kind(profile, static_cast<StepKind>(kind), steps));
  }
  summary.layers = summarize_layers(profile);
  summarize_ranks(profile, summary);
  summary.critical_path = critical_path(profile, summary.messages);
  return summary;
}

Profile select_steps(const Profile& profile, std::size_t first, std::size_t last) {
  Profile result = profile;
  result.steps = last - first + 1;
  const auto cut = [&](std::vector<std::int64_t>& column, std::size_t width) {
    if (column.empty()) return;
    column.erase(column.begin() + static_cast<std::ptrdiff_t>((last + 1) * width), column.end());
    column.erase(column.begin(), column.begin() + static_cast<std::ptrdiff_t>(first * width));
  };
  for (auto& column : result.step_columns) cut(column, 1);
  for (auto& column : result.step_phases) cut(column, 1);
  for (auto& column : result.layer_columns) cut(column, profile.blocks);
  for (auto& column : result.layer_phases) cut(column, profile.blocks);
  for (auto& column : result.rank_columns) cut(column, profile.blocks * profile.ranks);
  return result;
}

}  // namespace dsv41
