// Residency on a device (the emulated one): whatever fits, in whatever order experts are asked for, results
// are those of the CPU; misses, evictions and failures are counted and named.
#include "kernels/cuda/device_experts.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "kernels/cuda/emulated_device.h"
#include "tests/kernels/support/device_expert_case.h"

namespace dsv41::cuda {
namespace {

using testing::Codes;
using testing::ExpertsCase;
using testing::Scales;

ExpertsCase example(std::uint64_t seed, const std::vector<std::size_t>& rows) {
  return ExpertsCase(seed, 64, 32, rows, Codes::Uniform, Scales::Usual);
}

bool equal(std::span<const BFloat16> a, std::span<const BFloat16> b) {
  return a.size() == b.size() && testing::first_difference(a, b) == a.size();
}

TEST(DeviceExperts, SameBitsForEveryAmountOfMemory) {
  const std::vector<std::size_t> rows = {1, 2, 1, 3, 1, 2};
  const ExpertsCase calls[] = {example(1, rows), example(2, rows), example(3, rows)};
  for (const std::uint32_t slots : {1u, 2u, 3u, 6u, 18u})
    for (const std::uint32_t pinned : {2u, 5u}) {
      DeviceExpertsOptions options = calls[0].options();
      options.max_rows = 8;
      options.slots = slots;
      options.pinned_slots = pinned;
      // Block b holds the experts of call b.
      DeviceExperts experts(emulated_device(), options,
                            [&](ExpertKey key) { return calls[key.block].experts[key.expert].matrices(); });
      for (int round = 0; round < 2; ++round)
        for (std::uint32_t block : {0u, 1u, 0u, 2u}) {
          std::vector<BFloat16> out(calls[block].route_count * calls[block].dim);
          experts.begin(calls[block].x(), calls[block].tasks(block), 10.0f);
          experts.finish(out);
          ASSERT_TRUE(equal(out, calls[block].expected(10.0f)))
              << "slots " << slots << ", pinned " << pinned << ", block " << block;
        }
      EXPECT_EQ(experts.counters().hits + experts.counters().misses, 2u * 4 * rows.size());
      if (slots == 18) {
        EXPECT_EQ(experts.counters().misses, 18u) << "each expert is fetched once when all fit";
      }
    }
}

/// A call whose rows lie in memory of the device, in buffers of their own.
struct RowsOnDevice {
  RowsOnDevice(Device& owner, const ExpertsCase& call)
      : device(owner),
        values(call.route_count * call.dim),
        input(owner, DeviceBuffer::Kind::Device, call.codes.size() + call.scales.size()),
        output(owner, DeviceBuffer::Kind::Device, values * sizeof(BFloat16)) {
    const EmulatedAccess access(device);
    std::copy(call.codes.begin(), call.codes.end(), bytes());
    std::copy(call.scales.begin(), call.scales.end(), bytes() + call.codes.size());
    x = {bytes(), bytes() + call.codes.size(), call.rows, call.dim};
  }
  std::uint8_t* bytes() const { return reinterpret_cast<std::uint8_t*>(input.data()); }
  BFloat16* rows() const { return reinterpret_cast<BFloat16*>(output.data()); }
  std::vector<BFloat16> result() const {
    const EmulatedAccess access(device);
    return {rows(), rows() + values};
  }

