// Rows read as they are announced: sorted, each once, neighbours together, all of a step in flight at a time
// (rows.h; docs/residency.md).
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engram/row_tables.h"
#include "kernels/slot_cache.h"
#include "loader/error.h"
#include "loader/memory.h"

namespace dsv41 {
namespace {

constexpr unsigned kDepth = 256;
/// Of one read. Neighbouring rows share it while they leave gaps of at most kGapBytes: a read costs a disk
/// about as much as that many bytes.
constexpr std::size_t kPieceBytes = 32 << 10, kGapBytes = 8 << 10;
/// Of the book-keeping for one row in memory.
constexpr std::size_t kSlotOverhead = 32;

using Slot = SlotCache::Slot;

/// A row that has to be read, and where it goes.
struct MissingRow {
  std::uint64_t id;
  Slot slot;
};

/// The reads of one request: codes first, then scales.
class RowBatch final : public ReadBatch {
 public:
  struct Part {  // of a piece: consecutive missing rows
    std::uint32_t first, count;
    bool scales;
  };
  std::vector<MissingRow> missing;                    // by id
  std::vector<Part> parts;                            // one per piece
  std::uint64_t codes_offset = 0, scales_offset = 0;  // of the table in its file
  std::size_t width = 0;
  std::uint8_t* memory = nullptr;  // slots of width + width / 32 bytes

 protected:
  void arrived(std::size_t index, const std::byte* data) override {
    const Part& part = parts[index];
    const std::size_t scales = width / kBlock, bytes = part.scales ? scales : width;
    const std::uint64_t table = part.scales ? scales_offset : codes_offset;
    for (std::size_t i = part.first; i < part.first + part.count; ++i) {
      const std::uint64_t at = table + missing[i].id * bytes - pieces[index].offset;
      std::copy_n(reinterpret_cast<const std::uint8_t*>(data) + at, bytes,
                  memory + missing[i].slot * (width + scales) + (part.scales ? width : 0));
    }
  }
};

struct Table {
  EngramWeights weights;
  const DirectFile *codes_file = nullptr, *scales_file = nullptr;
  RowBatch batch;
  std::vector<Slot> slots;  // of every id of the last request
  bool requested = false;   // in this step
};

class DirectRows final : public EngramRows {
 public:
  DirectRows(const ModelWeights& weights, Compute& compute, const EngramOptions& options, std::size_t max_ids)
      : compute_(compute), tables_(weights.engram.size()) {
    width_ = row_width(weights.engram.front());
    if (width_ == 0 || width_ % kBlock != 0 || width_ > kPieceBytes / 2)
      throw CheckpointError(fmt::format("engram rows of {} values cannot be read one by one", width_));
    std::uint64_t all = 0, of_a_step = 0;
    for (std::size_t i = 0; i < tables_.size(); ++i) {
      Table& table = tables_[i];
      table.weights = weights.engram[i];
      if (row_width(table.weights) != width_)
        throw CheckpointError("engram tables have rows of different width");
      const auto open = [&](const TensorLocation& tensor) {
        return &files_.try_emplace(tensor.file, *tensor.file).first->second;
      };
      table.codes_file = open(table.weights.codes_location);
      table.scales_file = open(table.weights.scales_location);
      table.slots.reserve(max_ids);
      all += table.weights.rows;
      of_a_step += std::min<std::uint64_t>(table.weights.rows, max_ids);
    }
    const std::uint64_t wanted = options.cache_bytes / (row_bytes() + kSlotOverhead);
    const std::uint64_t slots = std::max(of_a_step, std::min(wanted, all));
    if (slots > std::numeric_limits<Slot>::max() / 4)
      throw UsageError(fmt::format("--engram-cache: {} rows, at most {} can be kept", slots,
                                   std::numeric_limits<Slot>::max() / 4));
    slots_ = static_cast<Slot>(slots);
    order_.reserve(max_ids);

    ReadQueueOptions queue;
    queue.method = options.method;
    queue.depth = kDepth;
    queue.buffer_bytes = kPieceBytes + 2 * DirectFile::kLargestAlignment;
    queue_ = std::make_unique<ReadQueue>(queue);
  }

  std::uint64_t memory_bytes() const override { return slots_ * std::uint64_t{row_bytes() + kSlotOverhead}; }

  void load(const Progress&) override {
    cache_.emplace(slots_);
    memory_ = LargeMemory(slots_ * row_bytes());
  }

  void request(std::size_t number, std::span<const std::uint64_t> ids) override {
    Table& table = tables_.at(number);
    check_row_ids(table.weights, number, ids);
    if (ids.size() > table.slots.capacity())
      throw std::length_error("more engram rows than the source was sized for");
    if (!cache_) throw std::logic_error("engram rows have not been loaded");
    if (table.requested) begin_step();
    table.requested = true;
    place(number, ids);
    plan(table);
    queue_->submit(table.batch);
  }

  void collect(std::size_t number, std::span<BFloat16> rows) override {
    Table& table = tables_.at(number);
    check_room(number, table.slots.size(), width_, rows.size());
    try {
      queue_->wait(table.batch);
    } catch (...) {
      forget();
      throw;
    }
    const auto* const memory = reinterpret_cast<const std::uint8_t*>(memory_.data());
    const auto stored = [&](std::size_t i) {
      const std::uint8_t* const row = memory + table.slots[i] * row_bytes();
      return StoredRow{row, row + width_};
    };
    dequantize_rows(compute_, table.slots.size(), width_, stored, rows);
  }

