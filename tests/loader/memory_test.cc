// What the system says about memory, read from a made-up /proc and /sys.
#include "loader/memory.h"

#include <gtest/gtest.h>

#include <fstream>

#include "loader/error.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

class AvailableMemory : public ::testing::Test {
 protected:
  void file(const std::string& name, const std::string& content) {
    const auto path = root_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << content;
  }
  TemporaryDirectory root_;
};

TEST_F(AvailableMemory, IsUnknownWithoutProc) {
  EXPECT_EQ(available_memory(root_.path()), std::nullopt);
}

TEST_F(AvailableMemory, IsWhatTheMachineHas) {
  file("proc/meminfo", "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:    7000 kB\n");
  EXPECT_EQ(available_memory(root_.path()), 7000u * 1024);
}

TEST_F(AvailableMemory, IsWhatTheTightestControlGroupLeaves) {
  file("proc/meminfo", "MemAvailable:    7000 kB\n");
  file("proc/self/cgroup", "1:cpu:/x\n0::/job/step\n");
  file("sys/fs/cgroup/job/step/memory.max", "max\n");
  file("sys/fs/cgroup/job/step/memory.current", "5000\n");
  EXPECT_EQ(available_memory(root_.path()), 7000u * 1024);
  file("sys/fs/cgroup/job/memory.max", "1000000\n");
  file("sys/fs/cgroup/job/memory.current", "600000\n");
  EXPECT_EQ(available_memory(root_.path()), 400000u);
  file("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 100000\n");  // given up when wanted
  EXPECT_EQ(available_memory(root_.path()), 500000u);
  file("sys/fs/cgroup/job/memory.current", "2000000\n");  // above its limit for a moment
  EXPECT_EQ(available_memory(root_.path()), 0u);
}

TEST_F(AvailableMemory, SurvivesNonsense) {
  file("proc/meminfo", "MemAvailable:\nMemAvailable: x kB\n");
  file("proc/self/cgroup", "0::/\n0::\n\n");
  file("sys/fs/cgroup/memory.max", "-1\n");
  EXPECT_EQ(available_memory(root_.path()), std::nullopt);
}

TEST(LargeMemory, IsZeroedAndMoves) {
  LargeMemory memory(10 << 20);
  ASSERT_EQ(memory.size(), 10u << 20);
  EXPECT_EQ(memory.data()[(10 << 20) - 1], std::byte{0});
  memory.data()[5] = std::byte{7};
  const LargeMemory moved = std::move(memory);
  EXPECT_EQ(moved.data()[5], std::byte{7});
  EXPECT_THROW(LargeMemory(std::size_t{1} << 62), ResourceError);
}

}  // namespace
}  // namespace dsv41
