// Tables read into memory at start: large reads past the page cache, several in flight (rows.h).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "engram/row_tables.h"
#include "loader/error.h"
#include "loader/memory.h"

namespace dsv41 {
namespace {

constexpr std::uint64_t kPieceBytes = 1 << 20;
constexpr unsigned kDepth = 32;
constexpr std::chrono::milliseconds kProgressInterval{200};

/// One tensor in memory.
struct Copy {
  TensorLocation from;
  std::size_t skew = 0;  // bytes of memory in front of the tensor: file offsets keep their alignment
  LargeMemory memory;
  const std::uint8_t* data() const { return reinterpret_cast<const std::uint8_t*>(memory.data()) + skew; }
};

class ResidentRows final : public EngramRows {
 public:
  ResidentRows(const ModelWeights& weights, Compute& compute, const EngramOptions& options)
      : tables_(weights.engram), compute_(compute) {
    ReadQueueOptions queue;
    queue.method = options.method;
    queue.depth = kDepth;
    queue_ = std::make_unique<ReadQueue>(queue);
    for (const EngramWeights& table : tables_) {
      for (const TensorLocation& tensor : {table.codes_location, table.scales_location}) {
        files_.try_emplace(tensor.file, *tensor.file);
        bytes_ += tensor.bytes;
        copies_.push_back({tensor, 0, {}});
      }
    }
  }

  std::uint64_t memory_bytes() const override { return bytes_; }

  void load(const Progress& progress) override {
    // Should `progress` throw, the queue must go before what it fills.
    ReadBatch batch;
    const auto queue = std::move(queue_);
    for (Copy& copy : copies_) add_pieces(copy, batch);
    queue->submit(batch);
    while (!queue->wait_for(batch, kProgressInterval))
      if (progress) progress(std::min(queue->bytes_read(), bytes_), bytes_);
    if (progress) progress(bytes_, bytes_);
    for (std::size_t table = 0; table < tables_.size(); ++table) {
      tables_[table].table_codes = {copies_[2 * table].data(), tables_[table].table_codes.size()};
      tables_[table].table_scales = {copies_[2 * table + 1].data(), tables_[table].table_scales.size()};
    }
    ModelWeights weights;
    weights.engram = tables_;
    rows_ = mapped_engram_rows(weights, compute_);
  }

  void request(std::size_t table, std::span<const std::uint64_t> ids) override {
    if (!rows_) throw std::logic_error("engram tables have not been loaded");
    rows_->request(table, ids);
  }
  void collect(std::size_t table, std::span<BFloat16> rows) override { rows_->collect(table, rows); }
  EngramCounters counters() const override { return rows_ ? rows_->counters() : EngramCounters{}; }
  std::string describe() const override {
    return fmt::format("resident ({:.3f} GiB)", static_cast<double>(bytes_) / (1u << 30));
  }
  std::string note() const override {
    return direct_read_note(queue_ ? queue_->refusal() : std::string(), files_);
  }

 private:
  void add_pieces(Copy& copy, ReadBatch& batch) {
    const DirectFile& file = files_.at(copy.from.file);
    const std::uint64_t begin = file.round_down(copy.from.offset), end = copy.from.offset + copy.from.bytes;
    copy.skew = copy.from.offset - begin;
    copy.memory = LargeMemory(file.round_up(end) - begin);
    for (std::uint64_t at = begin; at < end; at += kPieceBytes) {
      const std::uint64_t stop = std::min(file.round_up(end), at + kPieceBytes);
      batch.pieces.push_back({&file, at, static_cast<std::uint32_t>(stop - at),
                              static_cast<std::uint32_t>(std::min(stop, end) - at),
                              copy.memory.data() + (at - begin)});
    }
  }

  std::vector<EngramWeights> tables_;
  Compute& compute_;
  std::map<const MappedFile*, DirectFile> files_;
  std::vector<Copy> copies_;  // codes and scales of each table
  std::uint64_t bytes_ = 0;
  std::unique_ptr<ReadQueue> queue_;  // until load()
  std::unique_ptr<EngramRows> rows_;  // over the copies, once they are there
};

}  // namespace

std::unique_ptr<EngramRows> resident_engram_rows(const ModelWeights& weights, Compute& compute,
                                                 const EngramOptions& options) {
  return std::make_unique<ResidentRows>(weights, compute, options);
}

}  // namespace dsv41
