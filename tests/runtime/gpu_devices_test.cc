// Which GPU a rank takes, and which way its messages go: tables of facts.
#include "runtime/gpu_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "loader/error.h"
#include "runtime/gpu_transport.h"
#include "tests/runtime/support/memory_communicator.h"

namespace dsv41 {
namespace {

using ::testing::HasSubstr;
using Kind = DeviceEntry::Kind;

cuda::Discovery machine(int devices, int major = 9) {
  cuda::Discovery found;
  for (int index = 0; index < devices; ++index) {
    cuda::DeviceDescription device;
    device.index = index;
    device.name = "card";
    device.major = major;
    found.devices.push_back(device);
  }
  if (devices == 0) found.why_none = "no usable GPU: none";
  return found;
}

TEST(ChooseDevice, ByPlaceListAndFlag) {
  const auto chosen = [](const cuda::Discovery& found, LocalPlace place, const char* devices,
                         bool share = false) {
    const DeviceChoice choice = choose_device(found, place, parse_gpu_request(devices, share));
    EXPECT_EQ(choice.kind, Kind::Gpu);
    return choice.gpu.index;
  };
  EXPECT_EQ(chosen(machine(4), {2, 4}, "auto"), 2);
  EXPECT_EQ(chosen(machine(4), {1, 2}, "3,1"), 1);
  EXPECT_EQ(chosen(machine(1), {3, 4}, "auto"), 0) << "a launcher shows each rank its own device";
  EXPECT_EQ(chosen(machine(2), {2, 3}, "auto", true), 0);
  EXPECT_EQ(chosen(machine(2), {2, 3}, "1,cpu,0"), 0);
  const auto refused = [](const cuda::Discovery& found, LocalPlace place, const char* devices) {
    choose_device(found, place, parse_gpu_request(devices, false));
  };
  EXPECT_THROW(refused(machine(2), {2, 3}, "auto"), UsageError);
  EXPECT_THROW(refused(machine(2), {0, 3}, "auto"), UsageError) << "all ranks of the machine refuse";
  EXPECT_THROW(refused(machine(4), {0, 3}, "0,cpu"), UsageError);
  EXPECT_THROW(refused(machine(2), {0, 1}, "2"), UsageError);
  EXPECT_THROW(refused(machine(0), {0, 1}, "0"), ResourceError);
  EXPECT_THROW(refused(machine(1, 6), {0, 1}, "auto"), ResourceError);
  try {
    choose_device(machine(2), {2, 3}, {});
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("3 expert ranks on this machine and 2 GPUs"));
  }
}

TEST(ChooseDevice, TheCpuWhereItIsNamedOrThereIsNoGpu) {
  const DeviceChoice none = choose_device(machine(0), {0, 2}, {});
  EXPECT_EQ(none.kind, Kind::Cpu);
  EXPECT_EQ(none.why_cpu, "no usable GPU: none");
  for (const std::uint32_t place : {0u, 5u}) {
    const DeviceChoice asked = choose_device(machine(2), {place, 6}, parse_gpu_request("none", false));
    EXPECT_EQ(asked.kind, Kind::Cpu);
    EXPECT_EQ(asked.why_cpu, "");
  }
  EXPECT_EQ(choose_device(machine(2), {1, 2}, parse_gpu_request("0,cpu", false)).kind, Kind::Cpu);
  EXPECT_EQ(choose_device(machine(0), {1, 2}, parse_gpu_request("cpu,emulated", false)).kind, Kind::Emulated);
}

TEST(ChooseDevice, CountsWhoSharesADevice) {
  const auto sharers = [](int devices, LocalPlace place, const char* list, bool share) {
    return choose_device(machine(devices), place, parse_gpu_request(list, share)).sharers;
  };
  EXPECT_EQ(sharers(2, {0, 3}, "auto", true), 2u);
  EXPECT_EQ(sharers(2, {1, 3}, "auto", true), 1u);
  EXPECT_EQ(sharers(1, {1, 3}, "auto", true), 3u);
  EXPECT_EQ(sharers(1, {1, 3}, "auto", false), 1u) << "each rank sees one device, and it is another one";
  EXPECT_EQ(sharers(2, {0, 4}, "0,cpu,0,1", false), 2u) << "the agreement refuses it";
}

TEST(ChooseDevice, ListsOfDevices) {
  EXPECT_TRUE(parse_gpu_request("auto", false).entries.empty());
  const auto entries =
      parse_gpu_request("0,cpu,12,emulated:memory=4096:fail=3:hang=4:hang_copy=5", true).entries;
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].kind, Kind::Gpu);
  EXPECT_EQ(entries[1].kind, Kind::Cpu);
  EXPECT_EQ(entries[2].index, 12);
  EXPECT_EQ(entries[3].kind, Kind::Emulated);
  EXPECT_EQ(entries[3].emulated.memory_bytes, 4096u);
  EXPECT_EQ(entries[3].emulated.fail_launch, 3u);
  EXPECT_EQ(entries[3].emulated.hang_launch, 4u);
  EXPECT_EQ(entries[3].emulated.hang_copy, 5u);
  EXPECT_FALSE(entries[3].mpi_takes_memory);
  EXPECT_TRUE(parse_gpu_request("emulated:mpi=cuda:fail=3", false).entries[0].mpi_takes_memory);
  EXPECT_TRUE(parse_gpu_request("0", true).share);
  for (const char* text :
       {"", ",", "1,", "x", "-1", "1 2", "99999999999", "emulated:", "emulated:fail=x", "emulated:fail=0",
        "emulated:speed=1", "emulated:memory=1:", "emulatedx", "0,auto", "emulated:mpi=1", "0:mpi=cuda"})
    EXPECT_THROW(parse_gpu_request(text, false), UsageError) << text;
}