  Device& device;
  std::size_t values;
  DeviceBuffer input, output;
  QuantizedRows x;
};

TEST(DeviceExperts, RowsOnTheDeviceAreReadAndWrittenInPlace) {
  const ExpertsCase calls[] = {example(21, {1, 2, 9, 3, 1}), example(22, {1, 0, 1, 1, 2})};
  for (const bool tensor_copies : {true, false})
    for (const std::uint32_t slots : {2u, 10u}) {
      DeviceExpertsOptions options = calls[0].options();
      options.slots = slots;
      options.in_place = true;
      DeviceExperts experts(emulated_device({.tensor_copies = tensor_copies}), options,
                            [&](ExpertKey key) { return calls[key.block].experts[key.expert].matrices(); });
      for (const std::uint32_t block : {0u, 1u, 0u}) {
        const RowsOnDevice rows(experts.device(), calls[block]);
        experts.begin_in_place(rows.x, calls[block].tasks(block), 10.0f, rows.rows());
        while (!experts.ready()) {
        }
        experts.finish({});
        EXPECT_TRUE(equal(rows.result(), calls[block].expected(10.0f)))
            << "slots " << slots << ", block " << block;
      }
    }
}

TEST(DeviceExperts, RowsOnTheDeviceNeedNoRoomForCopies) {
  DeviceExpertsOptions options = example(23, {3, 2}).options();
  const DeviceMemoryPlan staged = DeviceMemoryPlan::of(options);
  options.in_place = true;
  const DeviceMemoryPlan in_place = DeviceMemoryPlan::of(options);
  const std::size_t rows = options.max_routes * std::size_t{options.dim} * sizeof(BFloat16);
  EXPECT_GE(staged.device_bytes, in_place.device_bytes + rows);
  EXPECT_GE(staged.pinned_bytes, in_place.pinned_bytes + rows);
  DeviceExperts fits(emulated_device({.memory_bytes = in_place.device_bytes}), options, {});
  EXPECT_EQ(fits.device().free_bytes(), 0u);
}

TEST(DeviceExpertsDeathTest, MemoryOfTheDeviceIsOutOfTheHostsReach) {
  const auto device = emulated_device();
  const DeviceBuffer buffer(*device, DeviceBuffer::Kind::Device, 100);
  EXPECT_DEATH(buffer.data()[0] = std::byte{1}, "");
  {
    const EmulatedAccess access(*device);
    buffer.data()[99] = std::byte{1};
  }
  EXPECT_DEATH(buffer.data()[99] = std::byte{2}, "");
}

TEST(DeviceExperts, OneLaunchWhenEverythingIsResident) {
  const ExpertsCase call = example(4, {1, 0, 2, 1});
  DeviceExperts experts(emulated_device(), call.options(),
                        [&](ExpertKey key) { return call.experts[key.expert].matrices(); });
  const ExpertKey keys[] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}};
  std::vector<std::uint64_t> progress;
  experts.load(keys, [&](std::uint64_t bytes, std::uint64_t total) {
    progress.push_back(bytes);
    EXPECT_LE(bytes, total);
  });
  EXPECT_EQ(progress.size(), 4u);
  std::vector<BFloat16> out(call.route_count * call.dim);
  experts.begin(call.x(), call.tasks(), 10.0f);
  while (!experts.ready()) {
  }
  experts.finish(out);
  EXPECT_TRUE(equal(out, call.expected(10.0f)));
  EXPECT_EQ(experts.counters().launches, 1u);
  EXPECT_EQ(experts.counters().hits, 3u) << "experts without rows are not touched";
  EXPECT_EQ(experts.counters().misses, 0u);
}

TEST(DeviceExperts, LoadFillsDeviceThenPinnedMemory) {
  const ExpertsCase call = example(5, {1, 1, 1, 1, 1, 1});
  DeviceExpertsOptions options = call.options();
  options.slots = 2;
  options.pinned_slots = 4;
  DeviceExperts experts(emulated_device(), options,
                        [&](ExpertKey key) { return call.experts[key.expert].matrices(); });
  const ExpertKey keys[] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}};
  experts.load(keys, nullptr);
  EXPECT_EQ(experts.counters().bytes_uploaded, 2 * DeviceMemoryPlan::of(options).expert_bytes);
  EXPECT_EQ(experts.counters().bytes_read, 6 * DeviceMemoryPlan::of(options).expert_bytes);
  std::vector<BFloat16> out(call.route_count * call.dim);
  experts.begin(call.x(), call.tasks(), 10.0f);
  experts.finish(out);
  EXPECT_TRUE(equal(out, call.expected(10.0f)));
  EXPECT_EQ(experts.counters().bytes_read, 6 * DeviceMemoryPlan::of(options).expert_bytes)
      << "pinned experts are not read again";
}

TEST(DeviceExperts, AnEmptyCallIsACall) {
  const ExpertsCase call = example(6, {0, 0});
  DeviceExperts experts(emulated_device(), call.options(),
                        [&](ExpertKey key) { return call.experts[key.expert].matrices(); });
  experts.begin(call.x(), call.tasks(), 10.0f);
  experts.finish({});
  EXPECT_EQ(experts.counters().launches, 0u);
}

