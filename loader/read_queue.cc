// The queue behind many reads: one thread that keeps a ring full, or as many threads as reads (read_queue.h).
#include "loader/read_queue.h"

#include <fmt/format.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "loader/error.h"

namespace dsv41 {
namespace {

constexpr unsigned kMostDepth = 4096;
/// Threads wait inside pread: more of them than this cost more than they bring.
constexpr unsigned kMostThreads = 64;

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<std::byte, Free>;

AlignedMemory aligned_memory(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(DirectFile::kLargestAlignment, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  return AlignedMemory(memory);
}

std::exception_ptr failure(const ReadPiece& piece, std::string_view what) {
  return std::make_exception_ptr(CheckpointError(fmt::format(
      "{}: reading {} bytes at {}: {}", piece.file->path().string(), piece.bytes, piece.offset, what)));
}

}  // namespace

ReadProgress read_progress(const ReadPiece& piece, std::uint32_t begin, std::int64_t result) {
  using State = ReadProgress::State;
  if (result == -EINTR || result == -EAGAIN) return {State::Again, begin};
  if (result < 0) return {State::Failed, begin};
  const std::uint64_t there = begin + static_cast<std::uint64_t>(result);
  if (there >= piece.needed) return {State::Arrived, piece.needed};
  // A direct read stops short only at the end of the file, or, rarely, between two units of the device.
  const auto next = static_cast<std::uint32_t>(piece.file->round_down(there));
  if (next <= begin) return {State::Ended, static_cast<std::uint32_t>(there)};
  return {State::Again, next};
}

struct ReadQueue::Uring {
  io_uring ring{};
  ~Uring() { io_uring_queue_exit(&ring); }
};

struct ReadQueue::State {
  std::mutex mutex;
  std::condition_variable work, news;  // for the queue's threads; for those who wait for batches
  std::deque<ReadBatch*> batches;      // with pieces to hand out
  bool stop = false;
  std::exception_ptr lost;  // why nothing can be read any more
  std::unique_ptr<Uring> uring;
  AlignedMemory buffers;
  std::size_t buffer_stride = 0;
  std::vector<std::thread> threads;
};

ReadQueue::ReadQueue(const ReadQueueOptions& options) : options_(options), state_(std::make_unique<State>()) {
  using Method = ReadQueueOptions::Method;
  options_.depth = std::clamp(options.depth, 1u, kMostDepth);
  State& state = *state_;
  if (options.method != Method::Threads) {
    io_uring ring{};
    const int code = io_uring_queue_init(options_.depth, &ring, 0);
    if (code == 0) {
      state.uring = std::make_unique<Uring>();
      state.uring->ring = ring;
    } else {
      refusal_ = fmt::format("the kernel refuses io_uring: {}", std::generic_category().message(-code));
      if (options.method == Method::Uring) throw ResourceError(refusal_);
    }
  }
  if (!state.uring) options_.depth = std::min(options_.depth, kMostThreads);
  state.buffer_stride = (options.buffer_bytes + DirectFile::kLargestAlignment - 1) /
                        DirectFile::kLargestAlignment * DirectFile::kLargestAlignment;
  state.buffers = aligned_memory(state.buffer_stride * options_.depth);
  try {
    if (state.uring) {
      state.threads.emplace_back([this] { serve_uring(); });
    } else {
      for (unsigned i = 0; i < options_.depth; ++i)
        state.threads.emplace_back([this, buffer = state.buffers
                                                       ? state.buffers.get() + i * state.buffer_stride
                                                       : nullptr] { serve_thread(buffer); });
    }
  } catch (const std::system_error&) {
    if (state.threads.empty()) throw;
    options_.depth = static_cast<unsigned>(state.threads.size());  // fewer threads do the same
  }
}

ReadQueue::~ReadQueue() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->work.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

std::string ReadQueue::describe() const {
  return state_->uring ? fmt::format("io_uring, {} in flight", options_.depth)
                       : fmt::format("{} threads", options_.depth);
}

void ReadQueue::submit(ReadBatch& batch) {
  if (!ended(batch)) throw std::logic_error("a batch of reads is submitted twice");
  batch.next = 0;
  batch.remaining = batch.pieces.size();
  batch.error = nullptr;
  if (batch.pieces.empty()) return;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->lost) std::rethrow_exception(state_->lost);
    batch.done.store(false, std::memory_order_relaxed);
    state_->batches.push_back(&batch);
  }
  if (state_->uring)
    state_->work.notify_one();
  else
    state_->work.notify_all();
}

bool ReadQueue::wait_for(ReadBatch& batch, std::chrono::milliseconds timeout) {
  if (!ended(batch)) {
    std::unique_lock lock(state_->mutex);
    if (!state_->news.wait_for(lock, timeout, [&] { return ended(batch); })) return false;
  }
  if (batch.error) std::rethrow_exception(std::exchange(batch.error, nullptr));
  return true;
}

void ReadQueue::wait(ReadBatch& batch) {
  while (!wait_for(batch, std::chrono::hours(1))) {
  }
}

void ReadQueue::wait_for_any(std::uint64_t seen, std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->news.wait_for(lock, timeout, [&] { return ended_batches() != seen; });
}

