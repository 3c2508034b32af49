// An expert rank with a (emulated) GPU: the same bits as a CPU rank, alone and mixed with CPU ranks in one
// job, with messages in host and in device memory; memory plans and refusals with their numbers; a device
// that dies ends the job with rank, host and cause.
#include "runtime/gpu_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "kernels/cuda/emulated_device.h"
#include "runtime/exchange/messages.h"
#include "runtime/expert_rank.h"
#include "tests/runtime/support/device_aware_communicator.h"
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

/// What an expert rank of a Job computes on.
struct RankKind {
  bool gpu = true;
  cuda::EmulatedOptions device;
  GpuEngineOptions options;
  std::function<void(cuda::Device&)> before_load;  // once memory is planned
};

/// A host rank in this thread and expert ranks in others.
class Job {
 public:
  Job(const ModelConfig& config, std::uint32_t rows, std::vector<RankKind> kinds, ExitCode end = ExitCode::Ok)
      : config_(config),
        limits_(ExpertLimits::of(config, rows)),
        placement_(Placement::make("cyclic", config, static_cast<std::uint32_t>(kinds.size()))),
        communicators_(testing::memory_communicators(static_cast<int>(kinds.size()) + 1)),
        kinds_(std::move(kinds)),
        source_(config) {
    for (std::size_t index = 0; index < kinds_.size(); ++index)
      threads_.emplace_back([this, index, end] { EXPECT_EQ(run_rank(index), end) << "rank " << index + 1; });
    experts_ = remote_experts(*communicators_[0], placement_, source_.geometry(), limits_);
  }
  ~Job() {
    experts_->close(ExitCode::Ok);
    for (std::thread& thread : threads_) thread.join();
  }

  Experts& experts() { return *experts_; }
  Communicator& communicator(int rank) { return *communicators_[static_cast<std::size_t>(rank)]; }
  /// Begins a call; its arrays stay until the job ends.
  RandomCall& begin(std::uint32_t block, std::uint32_t rows, std::uint64_t seed) {
    calls_.push_back(std::make_unique<RandomCall>(config_, block, rows, seed));
    experts_->begin(calls_.back()->view());
    return *calls_.back();
  }
  std::vector<std::uint16_t> finish(const RandomCall& call) {
    std::vector<BFloat16> outputs(call.routes.size() * call.dim);
    experts_->finish(outputs);
    return bits(outputs);
  }
  std::vector<std::uint16_t> expected(const RandomCall& call) { return cpu_result(source_, limits_, call); }

  /// What the host is told when `body` fails, as it must; ends the job with that failure's code.
  std::string failure(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      experts_->close(error.code());
      return error.what();
    }
    ADD_FAILURE() << "nothing has failed";
    return {};
  }

 private:
  ExitCode run_rank(std::size_t index) {
    Communicator& communicator = *communicators_[index + 1];
    const RankKind& kind = kinds_[index];
    RandomExperts own(config_);
    Compute compute(plain_ops(), 1);
    if (!kind.gpu)
      return run_expert_rank(communicator, placement_, *cpu_engine(own, compute, limits_), limits_, {});
    auto opened = cuda::emulated_device(kind.device);
    cuda::Device& device = *opened;
    const auto engine = gpu_engine(std::move(opened), own, &placement_, static_cast<std::uint32_t>(index),
                                   limits_, kind.options);
    if (kind.before_load) kind.before_load(device);
    if (!kind.options.messages_on_device)
      return run_expert_rank(communicator, placement_, *engine, limits_, {});
    testing::DeviceAwareCommunicator aware(communicator, *engine, device);
    return run_expert_rank(aware, placement_, *engine, limits_, {});
  }

  const ModelConfig config_;
  const ExpertLimits limits_;
  const Placement placement_;
  const std::vector<std::unique_ptr<Communicator>> communicators_;
  const std::vector<RankKind> kinds_;
  RandomExperts source_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Experts> experts_;
  std::vector<std::unique_ptr<RandomCall>> calls_;
};

