// Speeds of ranks by median polish (rank_speeds.h). A call's time depends on how many experts and rows it
// has, and ranks get different calls when the load is uneven: time per row would call the loaded rank the
// fast one. So calls are compared with calls of the same kind: log time = kind + rank, fitted with medians,
// which a call that lost its core for a while does not move.
#include "runtime/profile/rank_speeds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

namespace dsv41 {
namespace {

/// Speeds that differ by less are taken for noise.
constexpr double kNoise = 1.15;
constexpr int kSweeps = 10;

struct Call {
  std::size_t rank;
  double log_time;
};
using Kind = std::array<std::int64_t, 3>;  // requests, experts, (token, expert) pairs

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Calls by kind; kinds that only one rank had say nothing about its speed.
std::vector<std::vector<Call>> comparable_calls(const Profile& profile) {
  std::map<Kind, std::vector<Call>> by_kind;
  for (std::size_t s = 0; s < profile.steps; ++s)
    for (std::size_t block = 0; block < profile.blocks; ++block)
      for (std::size_t r = 0; r < profile.ranks; ++r) {
        const auto value = [&](RankColumn column) { return profile.rank(column, s, block, r); };
        const std::int64_t time = value(RankColumn::Compute);
        if (value(RankColumn::Routes) <= 0 || time <= 0) continue;
        by_kind[{value(RankColumn::Requests), value(RankColumn::Experts), value(RankColumn::Routes)}]
            .push_back({r, std::log(static_cast<double>(time))});
      }
  std::vector<std::vector<Call>> result;
  for (auto& [kind, calls] : by_kind)
    if (std::any_of(calls.begin(), calls.end(), [&](const Call& c) { return c.rank != calls[0].rank; }))
      result.push_back(std::move(calls));
  return result;
}

}  // namespace

std::vector<double> rank_speeds(const Profile& profile) {
  const std::size_t ranks = profile.ranks;
  const std::vector<double> equal(ranks, 1);
  const auto kinds = comparable_calls(profile);
  std::vector<double> slowness(ranks, 0), values;  // logarithms
  std::vector<std::vector<double>> of_rank(ranks);
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (auto& rests : of_rank) rests.clear();
    for (const auto& calls : kinds) {
      values.clear();
      for (const Call& call : calls) values.push_back(call.log_time - slowness[call.rank]);
      const double kind = median(values);
      for (const Call& call : calls) of_rank[call.rank].push_back(call.log_time - kind);
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      if (of_rank[r].empty()) return equal;  // nothing to compare this rank with
      slowness[r] = median(of_rank[r]);
    }
  }
  std::vector<double> speeds;
  for (const double logarithm : slowness) speeds.push_back(std::exp(-logarithm));
  const auto [least, most] = std::minmax_element(speeds.begin(), speeds.end());
  if (*most < *least * kNoise) return equal;
  const double mean = std::accumulate(speeds.begin(), speeds.end(), 0.0) / static_cast<double>(ranks);
  for (double& speed : speeds) speed /= mean;
  return speeds;
}

}  // namespace dsv41
