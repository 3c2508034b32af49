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
  EXPECT_EQ(choose_device(machine(4), {2, 4}, {}).index, 2);
  EXPECT_EQ(choose_device(machine(4), {1, 2}, {false, {3, 1}, false}).index, 1);
  EXPECT_EQ(choose_device(machine(1), {3, 4}, {}).index, 0) << "a launcher shows each rank its own device";
  EXPECT_EQ(choose_device(machine(2), {2, 3}, {false, {}, true}).index, 0);
  EXPECT_THROW(choose_device(machine(2), {2, 3}, {}), UsageError);
  EXPECT_THROW(choose_device(machine(2), {0, 1}, {false, {2}, false}), UsageError);
  EXPECT_THROW(choose_device(machine(0), {0, 1}, {}), ResourceError);
  EXPECT_THROW(choose_device(machine(1, 6), {0, 1}, {}), ResourceError);
  try {
    choose_device(machine(2), {2, 3}, {});
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("3 expert ranks on this machine and 2 GPUs"));
  }
}

TEST(ChooseDevice, ListsOfDevices) {
  EXPECT_TRUE(parse_gpu_request("auto", false).devices.empty());
  EXPECT_TRUE(parse_gpu_request("emulated", false).emulated);
  EXPECT_EQ(parse_gpu_request("3", false).devices, std::vector<int>{3});
  EXPECT_EQ(parse_gpu_request("0,2,1", true).devices, (std::vector<int>{0, 2, 1}));
  EXPECT_TRUE(parse_gpu_request("0", true).share);
  for (const char* text : {"", ",", "1,", "x", "-1", "1 2", "99999999999"})
    EXPECT_THROW(parse_gpu_request(text, false), UsageError) << text;
}

TEST(ChooseDevice, OpensWhatItChooses) {
  const auto communicators = testing::memory_communicators(2);
  const RankDevice emulated = open_rank_device(*communicators[1], parse_gpu_request("emulated", false));
  EXPECT_EQ(emulated.device->description().name, "emulated device");
  EXPECT_TRUE(emulated.gpu.empty()) << "many ranks may emulate";
  if (cuda::discover_devices().devices.empty()) {
    EXPECT_THROW(open_rank_device(*communicators[1], parse_gpu_request("auto", false)), ResourceError);
  }
}

TEST(LocalPlace, CountsTheExpertRanksOfAMachine) {
  // In memory every rank has a host of its own.
  const auto communicators = testing::memory_communicators(3);
  const LocalPlace place = local_place(*communicators[2]);
  EXPECT_EQ(place.index, 0u);
  EXPECT_EQ(place.count, 1u);
}

TEST(LocalPlace, ReadsTheLaunchersVariables) {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"}) unsetenv(name);
  EXPECT_FALSE(local_place_of_environment().has_value());
  setenv("SLURM_LOCALID", "3", 1);
  setenv("SLURM_NTASKS_PER_NODE", "5(x2)", 1);
  EXPECT_EQ(local_place_of_environment()->index, 3u);
  EXPECT_EQ(local_place_of_environment()->count, 5u);
  setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
  EXPECT_EQ(local_place_of_environment()->index, 1u) << "the launcher that is nearer";
  unsetenv("SLURM_LOCALID");
  unsetenv("SLURM_NTASKS_PER_NODE");
  setenv("OMPI_COMM_WORLD_LOCAL_RANK", "x", 1);
  EXPECT_FALSE(local_place_of_environment().has_value());
  unsetenv("OMPI_COMM_WORLD_LOCAL_RANK");
}

TEST(ChooseTransport, NeedsTheLibraryAndTheTest) {
  const TransportFacts good{true, true, "Some MPI", "", true};
  EXPECT_EQ(choose_transport(TransportRequest::Auto, good).transport, Transport::CudaAware);
  EXPECT_EQ(choose_transport(TransportRequest::Staged, good).transport, Transport::Staged);
  const TransportFacts no_support{true, false, "Some MPI", "", true},
      crashed{true, true, "Some MPI", "self-test ended by signal 11", true},
      no_device{false, false, "", "", true};
  for (const TransportFacts& facts : {no_support, crashed, no_device})
    EXPECT_EQ(choose_transport(TransportRequest::Auto, facts).transport, Transport::Staged);
  EXPECT_EQ(choose_transport(TransportRequest::Auto, no_support).why, "Some MPI has no CUDA support");
  EXPECT_EQ(choose_transport(TransportRequest::Auto, crashed).why, "self-test ended by signal 11");
  EXPECT_THROW(choose_transport(TransportRequest::CudaAware, crashed), ResourceError);
  EXPECT_EQ(choose_transport(TransportRequest::CudaAware, no_device).transport, Transport::Staged)
      << "CPU ranks have nothing to send";
  const TransportFacts today{true, true, "Some MPI", ""};
  EXPECT_EQ(choose_transport(TransportRequest::Auto, today).transport, Transport::Staged);
  EXPECT_THROW(choose_transport(TransportRequest::CudaAware, today), ResourceError);
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
