// Many reads at a time, through io_uring and through threads: the bytes of the file, whatever is asked for,
// and an error that names the file when they are not there.
#include "loader/read_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>

#include "loader/error.h"
#include "tests/loader/support/temporary_directory.h"

namespace dsv41 {
namespace {

using Method = ReadQueueOptions::Method;

std::vector<char> random_file(const std::filesystem::path& path, std::size_t bytes) {
  std::mt19937_64 draw(bytes);
  std::vector<char> content(bytes);
  for (char& byte : content) byte = static_cast<char>(draw());
  std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(bytes));
  return content;
}

/// Keeps what arrives in buffers of the queue.
class Collecting : public ReadBatch {
 public:
  std::vector<std::vector<std::byte>> got;

 protected:
  void arrived(std::size_t index, const std::byte* data) override {
    got[index].assign(data, data + pieces[index].needed);
  }
};

class Queue : public ::testing::TestWithParam<Method> {
 protected:
  void SetUp() override {
    ReadQueueOptions options;
    options.method = GetParam();
    options.depth = 8;
    options.buffer_bytes = 40000;
    try {
      queue_.emplace(options);
    } catch (const ResourceError& error) {
      GTEST_SKIP() << error.what();
    }
  }
  /// A piece around [offset, offset + bytes) of a file of `size` bytes.
  static ReadPiece piece(const DirectFile& file, std::uint64_t offset, std::uint64_t bytes) {
    const std::uint64_t begin = file.round_down(offset);
    return {&file, begin, static_cast<std::uint32_t>(file.round_up(offset + bytes) - begin),
            static_cast<std::uint32_t>(offset + bytes - begin), nullptr};
  }
  TemporaryDirectory directory_;
  std::optional<ReadQueue> queue_;
};

TEST_P(Queue, DeliversWhatTheFilesHold) {
  const auto path = directory_.path() / "file";
  const auto content = random_file(path, (3 << 20) + 77);  // the last unit is not full
  const MappedFile mapped(path);
  const DirectFile file(mapped);
  std::mt19937_64 draw(2);
  Collecting batch;
  for (int round = 0; round < 5; ++round) {  // a batch is used again
    batch.pieces.clear();
    for (int i = 0; i < 300; ++i) {
      const std::uint64_t bytes = 1 + draw() % 30000;
      const std::uint64_t offset = i == 0 ? content.size() - bytes : draw() % (content.size() - bytes);
      batch.pieces.push_back(piece(file, offset, bytes));
    }
    batch.got.assign(batch.pieces.size(), {});
    queue_->submit(batch);
    queue_->wait(batch);
    for (std::size_t i = 0; i < batch.pieces.size(); ++i) {
      ASSERT_EQ(batch.got[i].size(), batch.pieces[i].needed);
      EXPECT_EQ(
          std::memcmp(batch.got[i].data(), content.data() + batch.pieces[i].offset, batch.got[i].size()), 0);
    }
  }
  EXPECT_EQ(queue_->ended_batches(), 5u);
  EXPECT_GT(queue_->bytes_read(), 5u * 300u);
}

TEST_P(Queue, FillsTheCallersMemory) {
  const auto path = directory_.path() / "file";
  const auto content = random_file(path, 300000);
  const MappedFile mapped(path);
  const DirectFile file(mapped);
  const std::size_t room = (content.size() + 8191) / 4096 * 4096;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, room)), &std::free);
  std::vector<std::unique_ptr<ReadBatch>> batches;
  for (std::size_t at = 0; at < content.size(); at += 65536) {
    ReadBatch& batch = *batches.emplace_back(std::make_unique<ReadBatch>());
    batch.pieces = {piece(file, at, std::min<std::size_t>(65536, content.size() - at))};
    batch.pieces[0].target = memory.get() + at;
    queue_->submit(batch);
  }
  for (auto batch = batches.rbegin(); batch != batches.rend(); ++batch) queue_->wait(**batch);
  EXPECT_EQ(std::memcmp(memory.get(), content.data(), content.size()), 0);
}