  EngramCounters counters() const override { return counters_; }
  std::string describe() const override {
    return fmt::format("direct ({}, room for {} rows)", queue_->describe(), slots_);
  }
  std::string note() const override { return direct_read_note(queue_->refusal(), files_); }

 private:
  std::size_t row_bytes() const { return width_ + width_ / kBlock; }

  /// Slots of the last step may be given away once nothing is written to them any more.
  void begin_step() {
    for (Table& table : tables_) {
      table.requested = false;
      try {
        queue_->wait(table.batch);  // a table whose layer nobody needed has not been collected
      } catch (...) {
        forget();
        throw;
      }
    }
  }

  /// After a failure: nobody knows which rows are whole.
  void forget() {
    for (Table& table : tables_) {
      try {
        queue_->wait(table.batch);
      } catch (const Error&) {  // the first one is reported
      }
      table.requested = false;
      table.slots.clear();
    }
    cache_->clear();
  }

  /// Finds or makes room for every id. The rows of a step fit, so none of them drives out another.
  void place(std::size_t number, std::span<const std::uint64_t> ids) {
    Table& table = tables_[number];
    order_.clear();
    for (std::size_t i = 0; i < ids.size(); ++i) order_.push_back({ids[i], static_cast<std::uint32_t>(i)});
    std::sort(order_.begin(), order_.end());
    table.slots.resize(ids.size());
    table.batch.missing.clear();
    const auto key = [&](std::uint64_t id) { return std::uint64_t{number} << 56 | id; };
    const auto for_each_distinct = [&](const auto& body) {
      for (std::size_t begin = 0, end = 0; begin < order_.size(); begin = end) {
        while (end < order_.size() && order_[end].first == order_[begin].first) ++end;
        body(std::span(order_).subspan(begin, end - begin));
      }
    };
    const auto take = [&](std::span<const std::pair<std::uint64_t, std::uint32_t>> same, Slot slot) {
      for (const auto& [id, index] : same) table.slots[index] = slot;
    };
    // What is there first: it must not be driven out by what is not.
    for_each_distinct([&](auto same) {
      ++counters_.distinct;
      const auto slot = cache_->find(key(same[0].first));
      if (slot) ++counters_.cached;
      take(same, slot.value_or(kNoSlot));
    });
    for_each_distinct([&](auto same) {
      if (table.slots[same[0].second] != kNoSlot) return;
      const Slot slot = cache_->place(key(same[0].first));
      table.batch.missing.push_back({same[0].first, slot});
      take(same, slot);
    });
    counters_.asked += ids.size();
  }

  /// Pieces that cover the missing rows.
  void plan(Table& table) {
    RowBatch& batch = table.batch;
    batch.pieces.clear();
    batch.parts.clear();
    batch.width = width_;
    batch.memory = reinterpret_cast<std::uint8_t*>(memory_.data());
    batch.codes_offset = table.weights.codes_location.offset;
    batch.scales_offset = table.weights.scales_location.offset;
    cover(batch, *table.codes_file, batch.codes_offset, width_, false);
    cover(batch, *table.scales_file, batch.scales_offset, width_ / kBlock, true);
    counters_.reads += batch.pieces.size();
    for (const ReadPiece& piece : batch.pieces) counters_.read_bytes += piece.bytes;
  }

  static void cover(RowBatch& batch, const DirectFile& file, std::uint64_t table, std::size_t bytes,
                    bool scales) {
    std::uint64_t begin = 0, end = 0;  // of the rows in the piece at hand
    for (std::uint32_t i = 0; i < batch.missing.size(); ++i) {
      const std::uint64_t from = table + batch.missing[i].id * bytes, to = from + bytes;
      if (i > 0 && from <= end + kGapBytes && to - begin <= kPieceBytes) {
        ++batch.parts.back().count;
      } else {
        begin = from;
        batch.parts.push_back({i, 1, scales});
        batch.pieces.push_back({&file, file.round_down(from), 0, 0, nullptr});
      }
      end = to;
      ReadPiece& piece = batch.pieces.back();
      piece.needed = static_cast<std::uint32_t>(to - piece.offset);
      piece.bytes = static_cast<std::uint32_t>(file.round_up(to) - piece.offset);
    }
  }

  static constexpr Slot kNoSlot = ~Slot{0};

  Compute& compute_;
  std::size_t width_ = 0;
  std::map<const MappedFile*, DirectFile> files_;
  Slot slots_ = 0;
  std::optional<SlotCache> cache_;                              // keys: table and row id
  LargeMemory memory_;                                          // [slots, row_bytes]
  std::vector<std::pair<std::uint64_t, std::uint32_t>> order_;  // ids and where they were asked for, sorted
  EngramCounters counters_;
  std::vector<Table> tables_;
  std::unique_ptr<ReadQueue> queue_;  // last: it goes before what it writes to
};

}  // namespace

std::unique_ptr<EngramRows> direct_engram_rows(const ModelWeights& weights, Compute& compute,
                                               const EngramOptions& options, std::size_t max_ids) {
  return std::make_unique<DirectRows>(weights, compute, options, max_ids);
}

}  // namespace dsv41
