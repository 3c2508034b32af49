// An expert rank with a (emulated) GPU: the same bits as a CPU rank, alone and mixed with CPU ranks in one
// job; memory plans and refusals with their numbers; a device that dies ends the job with rank, host and
// cause.
#include "runtime/gpu_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "kernels/cuda/emulated_device.h"
#include "runtime/expert_rank.h"
#include "tests/runtime/support/memory_communicator.h"
#include "tests/runtime/support/random_experts.h"

namespace dsv41 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::RandomCall;
using testing::RandomExperts;
using testing::small_config;

std::vector<std::uint16_t> bits(std::span<const BFloat16> values) {
  std::vector<std::uint16_t> all;
  for (const BFloat16 value : values) all.push_back(value.bits);
  return all;
}

std::vector<std::uint16_t> cpu_result(RandomExperts& source, const ExpertLimits& limits,
                                      const RandomCall& call) {
  Compute compute(plain_ops(), 1);
  const auto engine = cpu_engine(source, compute, limits);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  RankTiming timing;
  engine->compute(call.view(), outputs, timing, [] {});
  return bits(outputs);
}

std::uint64_t device_bytes_for(const ModelConfig& config, const ExpertLimits& limits, std::uint32_t experts) {
  cuda::DeviceExpertsOptions options;
  options.dim = config.dim;
  options.inter = config.moe_inter_dim;
  options.max_rows = limits.max_rows;
  options.max_routes = limits.max_routes;
  options.slots = experts;
  return cuda::DeviceMemoryPlan::of(options).device_bytes;
}

TEST(GpuEngine, EqualsTheCpuEngine) {
  const ModelConfig config = small_config(5, 3, 64, 32);
  RandomExperts source(config);
  const ExpertLimits limits = ExpertLimits::of(config, 6);
  const Placement placement = Placement::make("cyclic", config, 1);
  for (const std::uint32_t slots : {2u, 1000u}) {
    GpuEngineOptions options;
    if (slots < 1000) options.device_bytes = device_bytes_for(config, limits, slots);
    const auto engine = gpu_engine(cuda::emulated_device(), source, &placement, 0, limits, options);
    LoadProgress last;
    engine->load([&](const LoadProgress& progress) {
      EXPECT_GT(progress.done_bytes, last.done_bytes);
      last = progress;
    });
    EXPECT_EQ(last.done_bytes, last.total_bytes);
    EXPECT_GT(last.total_bytes, 0u);
    RankTiming timing;
    for (std::uint32_t block = 0; block < config.n_blocks(); ++block)
      for (const std::uint32_t rows : {1u, 6u}) {
        const RandomCall call(config, block, rows, block * 10 + rows, true);
        std::vector<BFloat16> outputs(call.routes.size() * call.dim);
        engine->compute(call.view(), outputs, timing, [] {});
        EXPECT_EQ(bits(outputs), cpu_result(source, limits, call)) << "block " << block << ", rows " << rows;
      }
    EXPECT_EQ(timing.cache_hits + timing.cache_misses, timing.experts_touched);
    EXPECT_EQ(timing.cache_misses == 0, slots == 1000u);
    EXPECT_EQ(timing.bytes_read == 0, slots == 1000u);
  }
}

TEST(GpuEngine, MixedCpuAndGpuRanksAnswerAsOne) {
  const ModelConfig config = small_config(6, 3, 64, 32);
  RandomExperts source(config);
  const ExpertLimits limits = ExpertLimits::of(config, 4);
  const Placement placement = Placement::make("cyclic", config, 3);
  const auto communicators = testing::memory_communicators(4);
  std::vector<std::thread> ranks;
  for (int rank = 1; rank <= 3; ++rank)
    ranks.emplace_back([&, rank] {
      RandomExperts own(config);
      Compute compute(plain_ops(), 1);
      const auto engine = rank == 2
                              ? cpu_engine(own, compute, limits)
                              : gpu_engine(cuda::emulated_device({.order = cuda::emulation::Order::Shuffled,
                                                                  .tensor_copies = rank == 1}),
                                           own, &placement, static_cast<std::uint32_t>(rank - 1), limits, {});
      EXPECT_EQ(
          run_expert_rank(*communicators[static_cast<std::size_t>(rank)], placement, *engine, limits, {}),
          ExitCode::Ok);
    });
  {
    const auto experts = remote_experts(*communicators[0], placement, source.geometry(), limits);
    for (std::uint32_t block = 0; block < config.n_blocks(); ++block) {
      const RandomCall call(config, block, 4, block + 1);
      std::vector<BFloat16> outputs(call.routes.size() * call.dim);
      experts->begin(call.view());
      experts->finish(outputs);
      EXPECT_EQ(bits(outputs), cpu_result(source, limits, call)) << "block " << block;
    }
    experts->close(ExitCode::Ok);
  }
  for (std::thread& rank : ranks) rank.join();
}

/// A job of a host rank and one GPU rank whose second call does not succeed; what the host is told.
std::string told_of(const cuda::EmulatedOptions& device, const GpuEngineOptions& options) {
  const ModelConfig config = small_config(4, 2, 32, 32);
  RandomExperts source(config);
  const ExpertLimits limits = ExpertLimits::of(config, 2);
  const Placement placement = Placement::make("cyclic", config, 1);
  const auto communicators = testing::memory_communicators(2);
  std::thread rank([&] {
    const auto engine = gpu_engine(cuda::emulated_device(device), source, &placement, 0, limits, options);
    EXPECT_EQ(run_expert_rank(*communicators[1], placement, *engine, limits, {}), ExitCode::Resources);
  });
  std::string told;
  const auto experts = remote_experts(*communicators[0], placement, source.geometry(), limits);
  LoadProgress loaded;
  experts->await_ready([&](const LoadProgress& progress) { loaded = progress; });
  EXPECT_EQ(loaded.done_bytes, loaded.total_bytes);
  const RandomCall call(config, 0, 1, 1);
  std::vector<BFloat16> outputs(call.routes.size() * call.dim);
  experts->begin(call.view());
  experts->finish(outputs);
  experts->begin(call.view());
  try {
    experts->finish(outputs);
  } catch (const Error& error) {
    told = error.what();
    experts->close(error.code());
  }
  rank.join();
  return told;
}