/// Whether messages lie in device memory.
class GpuRank : public ::testing::TestWithParam<bool> {
 protected:
  GpuEngineOptions options() const {
    GpuEngineOptions chosen;
    chosen.messages_on_device = GetParam();
    return chosen;
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, GpuRank, ::testing::Bool(),
                         [](const auto& test) { return std::string(test.param ? "CudaAware" : "Staged"); });

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
      EXPECT_GE(progress.done_bytes, last.done_bytes);  // the same again where an upload takes long
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

TEST_P(GpuRank, MixedCpuAndGpuRanksAnswerAsOne) {
  const ModelConfig config = small_config(6, 3, 64, 32);
  const RankKind one{true, {.order = cuda::emulation::Order::Shuffled}, options(), {}};
  const RankKind other{true, {.tensor_copies = false}, options(), {}};
  Job job(config, 4, {one, {.gpu = false, .device = {}, .options = {}, .before_load = {}}, other});
  for (std::uint32_t block = 0; block < config.n_blocks(); ++block) {
    // Two calls on the way, of different sizes.
    const RandomCall& first = job.begin(block, 4, block + 1);
    const RandomCall& second = job.begin(block, 1 + block % 3, block + 50);
    EXPECT_EQ(job.finish(first), job.expected(first)) << "block " << block;
    EXPECT_EQ(job.finish(second), job.expected(second)) << "block " << block;
  }
}

TEST_P(GpuRank, LittleMemoryGivesTheSameBits) {
  const ModelConfig config = small_config(6, 3, 64, 32);
  const ExpertLimits limits = ExpertLimits::of(config, 4);
  RandomExperts source(config);
  GpuEngineOptions few = options();
  few.device_bytes = device_bytes_for(config, limits, 3) + (GetParam() ? 4096 : 0);
  GpuMemoryPlan plan;
  gpu_engine(cuda::emulated_device(), source, nullptr, 0, limits, few, &plan);
  EXPECT_LT(plan.resident_experts, 6u);
  EXPECT_EQ(plan.message_bytes > 0, GetParam());
  // The device has what is planned, and not a byte more.
  few.device_bytes = plan.device_bytes;
  Job job(config, 4, {{true, {.memory_bytes = plan.device_bytes}, few, {}}});
  for (const std::uint32_t block : {0u, 1u, 0u, 4u}) {
    const RandomCall& call = job.begin(block, 4, block + 7);
    EXPECT_EQ(job.finish(call), job.expected(call)) << "block " << block;
  }
  EXPECT_GT(job.experts().residency().misses, 0u);
}

const ModelConfig kFew = small_config(4, 2, 32, 32);

/// What the host is told by a rank whose second call does not succeed, while a third is on its way.
std::string told_of(const cuda::EmulatedOptions& device, const GpuEngineOptions& options,
                    std::uint32_t block = 0) {
  Job job(kFew, 2, {{true, device, options, {}}}, ExitCode::Resources);
  LoadProgress loaded;
  job.experts().await_ready([&](const LoadProgress& progress) { loaded = progress; });
  EXPECT_EQ(loaded.done_bytes, loaded.total_bytes);
  job.finish(job.begin(0, 1, 1));
  const RandomCall& fatal = job.begin(block, 1, 2);
  job.begin(2, 2, 3);
  return job.failure([&] { job.finish(fatal); });
}

TEST_P(GpuRank, ADeviceThatDiesEndsTheJobWithRankAndCause) {
  EXPECT_THAT(
      told_of({.fail_launch = 2}, options()),
      AllOf(HasSubstr("rank 1 (memory1)"), HasSubstr("the launch was told to fail"), HasSubstr("block 0")));
}

TEST_P(GpuRank, ADeviceThatHangsEndsTheJobWithRankAndCause) {
  GpuEngineOptions impatient = options();
  impatient.hang_after = std::chrono::milliseconds(100);
  EXPECT_THAT(
      told_of({.hang_launch = 2}, impatient),
      AllOf(HasSubstr("rank 1 (memory1)"), HasSubstr("GPU 0 (emulated device) hangs"), HasSubstr("0.1 s")));
}

TEST_P(GpuRank, AnUploadThatHangsEndsTheJobWithRankAndCause) {
  GpuEngineOptions impatient = options();
  impatient.hang_after = std::chrono::milliseconds(100);
  const auto hangs =
      AllOf(HasSubstr("rank 1 (memory1)"),
            HasSubstr("GPU 0 (emulated device) hangs: it has not finished an upload for 0.1 s"));
  {
    Job job(kFew, 2, {{true, {.hang_copy = 2}, impatient, {}}}, ExitCode::Resources);
    job.experts().set_phase("load");
    EXPECT_THAT(job.failure([&] { job.experts().await_ready({}); }), AllOf(hangs, HasSubstr("load")));
  }
  // Two slots: every call of one row fetches its three experts, the third through pinned memory that the
  // first leaves by an upload without end.
  const ExpertLimits limits = ExpertLimits::of(kFew, 2);
  impatient.device_bytes = device_bytes_for(kFew, limits, 2);
  if (GetParam()) {
    RandomExperts source(kFew);
    GpuMemoryPlan plan;
    gpu_engine(cuda::emulated_device(), source, nullptr, 0, limits, options(), &plan);
    impatient.device_bytes += plan.message_bytes;
  }
  std::uint64_t uploads = 2;
  {
    Job job(kFew, 2, {{true, {}, impatient, {}}});
    job.finish(job.begin(0, 1, 1));
    uploads += job.experts().residency().misses;
  }
  EXPECT_THAT(told_of({.hang_copy = uploads + 1}, impatient, 1), AllOf(hangs, HasSubstr("block 1")));
}

TEST_P(GpuRank, WhatArrivesBehindAFailureDoesNotGoToTheDevice) {
  Job job(kFew, 2, {{true, {.fail_launch = 1}, options(), {}}}, ExitCode::Resources);
  const RandomCall& fatal = job.begin(0, 1, 1);
  // The rank has told of its failure, so its device's memory is closed, and waits for the end. A message
  // before the end finds the receive that the rank has had open since it loaded.
  EXPECT_THAT(job.failure([&] {
    try {
      job.finish(fatal);
    } catch (const Error&) {
      const std::vector<std::byte> late(wire::kRequestHead, std::byte{1});
      job.communicator(0).send(late, 1, wire::kRequestTag);
      throw;
    }
  }),
              HasSubstr("the launch was told to fail"));
}

TEST_P(GpuRank, ADeviceWithoutTheMemoryItReportedEndsTheJobWhileLoading) {
  const auto take_all = [](cuda::Device& device) { device.allocate(device.free_bytes()); };
  Job job(small_config(4, 2, 32, 32), 2, {{true, {}, options(), take_all}}, ExitCode::Resources);
  job.experts().set_phase("load");
  EXPECT_THAT(job.failure([&] { job.experts().await_ready({}); }),
              AllOf(HasSubstr("rank 1 (memory1)"), HasSubstr("bytes asked for"), HasSubstr("load")));
}

/// The reply of an expert rank of this kind to one request, with its timing blanked.
std::vector<std::byte> reply_of(const RankKind& kind) {
  const ModelConfig config = small_config(4, 2, 32, 32);
  const RandomCall call(config, 1, 3, 77);
  wire::Header header;
  header.call = 1;
  header.block = 1;
  header.rows = 3;
  header.routes = static_cast<std::uint32_t>(call.routes.size());
  header.dim = config.dim;
  const wire::RequestLayout layout(header.rows, header.routes, header.dim);
  header.bytes = layout.bytes;
  std::vector<std::byte> request(layout.bytes);
  wire::store(request.data(), header);
  std::memcpy(request.data() + layout.codes, call.codes.data(), call.codes.size());
  std::memcpy(request.data() + layout.scales, call.scales.data(), call.scales.size());
  for (std::size_t index = 0; index < call.routes.size(); ++index) {
    const Route& route = call.routes[index];
    wire::store(request.data() + layout.routes + index * sizeof(wire::WireRoute),
                wire::WireRoute{route.row, route.expert, route.weight});
  }

  Job job(config, 3, {kind});
  job.experts().await_ready({});
  Communicator& host = job.communicator(0);
  host.send(request, 1, wire::kRequestTag);
  std::vector<std::byte> reply(wire::ReplyLayout(header.routes, header.dim).bytes + 1);
  Request receive = host.receive(reply, 1, wire::kReplyTag);
  std::size_t bytes = 0;
  while (!host.test(receive, &bytes)) std::this_thread::yield();
  reply.resize(bytes);
  wire::read_reply(reply, header, "rank 1");
  wire::store(reply.data() + sizeof(wire::Header), RankTiming{});
  return reply;
}

TEST_P(GpuRank, MessagesAreTheSameOnTheWire) {
  EXPECT_EQ(reply_of({true, {}, options(), {}}),
            reply_of({.gpu = false, .device = {}, .options = {}, .before_load = {}}));
}

TEST(GpuEngine, OnlyTheEndsOfMessagesOnTheDeviceGoThroughTheHost) {
  const ModelConfig config = small_config(4, 2, 32, 32);
  RandomExperts source(config);
  auto opened = cuda::emulated_device();
  cuda::Device& device = *opened;
  GpuEngineOptions options;
  options.messages_on_device = true;
  const ExpertLimits limits = ExpertLimits::of(config, 2);
  const auto engine = gpu_engine(std::move(opened), source, nullptr, 0, limits, options);
  EXPECT_EQ(engine->message_memory(), nullptr) << "memory is taken by load()";
  engine->load([](const LoadProgress&) {});
  MessageMemory& messages = *engine->message_memory();
  const std::span<std::byte> message = messages.allocate(200);
  const auto at = [&](std::size_t index) { return static_cast<std::byte>(index); };
  {
    const cuda::EmulatedAccess access(device);
    for (std::size_t index = 0; index < message.size(); ++index) message[index] = at(index);
  }
  const std::size_t tail = wire::request_tail(limits);
  ASSERT_EQ(tail, limits.max_routes * sizeof(wire::WireRoute));
  for (const std::size_t bytes : {std::size_t{200}, std::size_t{50}, std::size_t{7}}) {
    const MessageEnds ends = messages.read_ends(message.first(bytes), wire::kRequestHead, tail, {});
    EXPECT_EQ(ends.bytes, bytes);
    ASSERT_EQ(ends.head.size(), std::min(bytes, wire::kRequestHead));
    ASSERT_EQ(ends.tail.size(), std::min(bytes, tail));
    for (std::size_t index = 0; index < ends.head.size(); ++index) EXPECT_EQ(ends.head[index], at(index));
    for (std::size_t index = 0; index < ends.tail.size(); ++index)
      EXPECT_EQ(ends.tail[index], at(bytes - ends.tail.size() + index));
  }
  const std::vector<std::byte> head(sizeof(wire::ReplyHead), std::byte{0xEE});
  messages.write_head(message, head, {});
  const cuda::EmulatedAccess access(device);
  EXPECT_EQ(message[head.size() - 1], std::byte{0xEE});
  EXPECT_EQ(message[head.size()], at(head.size()));
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
