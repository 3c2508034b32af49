// Rows that are gathered directly or held in memory are those of the mapped file, bit for bit, whatever the
// cache holds; what was asked for and read is counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "engram/rows.h"
#include "loader/checkpoint.h"
#include "loader/error.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

using Method = ReadQueueOptions::Method;
namespace fs = std::filesystem;

std::vector<std::uint64_t> random_ids(std::mt19937_64& draw, std::uint64_t rows, std::size_t count) {
  std::vector<std::uint64_t> ids(count);
  for (std::uint64_t& id : ids) id = draw() % 3 == 0 ? draw() % 40 : draw() % rows;  // some come often
  return ids;
}

struct Mini {
  explicit Mini(const fs::path& directory = fs::path(DSV41_TEST_CHECKPOINTS) / "mini")
      : checkpoint(directory), weights(host_weights(checkpoint)), compute(plain_ops(), 2) {}
  std::vector<BFloat16> collect(EngramRows& source, std::size_t table, std::size_t ids) {
    std::vector<BFloat16> rows(ids * checkpoint.config().engram_head_dim);
    source.collect(table, rows);
    return rows;
  }
  Checkpoint checkpoint;
  ModelWeights weights;
  Compute compute;
};

struct Source {
  const char* name;
  EngramMode mode;
  std::uint64_t cache_bytes;
  Method method;
};
void PrintTo(const Source& source, std::ostream* out) {
  *out << source.name;
}

class RowSources : public ::testing::TestWithParam<Source> {
 protected:
  static EngramOptions options() { return {GetParam().mode, GetParam().cache_bytes, GetParam().method}; }
};

TEST_P(RowSources, EqualTheMappedRows) {
  Mini mini;
  constexpr std::size_t most = 600;
  const auto mapped = mapped_engram_rows(mini.weights, mini.compute);
  const auto source = engram_rows(mini.weights, mini.compute, options(), most);
  source->load({});
  std::mt19937_64 draw(5);
  for (int step = 0; step < 30; ++step) {
    std::size_t asked[2];
    for (std::size_t table = 0; table < 2; ++table) {
      const auto ids = random_ids(draw, mini.weights.engram[table].rows, 1 + draw() % most);
      asked[table] = ids.size();
      mapped->request(table, ids);
      source->request(table, ids);
    }
    if (step % 7 == 3) continue;  // a step whose rows nobody wanted in the end
    for (const std::size_t table : {1, 0}) {
      if (step % 5 == 2 && table == 1) continue;
      EXPECT_EQ(mini.collect(*source, table, asked[table]), mini.collect(*mapped, table, asked[table]))
          << step;
    }
  }
  EXPECT_EQ(source->counters().asked, mapped->counters().asked);
}

