// Reports on profiles with known numbers.
#include "runtime/profile/reports.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "loader/error.h"
#include "runtime/profile/report_summary.h"
#include "runtime/profile/statistics.h"
#include "tests/runtime/profile/support/made_profile.h"

namespace dsv41 {
namespace {

using testing::HasSubstr;
using testing::Not;

const PhaseSummary& phase(const KindSummary& kind, Phase wanted) {
  return *std::find_if(kind.phases.begin(), kind.phases.end(),
                       [&](const PhaseSummary& p) { return p.phase == wanted; });
}
double part(const Summary& summary, std::string_view name) {
  for (const auto& p : summary.critical_path.parts)
    if (p.name == name) return p.share;
  return 0;
}

TEST(Statistics, NearestRankPercentiles) {
  EXPECT_EQ(distribution({}).median, 0);
  std::vector<std::int64_t> values(100);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int64_t>(100 - i);
  const Distribution result = distribution(values);
  EXPECT_EQ(result.median, 50);
  EXPECT_EQ(result.p90, 90);
  EXPECT_EQ(result.max, 100);
  EXPECT_EQ(result.sum, 5050);
}

std::vector<std::int64_t> noisy(std::size_t count, std::int64_t level, std::int64_t noise) {
  std::vector<std::int64_t> values;
  std::uint64_t state = 12345 + static_cast<std::uint64_t>(level);
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    values.push_back(level + static_cast<std::int64_t>(state >> 33) % (2 * noise + 1) - noise);
  }
  return values;
}

struct DifferenceCase {
  std::size_t before, after;
  std::int64_t level, noise;
  bool enough, significant;
};
class Differences : public testing::TestWithParam<DifferenceCase> {};
TEST_P(Differences, AreCalledSignificantOnlyBeyondNoise) {
  const DifferenceCase& test = GetParam();
  const Difference result =
      difference(noisy(test.before, 100'000, test.noise), noisy(test.after, test.level, test.noise));
  EXPECT_EQ(result.enough, test.enough);
  EXPECT_EQ(result.probability < kSignificance, test.significant) << result.probability;
}
INSTANTIATE_TEST_SUITE_P(Cases, Differences,
                         testing::Values(
                             //             before after    level   noise enough significant
                             DifferenceCase{200, 200, 100'000, 5'000, true, false},
                             DifferenceCase{200, 200, 100'200, 5'000, true, false},
                             DifferenceCase{200, 200, 110'000, 5'000, true, true},
                             DifferenceCase{200, 40, 90'000, 5'000, true, true},
                             DifferenceCase{200, 4, 200'000, 5'000, false, false},
                             DifferenceCase{0, 200, 100'000, 5'000, false, false}));

TEST(Summary, PhasesLayersAndSpeed) {
  const Profile profile = made_profile(21);
  const Summary summary = summarize(profile);
  ASSERT_EQ(summary.kinds.size(), 2u);
  EXPECT_EQ(summary.kinds[0].tokens, 10u);
  EXPECT_NEAR(summary.kinds[0].tokens_per_second, 10'000, 1e-6);
  EXPECT_NEAR(summary.kinds[1].tokens_per_second, 1'000, 1e-6);
  EXPECT_EQ(phase(summary.kinds[1], Phase::Attention).time.median, 200'000);
  EXPECT_NEAR(phase(summary.kinds[1], Phase::ExchangeWait).share, 0.4, 1e-12);
  ASSERT_EQ(summary.layers.size(), 2u);
  EXPECT_NEAR(summary.layers[0].share, 0.37, 1e-12);
  EXPECT_EQ(summary.layers[0].largest, Phase::ExchangeWait);
}

TEST(Summary, ExchangeIsSplitAfterClockCorrection) {
  const Summary summary = summarize(made_profile(21));
  EXPECT_TRUE(summary.messages);
  ASSERT_EQ(summary.ranks.size(), 2u);
  for (const RankSummary& rank : summary.ranks) {
    EXPECT_EQ(rank.request.median, 10'000) << rank.rank;
    EXPECT_EQ(rank.receive.median, 5'000);
    EXPECT_EQ(rank.reply.median, 15'000) << rank.rank;
  }
  EXPECT_EQ(summary.ranks[0].compute.median, 200'000);
  EXPECT_NEAR(summary.ranks[0].slowest_share, 1, 1e-12);
  EXPECT_NEAR(summary.compute_imbalance, 200.0 / 150, 1e-12);
  EXPECT_NEAR(summary.routes_imbalance, 2 / 1.5, 1e-12);
  EXPECT_NEAR(summary.ranks[0].gigabytes_per_second, 1.0, 1e-12);
  EXPECT_NEAR(summary.ranks[0].measured_gigabytes_per_second, 2.0, 1e-12);
}

TEST(Summary, CriticalPathChargesWaitingToTheSlowestRank) {
  const Summary summary = summarize(made_profile(21));
  // Of the 200 us that the host waits, the last 15 are the reply and 185 compute of rank 1; twice in 1000.
  EXPECT_NEAR(part(summary, "slowest rank: experts"), 0.37, 1e-12);
  EXPECT_NEAR(part(summary, "reply on the way from the slowest rank"), 0.03, 1e-12);
  EXPECT_NEAR(part(summary, "host: attention"), 0.2, 1e-12);
  double sum = 0;
  for (const auto& p : summary.critical_path.parts) sum += p.share;
  EXPECT_NEAR(sum, 1, 1e-12);
}

TEST(Summary, TextJsonAndCsvSayTheSame) {
  const Profile profile = made_profile(21);
  const Summary summary = summarize(profile);
  EXPECT_THAT(summary_text(profile, summary),
              HasSubstr("decode: 20 steps, 20 rows, 20 tokens out, 20.00 ms, 1000.00 tokens/s"));
  EXPECT_THAT(summary_text(profile, summary), HasSubstr("50% of 2.0"));
  const auto json = nlohmann::json::parse(summary_json(profile, summary));
  EXPECT_EQ(json["kinds"][1]["phases"]["exchange_wait"]["median_ns"], 400'000);
  EXPECT_EQ(json["ranks"][1]["compute"]["sum_ns"], 21 * 2 * 100'000);
  const std::string csv = steps_csv(profile);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 22);
  EXPECT_THAT(csv, HasSubstr("\n1,decode,1,1,1100000,1000000,0,0,0,0,0,0,0,0,0,0,0,0,0,200000,0,40000,0,100000,"
                             "400000,200000,0,0,60000\n"));
}

TEST(Summary, OnlySomeSteps) {
  const Profile profile = select_steps(made_profile(21), 3, 7);
  EXPECT_EQ(profile.steps, 5u);
  EXPECT_EQ(profile.step(StepColumn::Step, 0), 3);
  EXPECT_EQ(profile.step(StepColumn::Step, 4), 7);
  EXPECT_EQ(summarize(profile).kinds.size(), 1u);
}

TEST(Trace, OneTrackPerRankAndArrowsBothWays) {
  const Profile profile = made_profile(5);
  std::ostringstream out;
  write_trace(profile, out);
  const auto trace = nlohmann::json::parse(out.str());
  std::map<std::string, int> by_kind;
  std::map<int, int> slices;
  std::map<int, std::array<double, 2>> arrows;
  for (const auto& event : trace["traceEvents"]) {
    const std::string kind = event["ph"];
    ++by_kind[kind];
    if (kind == "X") ++slices[event["pid"]];
    if (kind == "s") arrows[event["id"]][0] = event["ts"];
    if (kind == "f") arrows[event["id"]][1] = event["ts"];
    if (kind == "X" && event["pid"] == 2 && event["name"] == "compute") {
      EXPECT_NEAR(event["dur"].get<double>(), 100.0, 1e-9);
    }
  }
  EXPECT_EQ(by_kind["s"], 5 * 2 * 2 * 2);
  EXPECT_EQ(by_kind["f"], by_kind["s"]);
  EXPECT_EQ(slices[1], 5 * 2 * 3);
  EXPECT_EQ(slices[2], 5 * 2 * 3);
  for (const auto& [id, times] : arrows) EXPECT_LT(times[0], times[1]) << id;
}

TEST(Plot, IsOneDocumentWithoutReferences) {
  Profile profile = made_profile(300);
  profile.counts = {5, 4, 3, 2, 1, 0, 1, 1, 1, 1, 1, 1};
  profile.run.transport = "<&\"";
  const std::string svg = plot_svg(profile);
  EXPECT_EQ(svg.find("<svg xmlns=\"http://www.w3.org/2000/svg\""), 0u);
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme:dark"));
  EXPECT_THAT(svg, HasSubstr("transport &lt;&amp;&quot;"));
  EXPECT_THAT(svg, HasSubstr("Time of prefill steps"));
  EXPECT_THAT(svg, HasSubstr("Time of decode steps"));
  EXPECT_THAT(svg, HasSubstr("Rows per expert"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg.substr(60), Not(HasSubstr("http")));
  EXPECT_LT(svg.size(), 400'000u);
}

TEST(Compare, SaysWhatChangedAndWhetherItMatters) {
  const Profile before = made_profile(101);
  Profile after = made_profile(101);
  for (std::size_t s = 0; s < after.steps; ++s) {
    phase_cell(after, Phase::Attention, s) += 50'000;
    step_cell(after, StepColumn::Total, s) += 50'000;
  }
  after.run.placement = "contiguous";
  const std::string text = compare_text(before, after);
  EXPECT_THAT(text, HasSubstr("placement: cyclic -> contiguous"));
  EXPECT_THAT(text, testing::ContainsRegex("attention +200.0 +250.0 +\\+25.0% +slower"));
  EXPECT_THAT(text, testing::ContainsRegex("routing +40.0 +40.0 +\\+0.0% +not significant"));
  EXPECT_THAT(text, HasSubstr("too few steps to tell"));  // one prefill step each
}

// ---- Placement
// ---------------------------------------------------------------------------------------------------

Profile skewed(std::size_t experts, std::size_t ranks, std::vector<std::int64_t> even,
               std::vector<std::int64_t> odd) {
  Profile profile = made_profile(10);
  profile.blocks = profile.run.blocks = profile.run.layers = 1;
  profile.experts = profile.run.experts = static_cast<std::uint32_t>(experts);
  profile.ranks = ranks;
  profile.run.expert_capacity.assign(ranks, 0);
  profile.rank_columns = {};
  for (auto& column : profile.rank_columns) column.assign(10 * ranks, 0);
  profile.owners.clear();
  for (std::size_t e = 0; e < experts; ++e) profile.owners.push_back(static_cast<std::int64_t>(e % ranks));
  profile.counts = odd;
  for (std::size_t e = 0; e < experts; ++e) profile.counts[e] += even[e];
  profile.even_counts = std::move(even);
  return profile;
}
std::vector<std::int64_t> loads(const PlacementReport& report, const std::vector<std::int64_t>& counts,
                                std::size_t ranks) {
  const auto owners = nlohmann::json::parse(report.json)["blocks"][0].get<std::vector<std::size_t>>();
  std::vector<std::int64_t> result(ranks, 0);
  for (std::size_t e = 0; e < owners.size(); ++e) result.at(owners[e]) += counts[e];
  return result;
}

TEST(Placement, BalancesCountsWithinEqualShares) {
  const std::vector<std::int64_t> counts = {90, 5, 50, 5, 40, 5, 5, 0};  // cyclic: 185 to 15
  const Profile profile = skewed(8, 2, counts, counts);
  const PlacementReport report = balanced_placement(profile);
  const auto json = nlohmann::json::parse(report.json);
  EXPECT_EQ(json["ranks"], 2);
  const auto owners = json["blocks"][0].get<std::vector<int>>();
  EXPECT_EQ(std::count(owners.begin(), owners.end(), 0), 4);
  EXPECT_EQ(loads(report, counts, 2), (std::vector<std::int64_t>{100, 100}));
  EXPECT_THAT(report.text, testing::ContainsRegex("cyclic +1.850"));
  EXPECT_THAT(report.text, testing::ContainsRegex("balanced +1.000"));
}

TEST(Placement, IsScoredOnTheOtherHalf) {
  const std::vector<std::int64_t> even = {90, 5, 50, 5, 40, 5, 5, 0}, odd = {80, 10, 60, 5, 30, 5, 10, 0};
  const PlacementReport report = balanced_placement(skewed(8, 2, even, odd));
  const auto load = loads(report, odd, 2);
  EXPECT_THAT(report.text, testing::ContainsRegex(fmt::format(
                               "balanced +{:.3f}", static_cast<double>(std::max(load[0], load[1])) / 100)));
}

TEST(Placement, HonoursCapacityAndSpeed) {
  const std::vector<std::int64_t> counts(12, 10);
  Profile profile = skewed(12, 3, counts, counts);
  profile.run.expert_capacity = {8, 8, 2};
  auto owners = nlohmann::json::parse(balanced_placement(profile).json)["blocks"][0].get<std::vector<int>>();
  EXPECT_EQ(std::count(owners.begin(), owners.end(), 2), 2);
  EXPECT_EQ(std::count(owners.begin(), owners.end(), 0), 5);

  profile.run.expert_capacity = {12, 12, 12};
  for (std::size_t s = 0; s < 10; ++s)
    for (std::size_t r = 0; r < 3; ++r) {
      cell(profile, RankColumn::Routes, s, 0, r) = 4;
      cell(profile, RankColumn::Compute, s, 0, r) = r == 1 ? 50 : 100;  // rank 1 is twice as fast
    }
  const PlacementReport report = balanced_placement(profile);
  owners = nlohmann::json::parse(report.json)["blocks"][0].get<std::vector<int>>();
  EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), 6);
  EXPECT_EQ(std::count(owners.begin(), owners.end(), 0), 3);
  EXPECT_THAT(report.text, HasSubstr("relative speed"));
}

// The loaded rank does more rows per expert, and so more rows per second, than a rank of the same speed.
TEST(Placement, TakesNoLoadForSpeed) {
  const std::vector<std::int64_t> counts = {90, 5, 50, 5, 40, 5, 5, 0};
  Profile profile = skewed(8, 2, counts, counts);
  for (std::size_t s = 0; s < 10; ++s)
    for (std::size_t r = 0; r < 2; ++r) {
      const std::int64_t pairs = s < 2 ? 3 : r == 0 ? 18 : 2;
      cell(profile, RankColumn::Requests, s, 0, r) = cell(profile, RankColumn::Experts, s, 0, r) = 1;
      cell(profile, RankColumn::Routes, s, 0, r) = pairs;
      cell(profile, RankColumn::Compute, s, 0, r) = 1000 + 10 * pairs + (s == 5 ? 100'000 : 0);
    }
  const PlacementReport report = balanced_placement(profile);
  EXPECT_EQ(loads(report, counts, 2), (std::vector<std::int64_t>{100, 100}));
  EXPECT_THAT(report.text, Not(HasSubstr("relative speed")));
}

TEST(Placement, RoutesScoreStepByStep) {
  const std::vector<std::int64_t> counts = {10, 10, 0, 0};
  Profile profile = skewed(4, 2, counts, counts);
  profile.routes.width = 2;
  for (std::int64_t step = 0; step < 10; ++step) {  // experts 0 and 1 are always chosen together
    profile.routes.step.push_back(step);
    profile.routes.layer.push_back(0);
    profile.routes.row.push_back(0);
    profile.routes.ids.insert(profile.routes.ids.end(), {0, 1});
    profile.routes.weights.insert(profile.routes.weights.end(), {0.5f, 0.5f});
  }
  const std::string text = balanced_placement(profile).text;
  EXPECT_THAT(text, testing::ContainsRegex("contiguous +2.000 +2.000"));
  EXPECT_THAT(text, testing::ContainsRegex("balanced +1.000 +1.000"));
}

TEST(Placement, NothingToPlace) {
  EXPECT_THROW(balanced_placement(skewed(4, 2, {0, 0, 0, 0}, {1, 1, 1, 1})), UsageError);
  EXPECT_THROW(balanced_placement(skewed(4, 1, {1, 1, 1, 1}, {1, 1, 1, 1})), UsageError);
}

}  // namespace
}  // namespace dsv41
