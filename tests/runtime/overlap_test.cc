// The choice between whole steps and halves follows what was measured.
#include "runtime/overlap.h"

#include <gtest/gtest.h>

namespace dsv41::test {
namespace {

constexpr std::uint64_t kLayers = 40;

/// Runs `steps` steps that take so many seconds whole and in halves; returns how many ran in halves.
int run(Overlap& overlap, int steps, std::size_t rows, double whole, double halves) {
  int halved = 0;
  for (int i = 0; i < steps; ++i) {
    const bool wanted = overlap.wanted(rows);
    overlap.step_took(rows, wanted, rows * kLayers, wanted ? halves : whole);
    halved += wanted;
  }
  return halved;
}

TEST(Overlap, ModesAreObeyedAndOneRowIsNeverSplit) {
  Overlap never, always(Overlap::Mode::Always), measured(Overlap::Mode::Measured);
  EXPECT_EQ(run(never, 20, 8, 2, 1), 0);
  EXPECT_EQ(run(always, 20, 8, 1, 2), 20);
  EXPECT_EQ(run(always, 20, 1, 2, 1), 0);
  EXPECT_EQ(run(measured, 20, 1, 2, 1), 0);
}

TEST(Overlap, TheFasterWayIsTakenAndTheOtherTriedNowAndThen) {
  Overlap slow_halves(Overlap::Mode::Measured), fast_halves(Overlap::Mode::Measured);
  const int tried = run(slow_halves, 1000, 8, 1.0, 1.1);
  EXPECT_GE(tried, 10);
  EXPECT_LE(tried, 25);
  const int whole = 1000 - run(fast_halves, 1000, 8, 1.1, 1.0);
  EXPECT_GE(whole, 10);
  EXPECT_LE(whole, 25);
}

TEST(Overlap, OctavesOfRowsAreChosenApart) {
  Overlap overlap(Overlap::Mode::Measured);
  run(overlap, 20, 2, 1.0, 1.5);
  run(overlap, 20, 100, 1.5, 1.0);
  EXPECT_FALSE(overlap.wanted(2));
  EXPECT_FALSE(overlap.wanted(3));
  EXPECT_TRUE(overlap.wanted(127));
}

TEST(Overlap, AChangeOfTheMachineIsNoticed) {
  Overlap overlap(Overlap::Mode::Measured);
  run(overlap, 20, 8, 1.0, 1.1);
  ASSERT_FALSE(overlap.wanted(8));
  run(overlap, 500, 8, 1.0, 0.8);
  EXPECT_TRUE(overlap.wanted(8));
}

TEST(Overlap, OneSlowStepChangesLittle) {
  Overlap overlap(Overlap::Mode::Measured);
  run(overlap, 20, 8, 1.0, 1.5);
  run(overlap, 1, 8, 2.0, 1.5);
  EXPECT_FALSE(overlap.wanted(8));
}

TEST(Overlap, RowsThatLayersLeaveOutCountForNothing) {
  Overlap overlap(Overlap::Mode::Measured);
  for (int i = 0; i < 20; ++i) {  // halves do twice the work in 1.5 times the time
    const bool halves = overlap.wanted(8);
    overlap.step_took(8, halves, halves ? 2 * 8 * kLayers : 8 * kLayers, halves ? 1.5 : 1.0);
  }
  EXPECT_TRUE(overlap.wanted(8));
  overlap.step_took(8, true, 0, 1.0);
}

}  // namespace
}  // namespace dsv41::test