TEST_P(RowSources, RefuseRowsThatDoNotExist) {
  Mini mini;
  const auto source = engram_rows(mini.weights, mini.compute, options(), 4);
  source->load({});
  EXPECT_THROW(source->request(0, std::vector<std::uint64_t>{0, mini.weights.engram[0].rows}),
               CheckpointError);
  source->request(0, std::vector<std::uint64_t>{0, 1});
  std::vector<BFloat16> too_small(32);
  EXPECT_THROW(source->collect(0, too_small), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(
    Sources, RowSources,
    ::testing::Values(Source{"mmap", EngramMode::Mmap, 0, Method::Auto},
                      Source{"resident", EngramMode::Resident, 0, Method::Auto},
                      Source{"resident_threads", EngramMode::Resident, 0, Method::Threads},
                      Source{"direct_smallest_cache", EngramMode::Direct, 1, Method::Auto},
                      Source{"direct_small_cache", EngramMode::Direct, 100000, Method::Auto},
                      Source{"direct_all", EngramMode::Direct, 1 << 30, Method::Auto},
                      Source{"direct_threads", EngramMode::Direct, 1, Method::Threads}),
    [](const auto& source) { return std::string(source.param.name); });

TEST(DirectRows, CountWhatTheyAskFor) {
  Mini mini;
  const auto source =
      direct_engram_rows(mini.weights, mini.compute, {EngramMode::Direct, 1 << 30, Method::Auto}, 10);
  source->load({});
  source->request(0, std::vector<std::uint64_t>{7, 3, 7, 3000, 7});
  EXPECT_EQ(source->counters().asked, 5u);
  EXPECT_EQ(source->counters().distinct, 3u);
  EXPECT_EQ(source->counters().cached, 0u);
  // Rows 3 and 7 lie together; 3000 lies apart in the codes (32 bytes a row), close by in the scales (one
  // byte).
  EXPECT_EQ(source->counters().reads, 3u);
  EXPECT_GE(source->counters().read_bytes, 3u * 33);
  mini.collect(*source, 0, 5);
  source->request(0, std::vector<std::uint64_t>{3000, 8});
  EXPECT_EQ(source->counters().distinct, 5u);
  EXPECT_EQ(source->counters().cached, 1u);
  mini.collect(*source, 0, 2);
  const std::uint64_t read = source->counters().read_bytes;
  source->request(0, std::vector<std::uint64_t>{8, 3, 7});
  mini.collect(*source, 0, 3);
  EXPECT_EQ(source->counters().read_bytes, read) << "all of them are in memory";
}

TEST(ResidentRows, SayHowFarTheyAre) {
  Mini mini;
  const auto source = resident_engram_rows(mini.weights, mini.compute, {});
  const std::uint64_t bytes = 33 * (mini.weights.engram[0].rows + mini.weights.engram[1].rows);
  EXPECT_EQ(source->memory_bytes(), bytes);
  EXPECT_THROW(source->request(0, {}), std::logic_error) << "not loaded yet";
  std::uint64_t last = 0;
  source->load([&](std::uint64_t done, std::uint64_t total) {
    EXPECT_EQ(total, bytes);
    EXPECT_GE(done, last);
    last = done;
  });
  EXPECT_EQ(last, bytes);
}

/// The shard that holds a table is cut while the program runs.
class CutWhileInUse : public ::testing::TestWithParam<Source> {};
TEST_P(CutWhileInUse, IsAnErrorThatNamesTheFile) {
  TemporaryDirectory directory;
  fs::copy(fs::path(DSV41_TEST_CHECKPOINTS) / "mini", directory.path() / "mini", fs::copy_options::recursive);
  Mini mini(directory.path() / "mini");
  const fs::path shard = mini.weights.engram[1].codes_location.file->path();
  fs::permissions(shard, fs::perms::owner_all);
  const auto source = engram_rows(mini.weights, mini.compute,
                                  {GetParam().mode, GetParam().cache_bytes, GetParam().method}, 8);
  const std::uint64_t last_row = mini.weights.engram[1].rows - 1;
  const std::uint64_t cut =
      std::max(mini.weights.engram[1].codes_location.offset, mini.weights.engram[1].scales_location.offset) +
      1;
  const auto provoke = [&] {
    source->load({});
    source->request(0, std::vector<std::uint64_t>{1, 2});
    source->request(1, std::vector<std::uint64_t>{last_row});
    mini.collect(*source, 1, 1);
  };
  fs::resize_file(shard, cut);
  try {
    provoke();
    FAIL() << "the row is gone";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(shard.string()));
  }
  if (GetParam().mode == EngramMode::Direct) {  // the other table lies in another shard
    source->request(0, std::vector<std::uint64_t>{1, 2});
    EXPECT_NO_THROW(mini.collect(*source, 0, 2));
  }
}
INSTANTIATE_TEST_SUITE_P(Sources, CutWhileInUse,
                         ::testing::Values(Source{"direct", EngramMode::Direct, 1, Method::Auto},
                                           Source{"direct_threads", EngramMode::Direct, 1, Method::Threads},
                                           Source{"resident", EngramMode::Resident, 0, Method::Auto}),
                         [](const auto& source) { return std::string(source.param.name); });

}  // namespace
}  // namespace dsv41