TEST(ChooseDevice, OpensWhatItChooses) {
  const auto communicators = testing::memory_communicators(2);
  EXPECT_EQ(open_rank_device(*communicators[1], parse_gpu_request("none", false)).device, nullptr);
  const RankDevice emulated = open_rank_device(*communicators[1], parse_gpu_request("emulated", false));
  EXPECT_EQ(emulated.device->description().name, "emulated device");
  EXPECT_TRUE(emulated.gpu.empty()) << "many ranks may emulate";
  if (cuda::discover_devices().devices.empty()) {
    EXPECT_THROW(open_rank_device(*communicators[1], parse_gpu_request("0", false)), ResourceError);
    EXPECT_NE(open_rank_device(*communicators[1], parse_gpu_request("auto", false)).why_cpu, "");
  }
}

TEST(LocalPlace, CountsTheExpertRanksOfAMachine) {
  // In memory every rank has a host of its own.
  const auto communicators = testing::memory_communicators(3);
  const LocalPlace place = local_place(*communicators[2]);
  EXPECT_EQ(place.index, 0u);
  EXPECT_EQ(place.count, 1u);
  EXPECT_EQ(local_place(*testing::memory_communicators(1)[0]).count, 1u) << "alone, the host rank computes";
}

TEST(ChooseTransport, NeedsTheLibraryAndTheTest) {
  const TransportFacts good{true, false, true, "Some MPI", ""};
  EXPECT_EQ(choose_transport(TransportRequest::Auto, good).transport, Transport::CudaAware);
  EXPECT_EQ(choose_transport(TransportRequest::Auto, good).why,
            "Some MPI supports CUDA and the self-test passed");
  EXPECT_EQ(choose_transport(TransportRequest::CudaAware, good).transport, Transport::CudaAware);
  EXPECT_EQ(choose_transport(TransportRequest::Staged, good).transport, Transport::Staged);
  EXPECT_EQ(choose_transport(TransportRequest::Staged, good).why, "as asked");
  struct Obstacle {
    TransportFacts facts;
    const char* why;
  };
  for (const Obstacle& obstacle :
       {Obstacle{{true, false, false, "Some MPI", ""}, "Some MPI has no CUDA support"},
        Obstacle{{true, false, true, "Some MPI", "self-test ended by signal 11"},
                 "self-test ended by signal 11"},
        Obstacle{{true, true, false, "", ""}, "a single process sends no messages"}}) {
    const TransportChoice choice = choose_transport(TransportRequest::Auto, obstacle.facts);
    EXPECT_EQ(choice.transport, Transport::Staged);
    EXPECT_EQ(choice.why, obstacle.why);
    try {
      choose_transport(TransportRequest::CudaAware, obstacle.facts);
      ADD_FAILURE() << obstacle.why;
    } catch (const ResourceError& error) {
      EXPECT_EQ(error.what(),
                "--transport cuda-aware: " + std::string(obstacle.why) + "; use --transport staged");
    }
  }
  const TransportFacts no_device{false, false, false, "", ""};
  EXPECT_EQ(choose_transport(TransportRequest::Auto, no_device).transport, Transport::Staged);
  EXPECT_EQ(choose_transport(TransportRequest::CudaAware, no_device).transport, Transport::Staged)
      << "CPU ranks have nothing to send";
  EXPECT_EQ(parse_transport("cuda-aware"), TransportRequest::CudaAware);
  EXPECT_THROW(parse_transport("fast"), UsageError);
}

TEST(SelfTest, SurvivesEveryEndOfTheChild) {
  using namespace std::chrono_literals;
  EXPECT_EQ(run_self_test({"/bin/sh", "-c", "exit 0"}, 10s), "");
  EXPECT_EQ(run_self_test({"/bin/sh", "-c", "exit 4"}, 10s), "self-test failed with exit code 4");
  EXPECT_EQ(run_self_test({"/bin/sh", "-c", "kill -SEGV $$"}, 10s), "self-test ended by signal 11");
  EXPECT_EQ(run_self_test({"/bin/sh", "-c", "sleep 100"}, 100ms), "self-test did not end within 100 ms");
  EXPECT_THAT(run_self_test({"/no/such/program"}, 10s), HasSubstr("self-test not started"));
  // The child must not believe that it is a rank of the job.
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  EXPECT_EQ(run_self_test({"/bin/sh", "-c", "test -z \"$OMPI_COMM_WORLD_RANK\""}, 10s), "");
  unsetenv("OMPI_COMM_WORLD_RANK");
}

}  // namespace
}  // namespace dsv41
