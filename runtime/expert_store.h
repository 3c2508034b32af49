// Which experts of a rank are in memory: all of them through the mapped files, or a bounded number that is
// read past the page cache as it is needed (docs/residency.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "loader/read_queue.h"
#include "runtime/experts.h"

namespace dsv41 {

/// Hands the experts of one call after the other to an engine. The way of a call:
///   store.begin(block, experts);
///   for (auto ready = store.take(alive); !ready.empty(); ready = store.take(alive)) {
///     compute with store.matrices(…) of every one of `ready`;
///     store.release(ready);
///   }
class ExpertStore {
 public:
  struct Counters {
    std::uint64_t hits = 0, misses = 0;  // experts of calls: in memory when the call began, or not
    std::uint64_t read_bytes = 0;        // of files, with what lies around the experts
  };

  virtual ~ExpertStore() = default;
  virtual const ExpertGeometry& geometry() const = 0;
  /// For the start line: "mapped", "384 of 15360 in 6.722 GiB of memory (io_uring, 64 in flight)".
  virtual std::string describe() const = 0;
  /// What was wanted and is not to be had, in one line; empty: nothing.
  virtual std::string note() const { return {}; }
  /// Memory that the store takes, and how many experts fit; 0: all are mapped.
  virtual std::uint64_t memory_bytes() const { return 0; }
  virtual std::uint64_t resident_experts() const { return 0; }
  /// Takes the memory; once, before the first call. Throws ResourceError.
  virtual void load() {}

  /// The experts of a call that will begin later, ascending: they are read ahead as far as this drives out
  /// nothing that a call under way needs.
  virtual bool reads_ahead() const { return false; }  // whether announce() has any effect
  virtual void announce(std::uint32_t block, std::span<const std::uint32_t> experts) {
    (void)block;
    (void)experts;
  }
  /// Starts a call: experts ascending, each once. The span must stay valid until the last take().
  virtual void begin(std::uint32_t block, std::span<const std::uint32_t> experts) = 0;
  /// Experts of the call that are in memory and have not been taken yet: first all that were there, then
  /// others as they arrive. Empty: there are no more. `alive` is called while it waits. Throws
  /// CheckpointError naming the file that could not be read.
  virtual std::span<const std::uint32_t> take(const std::function<void()>& alive) = 0;
  /// Valid from take() to release().
  virtual ExpertMatrices matrices(std::uint32_t expert) = 0;
  /// The last experts that were taken are not needed any more.
  virtual void release() = 0;
  virtual const Counters& counters() const = 0;
};

/// Every expert is where `source`, which must outlive the store, says.
std::unique_ptr<ExpertStore> mapped_expert_store(ExpertSource& source);

struct ExpertStoreOptions {
  std::uint64_t memory_bytes = 0;  // --expert-memory
  unsigned depth = 64;             // reads in flight
  ReadQueueOptions::Method method = ReadQueueOptions::Method::Auto;
};

/// The experts that `owner` owns (0-based; placement null: all), the least recently used go. The checkpoint
/// must outlive the store. Throws ResourceError with the numbers when the memory holds not even one expert.
std::unique_ptr<ExpertStore> cached_expert_store(const Checkpoint& checkpoint, const Placement* placement,
                                                 std::uint32_t owner, const ExpertStoreOptions& options);

/// Experts on CPU threads. `compute` must outlive the engine.
std::unique_ptr<ExpertEngine> cpu_engine(std::unique_ptr<ExpertStore> store, Compute& compute,
                                         const ExpertLimits& limits);

}  // namespace dsv41