TEST(GpuEngine, ADeviceThatDiesEndsTheJobWithRankAndCause) {
  EXPECT_THAT(
      told_of({.fail_launch = 2}, {}),
      AllOf(HasSubstr("rank 1 (memory1)"), HasSubstr("the launch was told to fail"), HasSubstr("block 0")));
}

TEST(GpuEngine, ADeviceThatHangsEndsTheJobWithRankAndCause) {
  GpuEngineOptions options;
  options.hang_after = std::chrono::milliseconds(100);
  EXPECT_THAT(
      told_of({.hang_launch = 2}, options),
      AllOf(HasSubstr("rank 1 (memory1)"), HasSubstr("GPU 0 (emulated device) hangs"), HasSubstr("0.1 s")));
}

TEST(GpuEngine, ADeviceWithoutTheMemoryItReportedEndsTheJobWhileLoading) {
  const ModelConfig config = small_config(4, 2, 32, 32);
  RandomExperts source(config);
  const ExpertLimits limits = ExpertLimits::of(config, 2);
  const Placement placement = Placement::make("cyclic", config, 1);
  const auto communicators = testing::memory_communicators(2);
  std::thread rank([&] {
    auto device = cuda::emulated_device();
    cuda::Device& other_user = *device;
    const auto engine = gpu_engine(std::move(device), source, &placement, 0, limits, {});
    other_user.allocate(other_user.free_bytes());  // after the plan was made; freed with the device
    EXPECT_EQ(run_expert_rank(*communicators[1], placement, *engine, limits, {}), ExitCode::Resources);
  });
  const auto experts = remote_experts(*communicators[0], placement, source.geometry(), limits);
  experts->set_phase("load");
  try {
    experts->await_ready({});
    ADD_FAILURE() << "the memory is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::Resources);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("rank 1 (memory1)"), HasSubstr("bytes asked for"), HasSubstr("load")));
    experts->close(error.code());
  }
  rank.join();
}

TEST(GpuEngine, RanksThatShareADeviceShareItsMemory) {
  const ModelConfig config = small_config(8, 2, 64, 32);
  RandomExperts source(config);
  const ExpertLimits limits = ExpertLimits::of(config, 2);
  const std::uint64_t all = device_bytes_for(config, limits, 28);
  GpuMemoryPlan alone, shared;
  GpuEngineOptions options;
  gpu_engine(cuda::emulated_device({.memory_bytes = 2 * all}), source, nullptr, 0, limits, options, &alone);
  options.sharers = 2;
  gpu_engine(cuda::emulated_device({.memory_bytes = 2 * all}), source, nullptr, 0, limits, options, &shared);
  EXPECT_EQ(alone.resident_experts, 28u);
  EXPECT_LE(shared.device_bytes, all);
  EXPECT_LT(shared.resident_experts, alone.resident_experts);
}

TEST(GpuMemoryPlan, SaysWhatFitsWithNumbers) {
  // The released geometry on a card of 11 GiB and four ranks.
  ExpertGeometry geometry;
  geometry.dim = 5120;
  geometry.inter_dim = 2304;
  geometry.experts_per_block.assign(40, 384);
  const ExpertLimits limits{512, 3072, 5120};
  const std::uint64_t owned = 40 * 96;
  const GpuMemoryPlan plan = plan_gpu_memory(geometry, limits, owned, std::uint64_t{11} << 30, {});
  EXPECT_GT(plan.resident_experts, 500u);
  EXPECT_LT(plan.resident_experts, 650u);
  EXPECT_LE(plan.device_bytes, std::uint64_t{11} << 30);
  EXPECT_THAT(plan.describe(), AllOf(HasSubstr(std::to_string(plan.resident_experts) + " of 3840 experts"),
                                     HasSubstr("GiB"), HasSubstr("read on demand")));
  EXPECT_EQ(plan.options.pinned_slots, 2u);

  GpuEngineOptions pinned;
  pinned.pinned_bytes = std::uint64_t{8} << 30;
  EXPECT_GT(plan_gpu_memory(geometry, limits, owned, std::uint64_t{11} << 30, pinned).pinned_experts, 400u);
  EXPECT_EQ(plan_gpu_memory(geometry, limits, 96, std::uint64_t{141} << 30, {}).resident_experts, 96u);
}

TEST(GpuMemoryPlan, RefusesWithNumbers) {
  const ModelConfig config = small_config();
  const ExpertGeometry geometry = ExpertGeometry::of(config);
  const ExpertLimits limits = ExpertLimits::of(config, 4);
  try {
    plan_gpu_memory(geometry, limits, 10, 4096, {});
    FAIL();
  } catch (const ResourceError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("0.00 MiB of GPU memory are not enough"),
                                    HasSubstr("4 rows per step"), HasSubstr("--chunk")));
  }
  GpuEngineOptions greedy;
  greedy.device_bytes = std::uint64_t{16} << 30;
  EXPECT_THROW(plan_gpu_memory(geometry, limits, 10, std::uint64_t{8} << 30, greedy), ResourceError);
}

}  // namespace
}  // namespace dsv41
