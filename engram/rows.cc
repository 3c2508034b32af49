// The choice of a row source, and rows through the mapped file (rows.h).
#include "engram/rows.h"

#include <fmt/format.h>

#include <stdexcept>
#include <vector>

#include "engram/row_tables.h"
#include "loader/error.h"

namespace dsv41 {

void check_row_ids(const EngramWeights& weights, std::size_t table, std::span<const std::uint64_t> ids) {
  for (const std::uint64_t id : ids)
    if (id >= weights.rows)
      throw CheckpointError(fmt::format(
          "engram table {}: row {} of {} asked for; config and table do not fit", table, id, weights.rows));
}

void check_room(std::size_t table, std::size_t ids, std::size_t width, std::size_t room) {
  if (room != ids * width)
    throw std::invalid_argument(fmt::format(
        "engram table {}: room for {} values, {} rows of {} were asked for", table, room, ids, width));
}

std::string direct_read_note(const std::string& refusal,
                             const std::map<const MappedFile*, DirectFile>& files) {
  std::string note;
  if (!refusal.empty()) note = fmt::format("engram rows are read by threads: {}", refusal);
  for (const auto& [mapped, file] : files) {
    if (file.direct()) continue;
    note += fmt::format("{}{}: the file system takes no direct reads: engram rows go through the page cache",
                        note.empty() ? "" : "; ", file.path().string());
    break;  // the others lie beside it
  }
  return note;
}

namespace {

class MappedRows final : public EngramRows {
 public:
  MappedRows(const ModelWeights& weights, Compute& compute)
      : tables_(weights.engram), compute_(compute), requested_(weights.engram.size()) {}

  void request(std::size_t table, std::span<const std::uint64_t> ids) override {
    check_row_ids(tables_.at(table), table, ids);
    requested_[table].assign(ids.begin(), ids.end());
    counters_.asked += ids.size();
  }

  void collect(std::size_t table, std::span<BFloat16> rows) override {
    const EngramWeights& weights = tables_.at(table);
    const std::vector<std::uint64_t>& ids = requested_[table];
    const std::size_t width = row_width(weights);
    check_room(table, ids.size(), width, rows.size());
    const auto stored = [&](std::size_t i) {
      return StoredRow{&weights.table_codes[ids[i] * width],
                       &weights.table_scales[ids[i] * (width / kBlock)]};
    };
    dequantize_rows(compute_, ids.size(), width, stored, rows);
  }

  EngramCounters counters() const override { return counters_; }
  std::string describe() const override { return "mmap"; }

 private:
  std::vector<EngramWeights> tables_;
  Compute& compute_;
  std::vector<std::vector<std::uint64_t>> requested_;  // by table
  EngramCounters counters_;
};

}  // namespace

std::unique_ptr<EngramRows> mapped_engram_rows(const ModelWeights& weights, Compute& compute) {
  return std::make_unique<MappedRows>(weights, compute);
}

std::unique_ptr<EngramRows> engram_rows(const ModelWeights& weights, Compute& compute,
                                        const EngramOptions& options, std::size_t max_ids) {
  if (weights.engram.empty()) return mapped_engram_rows(weights, compute);  // nothing to keep
  switch (options.mode) {
    case EngramMode::Mmap:
      break;
    case EngramMode::Direct:
      return direct_engram_rows(weights, compute, options, max_ids);
    case EngramMode::Resident:
      return resident_engram_rows(weights, compute, options);
  }
  return mapped_engram_rows(weights, compute);
}

}  // namespace dsv41