bool ReadQueue::take(Flight& flight, std::byte* buffer) {
  State& state = *state_;
  if (state.batches.empty()) return false;
  ReadBatch& batch = *state.batches.front();
  flight = {&batch, batch.next++, 0, nullptr};
  if (batch.next == batch.pieces.size()) state.batches.pop_front();
  const ReadPiece& piece = flight.piece();
  flight.memory = piece.target != nullptr ? piece.target : buffer;
  return true;
}

/// What the result of a read means for its piece; false when it has to be read on from flight.begin.
bool ReadQueue::advance(Flight& flight, std::int64_t result) {
  const ReadPiece& piece = flight.piece();
  const ReadProgress progress = read_progress(piece, flight.begin, result);
  switch (progress.state) {
    case ReadProgress::State::Again:
      flight.begin = progress.begin;
      return false;
    case ReadProgress::State::Arrived:
      bytes_read_.fetch_add(piece.bytes, std::memory_order_relaxed);
      flight.batch->arrived(flight.index, flight.memory);
      end_piece(*flight.batch, nullptr);
      return true;
    case ReadProgress::State::Ended:
      end_piece(*flight.batch, failure(piece, fmt::format("the file ends at byte {}: truncated while in use",
                                                          piece.offset + progress.begin)));
      return true;
    case ReadProgress::State::Failed:
      end_piece(*flight.batch, failure(piece, std::generic_category().message(static_cast<int>(-result))));
      return true;
  }
  return true;
}

void ReadQueue::end_piece(ReadBatch& batch, std::exception_ptr error) {
  bool last = false;
  {
    const std::lock_guard lock(state_->mutex);
    if (error && !batch.error) batch.error = std::move(error);
    last = --batch.remaining == 0;
    if (last) {
      ended_.fetch_add(1, std::memory_order_release);
      batch.done.store(true, std::memory_order_release);  // from here on it is the caller's
    }
  }
  if (last) state_->news.notify_all();
}

void ReadQueue::give_up(const std::exception_ptr& error) {
  for (Flight flight;;) {
    {
      const std::lock_guard lock(state_->mutex);
      state_->lost = error;
      if (!take(flight, nullptr)) return;
    }
    end_piece(*flight.batch, error);
  }
}

void ReadQueue::serve_thread(std::byte* buffer) {
  State& state = *state_;
  for (Flight flight;;) {
    {
      std::unique_lock lock(state.mutex);
      state.work.wait(lock, [&] { return state.stop || !state.batches.empty(); });
      if (state.stop) return;
      take(flight, buffer);
    }
    for (;;) {
      const ReadPiece& piece = flight.piece();
      const ssize_t read =
          ::pread(piece.file->descriptor(), flight.memory + flight.begin, piece.bytes - flight.begin,
                  static_cast<off_t>(piece.offset + flight.begin));
      if (advance(flight, read < 0 ? -errno : read)) break;
    }
  }
}

void ReadQueue::serve_uring() {
  State& state = *state_;
  io_uring& ring = state.uring->ring;
  std::vector<Flight> flights(options_.depth);
  std::vector<unsigned> free, again;  // flights that carry nothing; those that have to be read on
  for (unsigned i = options_.depth; i-- > 0;) free.push_back(i);
  unsigned in_flight = 0;  // handed to the kernel

  const auto prepare = [&](unsigned number) {
    const Flight& flight = flights[number];
    const ReadPiece& piece = flight.piece();
    io_uring_sqe* const entry = io_uring_get_sqe(&ring);  // as many as flights: never null
    io_uring_prep_read(entry, piece.file->descriptor(), flight.memory + flight.begin,
                       piece.bytes - flight.begin, piece.offset + flight.begin);
    io_uring_sqe_set_data64(entry, number);
    ++in_flight;
  };

  for (;;) {
    bool more = false;
    for (const unsigned number : again) prepare(number);
    again.clear();
    {
      std::unique_lock lock(state.mutex);
      if (in_flight == 0) state.work.wait(lock, [&] { return state.stop || !state.batches.empty(); });
      if (state.stop && in_flight == 0) return;
      while (!state.stop && !free.empty()) {
        const unsigned number = free.back();
        if (!take(flights[number],
                  state.buffers ? state.buffers.get() + number * state.buffer_stride : nullptr))
          break;
        free.pop_back();
        prepare(number);
      }
      more = !state.batches.empty();
    }
    // With more to hand in, a few results at a time are worth the call.
    const unsigned wanted = more ? std::max(1u, std::min(in_flight / 4, 16u)) : 1;
    const int code = io_uring_submit_and_wait(&ring, wanted);
    if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY) {
      // The ring is lost, and with it every read that was handed in.
      const auto error = std::make_exception_ptr(
          ResourceError(fmt::format("io_uring: {}", std::generic_category().message(-code))));
      std::vector<bool> carries(options_.depth, true);
      for (const unsigned number : free) carries[number] = false;
      for (unsigned number = 0; number < options_.depth; ++number)
        if (carries[number]) end_piece(*flights[number].batch, error);
      give_up(error);
      return;
    }
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring, &entry) == 0) {
      const auto number = static_cast<unsigned>(io_uring_cqe_get_data64(entry));
      const std::int64_t result = entry->res;
      io_uring_cqe_seen(&ring, entry);
      --in_flight;
      if (advance(flights[number], result))
        free.push_back(number);
      else
        again.push_back(number);
    }
  }
}

}  // namespace dsv41