TEST(DeviceExperts, RefusesCallsItIsNotSizedFor) {
  const ExpertsCase call = example(7, {2, 1});
  const auto source = [&](ExpertKey key) { return call.experts[key.expert].matrices(); };
  DeviceExpertsOptions small = call.options();
  small.max_routes = 2;
  DeviceExperts experts(emulated_device(), small, source);
  EXPECT_THROW(experts.begin(call.x(), call.tasks(), 10.0f), std::invalid_argument);
  DeviceExpertsOptions wrong = call.options();
  wrong.inter = 64;
  DeviceExperts others(emulated_device(), wrong, source);
  EXPECT_THROW(others.begin(call.x(), call.tasks(), 10.0f), std::invalid_argument);
  std::vector<DeviceExpertTask> tasks = call.tasks();
  const std::uint32_t beyond[] = {0, static_cast<std::uint32_t>(call.rows)};
  tasks[0].rows = beyond;
  DeviceExperts third(emulated_device(), call.options(), source);
  EXPECT_THROW(third.begin(call.x(), tasks, 10.0f), std::invalid_argument);
  std::vector<DeviceExpertTask> elsewhere = call.tasks();
  const std::uint32_t outputs[] = {0, static_cast<std::uint32_t>(call.route_count)};
  elsewhere[0].outputs = outputs;
  EXPECT_THROW(third.begin(call.x(), elsewhere, 10.0f), std::invalid_argument);
  EXPECT_THROW(third.begin_in_place(call.x(), call.tasks(), 10.0f, nullptr), std::logic_error)
      << "rows on the device in an object that is not made for them";
}

TEST(DeviceExperts, NamesWhatFails) {
  const ExpertsCase call = example(8, {1});
  const auto source = [&](ExpertKey key) { return call.experts[key.expert].matrices(); };
  try {
    DeviceExperts experts(emulated_device({.memory_bytes = 4096}), call.options(), source);
    FAIL() << "more memory than there is";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.fault(), DeviceFault::OutOfMemory);
  }
  DeviceExperts experts(emulated_device({.fail_launch = 2}), call.options(), source);
  std::vector<BFloat16> out(call.route_count * call.dim);
  experts.begin(call.x(), call.tasks(), 10.0f);
  experts.finish(out);
  experts.begin(call.x(), call.tasks(), 10.0f);
  try {
    experts.finish(out);
    FAIL() << "a launch that fails";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.fault(), DeviceFault::Failed);
  }
  // The error stays, whatever is tried next; and destruction is no trouble.
  EXPECT_THROW(experts.ready(), DeviceError);
  EXPECT_THROW(experts.begin(call.x(), call.tasks(), 10.0f), DeviceError);
}

TEST(DeviceExperts, SaysThatItIsAliveAfterEveryExpertThatIsFetched) {
  const ExpertsCase call = example(10, {1, 1, 1, 0});
  DeviceExperts experts(emulated_device(), call.options(),
                        [&](ExpertKey key) { return call.experts[key.expert].matrices(); });
  std::vector<BFloat16> out(call.route_count * call.dim);
  int alive = 0;
  experts.begin(call.x(), call.tasks(), 10.0f, [&] { ++alive; });
  experts.finish(out);
  EXPECT_EQ(alive, 3);
  experts.begin(call.x(), call.tasks(), 10.0f, [&] { ++alive; });
  experts.finish(out);
  EXPECT_EQ(alive, 3) << "nothing is fetched twice";
}

TEST(DeviceExperts, ADeviceThatHangsCanBeAbandoned) {
  const ExpertsCase call = example(11, {1});
  const auto source = [&](ExpertKey key) { return call.experts[key.expert].matrices(); };
  DeviceExperts experts(emulated_device({.hang_launch = 1}), call.options(), source);
  experts.begin(call.x(), call.tasks(), 10.0f);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(experts.ready());
  experts.abandon();  // or the test would never end
}

TEST(DeviceExperts, ThePlanIsWhatIsAllocated) {
  const ExpertsCase call = example(9, {3, 2});
  const DeviceMemoryPlan plan = DeviceMemoryPlan::of(call.options());
  const auto source = [&](ExpertKey key) { return call.experts[key.expert].matrices(); };
  DeviceExperts fits(emulated_device({.memory_bytes = plan.device_bytes}), call.options(), source);
  EXPECT_EQ(fits.device().free_bytes(), 0u);
  EXPECT_THROW(
      DeviceExperts(emulated_device({.memory_bytes = plan.device_bytes - 1}), call.options(), source),
      DeviceError);
}

TEST(Discovery, WithoutADeviceThereIsAReason) {
  const Discovery found = discover_devices();
  if (found.devices.empty()) {
    EXPECT_FALSE(found.why_none.empty());
    EXPECT_THROW(open_device(0), DeviceError);
  } else {
    EXPECT_TRUE(found.why_none.empty());
  }
}

}  // namespace
}  // namespace dsv41::cuda
