// Many reads at a time: pieces of files, through io_uring or, where the kernel refuses it, through threads
// (docs/residency.md). A batch is handed in whole and waited for whole; its pieces arrive in any order.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "loader/direct_file.h"

namespace dsv41 {

struct ReadPiece {
  const DirectFile* file = nullptr;
  std::uint64_t offset = 0;     // a multiple of the file's alignment
  std::uint32_t bytes = 0;      // likewise
  std::uint32_t needed = 0;     // of these, from the start on: behind the end of the file there is nothing
  std::byte* target = nullptr;  // as aligned; null: a buffer of the queue, for the time of arrived()
};

/// Owned by the caller, who leaves it alone between submit() and the end of wait().
class ReadBatch {
 public:
  ReadBatch() = default;
  virtual ~ReadBatch() = default;
  ReadBatch(const ReadBatch&) = delete;
  ReadBatch& operator=(const ReadBatch&) = delete;

  std::vector<ReadPiece> pieces;

 protected:
  /// Piece `index` lies at `data`. On a thread of the queue, possibly on several at a time; must not throw.
  virtual void arrived(std::size_t index, const std::byte* data) {
    (void)index;
    (void)data;
  }

 private:
  friend class ReadQueue;
  std::size_t next = 0;       // first piece not handed out
  std::size_t remaining = 0;  // pieces that have not ended
  std::exception_ptr error;   // of the first piece that failed
  std::atomic<bool> done{true};
};

struct ReadQueueOptions {
  enum class Method : std::uint8_t { Auto, Uring, Threads };
  /// Auto: io_uring, else threads. Uring: a refusal is a ResourceError.
  Method method = Method::Auto;
  unsigned depth = 256;          // reads in flight
  std::size_t buffer_bytes = 0;  // of each of them, for pieces without a target
};

class ReadQueue {
 public:
  explicit ReadQueue(const ReadQueueOptions& options);
  /// Reads in flight are waited for, the others are dropped. No batch may be waited for afterwards.
  ~ReadQueue();
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;

  /// "io_uring, 256 in flight" or "64 threads".
  std::string describe() const;
  /// Why threads do the work of io_uring; empty when they do not, or were asked for.
  const std::string& refusal() const { return refusal_; }

  /// Batches are served in the order of submit(). A batch may be used again once it has been waited for.
  /// Throws ResourceError when an earlier read has lost the ring.
  void submit(ReadBatch& batch);
  /// Until every piece has arrived. Throws, once, CheckpointError naming the file when one could not be read.
  void wait(ReadBatch& batch);
  /// The same, at most for `timeout`; returns whether the batch has ended.
  bool wait_for(ReadBatch& batch, std::chrono::milliseconds timeout);
  /// Whether wait() would return without waiting.
  static bool ended(const ReadBatch& batch) { return batch.done.load(std::memory_order_acquire); }
  /// Until any batch ends that had not ended when ended_batches() was `seen`, at most for `timeout`.
  void wait_for_any(std::uint64_t seen, std::chrono::milliseconds timeout);
  std::uint64_t ended_batches() const { return ended_.load(std::memory_order_acquire); }

  /// Bytes that arrived, since the start.
  std::uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  struct State;
  struct Uring;
  /// A piece on its way.
  struct Flight {
    ReadBatch* batch = nullptr;
    std::size_t index = 0;
    std::uint32_t begin = 0;  // bytes of the piece before the read under way
    std::byte* memory = nullptr;
    const ReadPiece& piece() const { return batch->pieces[index]; }
  };
  bool take(Flight& flight, std::byte* buffer);  // under the lock
  bool advance(Flight& flight, std::int64_t result);
  void end_piece(ReadBatch& batch, std::exception_ptr error);
  /// Ends everything that is handed in with this error, now and later.
  void give_up(const std::exception_ptr& error);
  void serve_uring();
  void serve_thread(std::byte* buffer);

  ReadQueueOptions options_;
  std::string refusal_;
  std::atomic<std::uint64_t> ended_{0}, bytes_read_{0};
  std::unique_ptr<State> state_;
};

/// How a read of `bytes` at `begin` of a piece goes on after the kernel returned `result` (bytes or -errno).
/// Reads may be short; the next one starts at a multiple of `alignment`.
struct ReadProgress {
  enum class State : std::uint8_t { Arrived, Again, Ended, Failed } state;  // Ended: the file ends too early
  std::uint32_t begin = 0;  // Again: where the next read starts; Ended: bytes of the piece that exist
};
ReadProgress read_progress(const ReadPiece& piece, std::uint32_t begin, std::int64_t result);

}  // namespace dsv41
