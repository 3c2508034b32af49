// The CPU engine and experts in this process: grouping and slicing a call changes nothing, a checkpoint is a
// source.
#include "runtime/experts.h"

#include <gtest/gtest.h>

#include "runtime/agreement.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using testing::RandomCall;
using testing::RandomExperts;
using testing::small_config;

std::vector<std::uint16_t> bits(std::span<const BFloat16> values) {
  std::vector<std::uint16_t> all;
  for (const BFloat16 value : values) all.push_back(value.bits);
  return all;
}

/// One route at a time, straight from the operation.
std::vector<std::uint16_t> one_by_one(RandomExperts& source, Compute& compute, const RandomCall& call) {
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  for (std::uint32_t index = 0; index < call.routes.size(); ++index) {
    const Route& route = call.routes[index];
    const ExpertTask task{
        source.expert(call.block, route.expert), {&route.row, 1}, {&route.weight, 1}, {&index, 1}};
    compute.experts(call.view().x, {&task, 1}, source.geometry().swiglu_limit, outputs);
  }
  return bits(outputs);
}

TEST(CpuEngine, EqualsOneRouteAtATime) {
  const auto config = small_config();
  RandomExperts source(config);
  Compute compute(plain_ops(), 2);
  const auto engine = cpu_engine(source, compute, ExpertLimits::of(config, 100));
  for (const std::uint32_t rows : {100u, 1u, 7u, 100u}) {
    for (std::uint32_t block = 0; block < config.n_blocks(); ++block) {
      const RandomCall call(config, block, rows, rows + block, true);
      std::vector<BFloat16> outputs(call.routes.size() * call.dim);
      RankTiming timing;
      engine->compute(call.view(), outputs, timing, [] {});
      EXPECT_EQ(bits(outputs), one_by_one(source, compute, call)) << "rows " << rows << ", block " << block;
    }
  }
}

TEST(CpuEngine, SaysThatItIsAliveInALongCall) {
  const auto config = small_config();
  RandomExperts source(config);
  Compute compute(plain_ops(), 1);
  const auto engine = cpu_engine(source, compute, ExpertLimits::of(config, 100));
  const RandomCall call(config, 0, 100, 1);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  RankTiming timing;
  int said = 0;
  engine->compute(call.view(), outputs, timing, [&] { ++said; });
  EXPECT_GT(said, 1) << "a first call knows nothing about the speed of this machine and goes in small slices";
  EXPECT_EQ(timing.experts_touched, 11u);
  EXPECT_EQ(timing.bytes_read, 11 * source.geometry().expert_bytes());
  EXPECT_GT(timing.compute_ns, 0u);
}

TEST(LocalExperts, FinishInTheOrderOfBegin) {
  const auto config = small_config();
  RandomExperts source(config);
  Compute compute(plain_ops(), 1);
  const auto experts = local_experts(source, compute, ExpertLimits::of(config, 8));
  const RandomCall first(config, 0, 8, 1), second(config, 4, 3, 2);
  experts->begin(first.view());
  experts->begin(second.view());
  EXPECT_THROW(experts->begin(first.view()), std::logic_error);
  for (const RandomCall* call : {&first, &second}) {
    std::vector<BFloat16> outputs(call->routes.size() * call->dim);
    experts->finish(outputs);
    EXPECT_EQ(bits(outputs), one_by_one(source, compute, *call));
  }
  EXPECT_THROW(experts->finish({}), std::logic_error);
}

TEST(CheckpointExperts, HoldEveryExpertOfTheMiniCheckpoint) {
  const Checkpoint checkpoint(DSV41_TEST_CHECKPOINTS "/mini");
  const auto source = checkpoint_experts(checkpoint);
  const auto held = held_experts(*source, Placement::make("cyclic", checkpoint.config(), 1), 0);
  EXPECT_EQ(held.experts, 10 * 8 + 3 * 4u);
  EXPECT_EQ(held.bytes, held.experts * (3 * 128 * 64 / 2 + 3 * 128 * 64 / 32));
  const ExpertMatrices matrices = source->expert(12, 3);
  EXPECT_EQ(matrices.w1.n, 64u);
  EXPECT_EQ(matrices.w2.n, 128u);
  EXPECT_THROW(source->expert(12, 4), CheckpointError);
  EXPECT_THROW(source->expert(13, 0), CheckpointError);
}

TEST(ExpertLimits, CountTheLargestNumberOfRoutes) {
  auto config = small_config();
  EXPECT_EQ(ExpertLimits::of(config, 10).max_routes, 30u);
  config.dspark_n_activated_experts = 4;
  EXPECT_EQ(ExpertLimits::of(config, 10).max_routes, 40u);
  EXPECT_THROW(ExpertLimits::of(config, 0), UsageError);
  EXPECT_THROW(ExpertLimits::of(config, 0xFFFFFFFF), UsageError);
}

}  // namespace
}  // namespace dsv41
