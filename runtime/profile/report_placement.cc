// Placements balanced on measured counts (reports.h). The file format is that of runtime/placement.h.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "loader/error.h"
#include "runtime/profile/rank_speeds.h"
#include "runtime/profile/reports.h"

namespace dsv41 {
namespace {

using Owners =
    std::vector<std::vector<std::size_t>>;  // [blocks][experts of the block]: position on the rank axis

class Balancer {
 public:
  explicit Balancer(const Profile& profile)
      : profile_(profile), ranks_(profile.ranks), speeds_(rank_speeds(profile)) {
    for (std::size_t block = 0; block < profile.blocks; ++block) {
      std::size_t experts = 0;
      while (experts < profile.experts && profile.owners[block * profile.experts + experts] >= 0) ++experts;
      experts_.push_back(experts > 0 ? experts : profile.experts);
    }
  }

  const std::vector<double>& speeds() const { return speeds_; }

  Owners by_rule(bool cyclic) const {
    Owners owners;
    for (const std::size_t experts : experts_) {
      const std::size_t per_rank = (experts + ranks_ - 1) / ranks_;
      auto& row = owners.emplace_back(experts);
      for (std::size_t e = 0; e < experts; ++e) row[e] = cyclic ? e % ranks_ : e / per_rank;
    }
    return owners;
  }

  Owners as_run() const {
    Owners owners;
    for (std::size_t block = 0; block < experts_.size(); ++block)
      for (auto& row = owners.emplace_back(experts_[block]); std::size_t & owner : row)
        owner = static_cast<std::size_t>(std::max<std::int64_t>(
            0, profile_.owners[block * profile_.experts + static_cast<std::size_t>(&owner - row.data())]));
    return owners;
  }

  Owners balanced(const std::vector<std::int64_t>& counts) const {
    Owners owners;
    for (std::size_t block = 0; block < experts_.size(); ++block)
      owners.push_back(balance_block(std::span(counts).subspan(block * profile_.experts, experts_[block])));
    return owners;
  }

  /// Sum over blocks of the time of the slowest rank over that of a perfect spread.
  double imbalance(const Owners& owners, const std::vector<std::int64_t>& counts) const {
    double slowest = 0, perfect = 0;
    std::vector<double> load(ranks_);
    for (std::size_t block = 0; block < experts_.size(); ++block) {
      std::fill(load.begin(), load.end(), 0);
      for (std::size_t e = 0; e < experts_[block]; ++e)
        load[owners[block][e]] += static_cast<double>(counts[block * profile_.experts + e]);
      add(load, slowest, perfect);
    }
    return perfect > 0 ? slowest / perfect : 1;
  }

  /// The same step by step, over steps with an odd number, from recorded routes.
  double imbalance_per_step(const Owners& owners) const {
    const Profile::Routes& routes = profile_.routes;
    double slowest = 0, perfect = 0;
    std::vector<double> load(ranks_, 0);
    for (std::size_t entry = 0; entry < routes.step.size(); ++entry) {
      if (routes.step[entry] % 2 == 0) continue;
      const auto block = static_cast<std::size_t>(routes.layer[entry]);
      for (std::size_t i = 0; i < routes.width; ++i) {
        const std::int64_t expert = routes.ids[entry * routes.width + i];
        if (expert >= 0 && static_cast<std::size_t>(expert) < experts_[block])
          load[owners[block][static_cast<std::size_t>(expert)]] += 1;
      }
      const bool last = entry + 1 == routes.step.size() || routes.step[entry + 1] != routes.step[entry] ||
                        routes.layer[entry + 1] != routes.layer[entry];
      if (!last) continue;
      add(load, slowest, perfect);
      std::fill(load.begin(), load.end(), 0);
    }
    return perfect > 0 ? slowest / perfect : 1;
  }

 private:
  void add(const std::vector<double>& load, double& slowest, double& perfect) const {
    double most = 0;
    for (std::size_t r = 0; r < ranks_; ++r) most = std::max(most, load[r] / speeds_[r]);
    slowest += most;
    perfect +=
        std::accumulate(load.begin(), load.end(), 0.0) / std::accumulate(speeds_.begin(), speeds_.end(), 0.0);
  }

  /// Most experts of one block per rank.
  std::vector<std::size_t> capacities(std::size_t experts) const {
    std::vector<std::size_t> result(ranks_, (experts + ranks_ - 1) / ranks_);
    const auto& given = profile_.run.expert_capacity;
    const std::int64_t sum = std::accumulate(given.begin(), given.end(), std::int64_t{0});
    if (std::any_of(given.begin(), given.end(), [](std::int64_t capacity) { return capacity <= 0; }))
      return result;
    // Room for all experts of all blocks: each block gets its part. Less room than that: shares in
    // proportion.
    const double all = static_cast<double>(std::accumulate(experts_.begin(), experts_.end(), std::size_t{0}));
    const double per_block = static_cast<double>(experts) / std::min(all, static_cast<double>(sum));
    for (std::size_t r = 0; r < ranks_; ++r)
      result[r] = static_cast<std::size_t>(static_cast<double>(given[r]) * per_block);
    for (std::size_t r = 0; std::accumulate(result.begin(), result.end(), std::size_t{0}) < experts;
         r = (r + 1) % ranks_)
      ++result[r];  // what rounding down left over
    return result;
  }