TEST_P(Queue, NamesAFileThatWasCut) {
  const auto path = directory_.path() / "cut";
  random_file(path, 200000);
  const MappedFile mapped(path);
  const DirectFile file(mapped);
  Collecting batch;
  for (std::uint64_t at = 0; at < 200000; at += 20000) batch.pieces.push_back(piece(file, at, 20000));
  batch.got.resize(batch.pieces.size());
  std::filesystem::resize_file(path, 100001);
  queue_->submit(batch);
  try {
    queue_->wait(batch);
    FAIL() << "half of the file is missing";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(path.string()));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("truncated while in use"));
  }
  // What is still there can be read.
  batch.pieces = {piece(file, 0, 100001 % 30000)};
  queue_->submit(batch);
  queue_->wait(batch);
}

TEST_P(Queue, DropsWhatNobodyWaitsFor) {
  const auto path = directory_.path() / "file";
  random_file(path, 1 << 20);
  const MappedFile mapped(path);
  const DirectFile file(mapped);
  Collecting batch;
  for (int i = 0; i < 5000; ++i) batch.pieces.push_back(piece(file, i % 1000 * 1000, 1000));
  batch.got.resize(batch.pieces.size());
  queue_->submit(batch);
  queue_.reset();
}

TEST_P(Queue, TakesNoBatchTwice) {
  const auto path = directory_.path() / "file";
  random_file(path, 1 << 20);
  const MappedFile mapped(path);
  const DirectFile file(mapped);
  Collecting batch;
  queue_->submit(batch);  // nothing to do
  EXPECT_TRUE(queue_->wait_for(batch, std::chrono::milliseconds(0)));
  for (int i = 0; i < 1000; ++i) batch.pieces.push_back(piece(file, 0, 30000));
  batch.got.resize(batch.pieces.size());
  queue_->submit(batch);
  EXPECT_THROW(queue_->submit(batch), std::logic_error);
  queue_->wait(batch);
}

INSTANTIATE_TEST_SUITE_P(Ways, Queue, ::testing::Values(Method::Uring, Method::Threads),
                         [](const auto& method) {
                           return method.param == Method::Uring ? "Uring" : "Threads";
                         });

TEST(ReadProgress, GoesOnAfterAShortRead) {
  TemporaryDirectory directory;
  random_file(directory.path() / "file", 100);
  const MappedFile mapped(directory.path() / "file");
  const DirectFile file(mapped);
  const auto unit = static_cast<std::uint32_t>(file.alignment());
  ReadPiece piece{&file, 0, 8 * unit, 7 * unit + 1, nullptr};
  if (unit == 1) piece.needed = 8;
  using State = ReadProgress::State;
  const auto expect = [&](std::uint32_t begin, std::int64_t result, State state, std::uint32_t next) {
    const ReadProgress progress = read_progress(piece, begin, result);
    EXPECT_EQ(progress.state, state) << begin << " " << result;
    EXPECT_EQ(progress.begin, next) << begin << " " << result;
  };
  expect(0, 8 * unit, State::Arrived, piece.needed);
  expect(0, piece.needed, State::Arrived, piece.needed);
  expect(4 * unit, piece.needed - 4 * unit, State::Arrived, piece.needed);
  expect(0, -EINTR, State::Again, 0);
  expect(2 * unit, -EAGAIN, State::Again, 2 * unit);
  expect(0, -EIO, State::Failed, 0);
  expect(0, 0, State::Ended, 0);
  expect(3 * unit, 0, State::Ended, 3 * unit);
  expect(0, 3 * unit, State::Again, 3 * unit);
  if (unit > 1) {
    expect(0, 3 * unit + 5, State::Again, 3 * unit);  // the unit that came in part is read again
    expect(3 * unit, 5, State::Ended, 3 * unit + 5);  // and comes in part again: the end of the file
  }
}

TEST(DirectFile, RefusesAFileThatHasBeenReplaced) {
  TemporaryDirectory directory;
  const auto path = directory.path() / "file";
  random_file(path, 10000);
  const MappedFile mapped(path);
  EXPECT_NO_THROW(DirectFile{mapped});
  random_file(directory.path() / "other", 10000);
  std::filesystem::rename(directory.path() / "other", path);
  EXPECT_THROW(DirectFile{mapped}, CheckpointError);
  std::filesystem::remove(path);
  EXPECT_THROW(DirectFile{mapped}, CheckpointError);
}

}  // namespace
}  // namespace dsv41
