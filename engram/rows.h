// Where Engram table rows come from (docs/residency.md). A source gathers rows of one layer's table for many
// tokens at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/compute.h"
#include "loader/read_queue.h"
#include "loader/weights.h"

namespace dsv41 {

/// Sums since the start.
struct EngramCounters {
  std::uint64_t asked = 0;                  // rows named by request()
  std::uint64_t distinct = 0, cached = 0;   // of these without repetition within a request; already in memory
  std::uint64_t reads = 0, read_bytes = 0;  // issued: pieces of files, with what lies around the rows
};

/// Gathers are announced before layer 0 runs and collected when the Engram layer needs them.
class EngramRows {
 public:
  /// Bytes that are there, bytes there will be.
  using Progress = std::function<void(std::uint64_t, std::uint64_t)>;

  virtual ~EngramRows() = default;
  /// Memory that the source takes for the whole run, load() included.
  virtual std::uint64_t memory_bytes() const { return 0; }
  /// Once, before the first request. Throws CheckpointError, ResourceError, and what `progress` throws; it is
  /// called several times a second.
  virtual void load(const Progress& progress) { (void)progress; }
  /// Announces the ids of a step for table `table` (index in engram_layer_ids). ids: [tokens * columns],
  /// copied. A table that is announced a second time begins the next step. Throws CheckpointError for a row
  /// that does not exist.
  virtual void request(std::size_t table, std::span<const std::uint64_t> ids) = 0;
  /// Rows of the announced ids, dequantized: bf16 [tokens * columns, width]. Blocks until they are there.
  /// Throws CheckpointError naming the file that could not be read.
  virtual void collect(std::size_t table, std::span<BFloat16> rows) = 0;
  virtual EngramCounters counters() const { return {}; }
  /// For the start line: "direct (io_uring, 256 in flight, 1016801 rows in memory)".
  virtual std::string describe() const { return {}; }
  /// What was wanted and is not to be had, in one line; empty: nothing.
  virtual std::string note() const { return {}; }
};

enum class EngramMode : std::uint8_t { Mmap, Direct, Resident };

struct EngramOptions {
  EngramMode mode = EngramMode::Mmap;
  /// Direct: for rows that were read earlier. Rows of one step are always held, however small this is.
  std::uint64_t cache_bytes = std::uint64_t{256} << 20;
  ReadQueueOptions::Method method = ReadQueueOptions::Method::Auto;
};

/// weights (and the checkpoint behind them) and compute must outlive the source. max_ids: per request at
/// most.
std::unique_ptr<EngramRows> engram_rows(const ModelWeights& weights, Compute& compute,
                                        const EngramOptions& options, std::size_t max_ids);

/// Rows through the mapped file: the page cache decides what is read from disk.
std::unique_ptr<EngramRows> mapped_engram_rows(const ModelWeights& weights, Compute& compute);
/// Tables are read into memory by load().
std::unique_ptr<EngramRows> resident_engram_rows(const ModelWeights& weights, Compute& compute,
                                                 const EngramOptions& options);
/// Rows of all tables are read past the page cache as they are announced, sorted and without repetition, all
/// at once; a bounded number stays in memory, the least recently used go.
std::unique_ptr<EngramRows> direct_engram_rows(const ModelWeights& weights, Compute& compute,
                                               const EngramOptions& options, std::size_t max_ids);

}  // namespace dsv41
