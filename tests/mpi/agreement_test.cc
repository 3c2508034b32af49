// Start agreement over real messages: one verdict on all ranks (the rules themselves:
// tests/runtime/agreement_test.cc).
#include "runtime/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/mpi/support/world.h"

namespace dsv41 {
namespace {

using ::testing::HasSubstr;
using testing::world;

TEST(Agreement, EqualRanksAgree) {
  StartReport mine = start_report(world(), "1.0");
  mine.held = {static_cast<std::uint64_t>(world().rank()) + 7, 1000};
  const StartVerdict verdict = agree(world(), mine);
  EXPECT_EQ(verdict.code, ExitCode::Ok);
  EXPECT_EQ(verdict.message, "");
  if (world().rank() != 0) return;
  ASSERT_EQ(verdict.reports.size(), static_cast<std::size_t>(world().size()));
  EXPECT_EQ(verdict.reports.back().held.experts, static_cast<std::uint64_t>(world().size()) + 6);
}

TEST(Agreement, AFailureOfTheLastRankIsKnownToAll) {
  StartReport mine = start_report(world(), "1.0");
  if (world().rank() == world().size() - 1) mine.fail(CheckpointError("no such shard"));
  const StartVerdict verdict = agree(world(), mine);
  EXPECT_EQ(verdict.code, ExitCode::Checkpoint);
  EXPECT_THAT(verdict.message, HasSubstr("no such shard"));
}

TEST(Agreement, LongTextsAreCutNotLost) {
  StartReport mine = start_report(world(), "1.0");
  mine.fail(UsageError(std::string(100000, 'x')));
  const StartVerdict verdict = agree(world(), mine);
  EXPECT_EQ(verdict.code, ExitCode::Usage);
  EXPECT_EQ(verdict.message, std::string(4096, 'x'));
}

TEST(Agreement, HostNamesAreKnownEverywhere) {
  for (int rank = 0; rank < world().size(); ++rank) EXPECT_EQ(world().host_of(rank), world().host());
}

TEST(Agreement, TransportNamesTheLibrary) {
  EXPECT_THAT(world().transport(), HasSubstr("MPI"));
}

}  // namespace
}  // namespace dsv41
