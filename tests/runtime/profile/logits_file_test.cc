// The file of --dump-logits: content, byte equality however rows arrive, errors.
#include "runtime/profile/logits_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "loader/error.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

std::string temporary(const std::string& name) {
  return process_directory() / name;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Rows {
  std::vector<std::uint32_t> ids;
  std::vector<float> logits;
};
Rows make_rows(std::size_t rows, std::uint32_t vocab) {
  Rows result{std::vector<std::uint32_t>(rows), std::vector<float>(rows * vocab)};
  std::iota(result.ids.begin(), result.ids.end(), 7u);
  for (std::size_t i = 0; i < result.logits.size(); ++i)
    result.logits[i] = 0.25f * static_cast<float>(i % 1021) - 3.0f;
  return result;
}
void write(const std::string& path, const Rows& rows, std::uint32_t vocab, std::size_t at_once) {
  LogitsFile file(path, vocab);
  for (std::size_t row = 0; row < rows.ids.size(); row += at_once) {
    const std::size_t count = std::min(at_once, rows.ids.size() - row);
    file.append(std::span(rows.ids).subspan(row, count),
                std::span(rows.logits).subspan(row * vocab, count * vocab));
  }
  file.close();
}

struct Case {
  std::size_t rows;
  std::uint32_t vocab;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.rows << " rows of " << c.vocab;
}
class LogitsFileContent : public testing::TestWithParam<Case> {};

TEST_P(LogitsFileContent, ReadsBackAndIsEqualByteForByteInAnySplit) {
  const auto [count, vocab] = GetParam();
  const Rows rows = make_rows(count, vocab);
  const std::string one = temporary("logits_one.h5"), other = temporary("logits_other.h5");
  write(one, rows, vocab, count + 1);
  for (const std::size_t at_once : {1, 3, 17, 300}) {
    write(other, rows, vocab, at_once);
    EXPECT_TRUE(bytes_of(one) == bytes_of(other)) << at_once << " rows at once";
  }
  const hdf5::Reader reader(one);
  EXPECT_EQ(reader.shape("/ids"), (std::vector<std::uint64_t>{count}));
  EXPECT_EQ(reader.shape("/logits"), (std::vector<std::uint64_t>{count, vocab}));
  const auto ids = reader.read_int64("/ids", count);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), rows.ids.begin(), rows.ids.end()));
  EXPECT_EQ(reader.read_float("/logits", count), rows.logits);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LogitsFileContent,
                         testing::Values(Case{0, 768}, Case{1, 768}, Case{50, 768}, Case{1100, 768},
                                         Case{5, 129280}));

TEST(LogitsFile, OneChangedValueChangesTheFile) {
  Rows rows = make_rows(40, 768);
  const std::string one = temporary("logits_one.h5"), other = temporary("logits_other.h5");
  write(one, rows, 768, 8);
  rows.logits[20000] += 1;
  write(other, rows, 768, 8);
  EXPECT_FALSE(bytes_of(one) == bytes_of(other));
}

TEST(LogitsFile, PathsThatCannotBeWritten) {
  for (const char* path : {"/nonexistent/logits.h5", "/", "/proc/logits.h5"}) {
    try {
      LogitsFile file(path, 8);
      FAIL() << path;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("cannot write ") + path), std::string::npos)
          << error.what();
    }
  }
  EXPECT_THROW(LogitsFile("/dev/full", 8), Error);
}

}  // namespace
}  // namespace dsv41