  /// Largest counts first, each to the rank that would finish it first; then exchanges while they lower the
  /// slowest.
  std::vector<std::size_t> balance_block(std::span<const std::int64_t> counts) const {
    const std::vector<std::size_t> capacity = capacities(counts.size());
    std::vector<std::size_t> order(counts.size()), owner(counts.size()), held(ranks_, 0);
    std::vector<double> load(ranks_, 0);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return counts[a] > counts[b]; });
    for (const std::size_t e : order) {
      std::size_t best = ranks_;
      const auto finish = [&](std::size_t r) {
        return (load[r] + static_cast<double>(counts[e])) / speeds_[r];
      };
      for (std::size_t r = 0; r < ranks_; ++r) {
        if (held[r] >= capacity[r]) continue;
        if (best == ranks_ || finish(r) < finish(best) || (finish(r) == finish(best) && held[r] < held[best]))
          best = r;
      }
      owner[e] = best;
      ++held[best];
      load[best] += static_cast<double>(counts[e]);
    }
    while (improve(counts, owner, load)) {
    }
    return owner;
  }

  /// One exchange of two experts that lowers the time of the slowest rank, if there is one.
  bool improve(std::span<const std::int64_t> counts, std::vector<std::size_t>& owner,
               std::vector<double>& load) const {
    std::size_t slowest = 0;
    for (std::size_t r = 1; r < ranks_; ++r)
      if (load[r] / speeds_[r] > load[slowest] / speeds_[slowest]) slowest = r;
    double best_time = load[slowest] / speeds_[slowest] * (1 - 1e-9);
    std::size_t give = counts.size(), take = counts.size();
    for (std::size_t mine = 0; mine < counts.size(); ++mine) {
      if (owner[mine] != slowest) continue;
      for (std::size_t other = 0; other < counts.size(); ++other) {
        if (owner[other] == slowest || counts[other] >= counts[mine]) continue;
        const double moved = static_cast<double>(counts[mine] - counts[other]);
        const double time = std::max((load[slowest] - moved) / speeds_[slowest],
                                     (load[owner[other]] + moved) / speeds_[owner[other]]);
        if (time >= best_time) continue;
        best_time = time;
        give = mine;
        take = other;
      }
    }
    if (give == counts.size()) return false;
    const double moved = static_cast<double>(counts[give] - counts[take]);
    load[slowest] -= moved;
    load[owner[take]] += moved;
    std::swap(owner[give], owner[take]);
    return true;
  }

  const Profile& profile_;
  std::size_t ranks_;
  std::vector<double> speeds_;
  std::vector<std::size_t> experts_;  // of each block
};

}  // namespace

PlacementReport balanced_placement(const Profile& profile) {
  std::vector<std::int64_t> odd(profile.counts.size());
  std::transform(profile.counts.begin(), profile.counts.end(), profile.even_counts.begin(), odd.begin(),
                 std::minus<>());
  const auto sum = [](const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  if (profile.ranks < 2)
    throw UsageError(
        fmt::format("{}: only one rank has experts, so there is nothing to place", profile.path));
  if (sum(profile.even_counts) == 0 || sum(odd) == 0)
    throw UsageError(
        fmt::format("{}: {} steps are too few to fit a placement on one half and score it on the other",
                    profile.path, profile.steps));

  const Balancer balancer(profile);
  const Owners balanced = balancer.balanced(profile.even_counts);
  PlacementReport report;
  const bool per_step = !profile.routes.step.empty();
  report.text = fmt::format(
      "imbalance (slowest rank / mean) on the steps with odd numbers; fitted on those with even numbers\n  "
      "{:<24}{:>10}{}\n",
      "placement", "counts", per_step ? "  step by step" : "");
  const auto line = [&](std::string_view name, const Owners& owners) {
    report.text += fmt::format("  {:<24}{:>10.3f}", name, balancer.imbalance(owners, odd));
    if (per_step) report.text += fmt::format("{:>14.3f}", balancer.imbalance_per_step(owners));
    report.text += '\n';
  };
  line("contiguous", balancer.by_rule(false));
  line("cyclic", balancer.by_rule(true));
  line(fmt::format("as run ({})", profile.run.placement), balancer.as_run());
  line("balanced", balanced);
  if (const auto& speeds = balancer.speeds();
      std::any_of(speeds.begin(), speeds.end(), [](double speed) { return speed != 1; }))
    report.text += fmt::format("  relative speed of the ranks: {:.2f}\n", fmt::join(speeds, " "));

  nlohmann::ordered_json json;
  json["ranks"] = profile.ranks;
  json["blocks"] = balanced;
  report.json = json.dump() + "\n";
  return report;
}

}  // namespace dsv41
