// What rank 0 makes of the start reports of all ranks.
#include "runtime/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

std::vector<StartReport> three_reports() {
  StartReport report;
  report.protocol = 1;
  report.program_version = "1.0";
  report.config_fingerprint = 0xABC;
  report.placement_fingerprint = 0xDEF;
  report.max_rows = 16;
  std::vector<StartReport> reports(3, report);
  for (std::size_t rank = 0; rank < reports.size(); ++rank)
    reports[rank].host = "node" + std::to_string(rank);
  return reports;
}

void ask_for_memory(std::vector<StartReport>& reports) {
  constexpr std::uint64_t gib = std::uint64_t{1} << 30;
  reports[0].engram_memory = 3 * gib;
  reports[1].expert_memory = reports[2].expert_memory = 2 * gib;
  reports[0].available_memory = 6 * gib;
  reports[1].available_memory = 5 * gib;  // a moment later; of the third nobody knows
}

struct Difference {
  const char* name;
  std::function<void(std::vector<StartReport>&)> apply;
  ExitCode code;
  const char* message;
};
void PrintTo(const Difference& difference, std::ostream* out) {
  *out << difference.name;
}

class Verdict : public ::testing::TestWithParam<Difference> {};
TEST_P(Verdict, NamesTheFirstRankThatDiffers) {
  auto reports = three_reports();
  GetParam().apply(reports);
  const StartVerdict verdict = judge(reports);
  EXPECT_EQ(verdict.code, GetParam().code);
  EXPECT_EQ(verdict.message, GetParam().message);
}
INSTANTIATE_TEST_SUITE_P(
    Cases, Verdict,
    ::testing::Values(
        Difference{"None", [](auto&) {}, ExitCode::Ok, ""},
        Difference{
            "MoreMemoryThanOneMachineHas",
            [](auto& reports) {
              for (auto& report : reports) report.host = "node";
              ask_for_memory(reports);
            },
            ExitCode::Resources,
            "node: 7.00 GiB of memory are asked for, 5.00 GiB are available: rank 0 3.00 GiB for engram rows "
            "(--engram), rank 1 2.00 GiB for experts (--expert-memory), rank 2 2.00 GiB for experts "
            "(--expert-memory); ask for less, or let --engram mmap and experts without --expert-memory be "
            "read through the page cache"},
        Difference{"TheSameMemoryOnThreeMachines", [](auto& reports) { ask_for_memory(reports); },
                   ExitCode::Ok, ""},
        Difference{"CudaAwareWithoutAGpu",
                   [](auto& reports) {
                     for (StartReport& report : reports) report.needs_device = true;
                   },
                   ExitCode::Resources,
                   "--transport cuda-aware: no rank computes on a GPU (see --devices); use --transport auto"},
        Difference{"CudaAwareWithAGpu",
                   [](auto& reports) {
                     for (StartReport& report : reports) report.needs_device = true;
                     reports[2].has_device = true;
                   },
                   ExitCode::Ok, ""},
        Difference{"OneGpuTwice",
                   [](auto& reports) {
                     for (auto& report : reports) report.host = "node";
                     reports[1].gpu = reports[2].gpu = "0000:3b:00.0";
                   },
                   ExitCode::Usage,
                   "2 ranks on node compute on 1 GPU: ranks 1, 2 have taken the same one (0000:3b:00.0); "
                   "start fewer ranks there, let them share it with --share-gpu, or name what each computes "
                   "on with --devices"},
        Difference{"OneOfTwoGpusThreeTimes",
                   [](auto& reports) {
                     reports.resize(6, reports.back());
                     for (auto& report : reports) report.host = "node";
                     reports[4].host = "elsewhere";
                     for (auto& report : reports) report.gpu = "0000:3b:00.0";
                     reports[0].gpu = "";
                     reports[2].gpu = "0000:5e:00.0";
                     reports[5].share_gpu = true;  // the others do not
                   },
                   ExitCode::Usage,
                   "4 ranks on node compute on 2 GPUs: ranks 1, 3, 5 have taken the same one (0000:3b:00.0); "
                   "start fewer ranks there, let them share it with --share-gpu, or name what each computes "
                   "on with --devices"},
        Difference{"OneGpuShared",
                   [](auto& reports) {
                     for (auto& report : reports) {
                       report.host = "node";
                       report.gpu = "0000:3b:00.0";
                       report.share_gpu = true;
                     }
                   },
                   ExitCode::Ok, ""},
        Difference{"SameBusOnOtherHosts",
                   [](auto& reports) { reports[1].gpu = reports[2].gpu = "0000:3b:00.0"; }, ExitCode::Ok, ""},
        Difference{"Version", [](auto& reports) { reports[2].program_version = "0.9"; }, ExitCode::Usage,
                   "rank 2 (node2) has program version 0.9 (protocol 1), rank 0 (node0) has 1.0 (protocol "
                   "1): install "
                   "the same build on every host"},
        Difference{"Protocol", [](auto& reports) { reports[1].protocol = 2; }, ExitCode::Usage,
                   "rank 1 (node1) has program version 1.0 (protocol 2), rank 0 (node0) has 1.0 (protocol "
                   "1): install "
                   "the same build on every host"},
        Difference{"Config", [](auto& reports) { reports[1].config_fingerprint = 1; }, ExitCode::Checkpoint,
                   "rank 1 (node1) has a checkpoint with fingerprint 0000000000000001, rank 0 (node0) has "
                   "0000000000000abc: give every host the same --model directory"},
        Difference{"Placement", [](auto& reports) { reports[2].placement_fingerprint = 1; }, ExitCode::Usage,
                   "rank 2 (node2) has a placement with fingerprint 0000000000000001, rank 0 (node0) has "
                   "0000000000000def: give every host the same --placement file"},
        Difference{"Rows", [](auto& reports) { reports[2].max_rows = 1; }, ExitCode::Usage,
                   "rank 2 (node2) has rows per step 1, rank 0 (node0) has 16: start every rank with the "
                   "same options"},
        Difference{"EveryRankFails",
                   [](auto& reports) {
                     for (auto& report : reports) report.fail(UsageError("unknown option --foo"));
                   },
                   ExitCode::Usage, "unknown option --foo"},
        Difference{"OneRankFails", [](auto& reports) { reports[2].fail(CheckpointError("no such\nshard")); },
                   ExitCode::Checkpoint, "rank 2 (node2): no such shard"},
        Difference{"FailureBeforeDifference",
                   [](auto& reports) {
                     reports[1].config_fingerprint = 1;
                     reports[2].fail(ResourceError("no memory"));
                   },
                   ExitCode::Resources, "rank 2 (node2): no memory"}),
    [](const auto& instance) { return instance.param.name; });

TEST(HeldExperts, SharesAddUpToTheModel) {
  const auto config = testing::small_config();
  testing::RandomExperts source(config);
  const auto placement = Placement::make("cyclic", config, 4);
  HeldExperts sum;
  for (std::uint32_t owner = 0; owner < 4; ++owner) {
    const HeldExperts held = held_experts(source, placement, owner);
    sum.experts += held.experts;
    sum.bytes += held.bytes;
  }
  EXPECT_EQ(sum.experts, 3 * 11 + 2 * 4);
  EXPECT_EQ(sum.bytes, sum.experts * (3 * 96 * 64 / 2 + 3 * 96 * 64 / 32));
}

}  // namespace
}  // namespace dsv41
