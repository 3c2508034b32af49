// How far loading has come, as a terminal and as a file or a launcher gets to see it.
#include "tools/load_line.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace dsv41 {
namespace {

using namespace std::chrono_literals;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

LoadLine::Clock::time_point the_time;
LoadLine::Clock::time_point now() {
  return the_time;
}

/// What is written to one end, a terminal or a pipe, comes out at the other.
class Output {
 public:
  explicit Output(bool terminal) {
    int ends[2] = {-1, -1};
    if ((terminal ? openpty(&ends[0], &ends[1], nullptr, nullptr, nullptr) : pipe(ends)) != 0) std::abort();
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    reader_ = ends[0];
    file = fdopen(ends[1], "w");
  }
  ~Output() {
    std::fclose(file);
    close(reader_);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  std::string text() const {
    std::string all(4096, '\0');
    const ssize_t bytes = read(reader_, all.data(), all.size());
    all.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
    return all;
  }
  std::FILE* file = nullptr;

 private:
  int reader_ = -1;
};

class LoadLineOf : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Output, LoadLineOf, ::testing::Bool(),
                         [](const auto& test) { return std::string(test.param ? "Terminal" : "Pipe"); });

TEST_P(LoadLineOf, IsSilentWhenLoadingIsQuickOrQuiet) {
  const Output output(GetParam());
  for (const bool quiet : {false, true}) {
    LoadLine line(quiet, output.file, now);
    the_time += quiet ? 1h : 100ms;
    line.show({kGiB, 2 * kGiB});
    the_time += quiet ? 1h : 50ms;
    line.show({2 * kGiB, 2 * kGiB});
    line.end();
  }
  LoadLine nothing(false, output.file, now);
  the_time += 1h;
  nothing.show({0, 0});
  nothing.end();
  EXPECT_EQ(output.text(), "");
}

TEST(LoadLine, OnATerminalIsABarThatIsRedrawn) {
  const Output output(true);
  LoadLine line(false, output.file, now);
  the_time += 1s;
  line.show({1 * kGiB, 4 * kGiB});
  EXPECT_EQ(output.text(),
            "\rdsv41-mpi: experts [#######                       ] 1.00 of 4.00 GiB, 1.00 GiB/s\x1b[K");
  the_time += 100ms;
  line.show({2 * kGiB, 4 * kGiB});
  EXPECT_EQ(output.text(), "") << "so soon";
  the_time += 900ms;
  line.show({3 * kGiB, 4 * kGiB});
  EXPECT_THAT(output.text(), StartsWith("\rdsv41-mpi: experts [######################        ] 3.00 of"));
  the_time += 500ms;
  line.end();
  const std::string last = output.text();
  EXPECT_THAT(last, HasSubstr("[##############################] 4.00 of 4.00 GiB, 1.60 GiB/s"));
  EXPECT_THAT(last, EndsWith("\x1b[K\r\n")) << "the cursor is left on a line of its own";
}

TEST(LoadLine, ElsewhereIsALineAtTimes) {
  const Output output(false);
  LoadLine line(false, output.file, now);
  the_time += 1s;
  line.show({1 * kGiB, 4 * kGiB});
  EXPECT_EQ(output.text(), "") << "so soon";
  the_time += 1s;
  line.show({2 * kGiB, 4 * kGiB});
  EXPECT_EQ(output.text(), "dsv41-mpi: experts 2.00 of 4.00 GiB, 1.00 GiB/s\n");
  the_time += 500ms;
  line.show({3 * kGiB, 4 * kGiB});
  line.end();
  EXPECT_EQ(output.text(), "dsv41-mpi: experts 4.00 of 4.00 GiB, 1.60 GiB/s\n");
}

TEST(LoadLine, UnderALauncherThereIsNoBarEvenOnATerminal) {
  setenv("PMIX_RANK", "0", 1);
  const Output output(true);
  LoadLine line(false, output.file, now);
  unsetenv("PMIX_RANK");
  the_time += 2s;
  line.show({1 * kGiB, 4 * kGiB});
  const std::string text = output.text();
  EXPECT_THAT(text, HasSubstr("experts 1.00 of 4.00 GiB"));
  EXPECT_THAT(text, Not(HasSubstr("[")));
}

}  // namespace
}  // namespace dsv41
