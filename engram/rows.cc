// Table rows through the mapped file: the page cache decides what is read from disk.
#include "engram/rows.h"

#include <fmt/format.h>

#include <stdexcept>
#include <vector>

#include "loader/error.h"

namespace dsv41 {
namespace {

class MappedRows : public EngramRows {
 public:
  MappedRows(const ModelWeights& weights, Compute& compute)
      : tables_(weights.engram), compute_(compute), requested_(weights.engram.size()) {}

  void request(std::size_t table, std::span<const std::uint64_t> ids) override {
    for (const std::uint64_t id : ids)
      if (id >= tables_.at(table).rows)
        throw CheckpointError(
            fmt::format("engram table {}: row {} of {} asked for; config and table do not fit", table, id,
                        tables_[table].rows));
    requested_[table].assign(ids.begin(), ids.end());
  }

  void collect(std::size_t table, std::span<BFloat16> rows) override {
    const EngramWeights& weights = tables_.at(table);
    const std::vector<std::uint64_t>& ids = requested_[table];
    const std::size_t width = weights.rows == 0 ? 0 : weights.table_codes.size() / weights.rows;
    if (rows.size() != ids.size() * width)
      throw std::invalid_argument(
          fmt::format("engram table {}: room for {} values, {} rows of {} were asked for", table, rows.size(),
                      ids.size(), width));
    compute_.threads().parallel_for(ids.size(), 1, [&](Range range) {
      std::vector<float> values(width);
      for (std::size_t i = range.begin; i < range.end; ++i) {
        compute_.ops().dequantize_window(&weights.table_codes[ids[i] * width],
                                         &weights.table_scales[ids[i] * (width / kBlock)], width,
                                         values.data());
        for (std::size_t k = 0; k < width; ++k) rows[i * width + k] = to_bfloat16(values[k]);
      }
    });
  }

 private:
  std::vector<EngramWeights> tables_;
  Compute& compute_;
  std::vector<std::vector<std::uint64_t>> requested_;  // by table
};

}  // namespace

std::unique_ptr<EngramRows> mapped_engram_rows(const ModelWeights& weights, Compute& compute) {
  return std::make_unique<MappedRows>(weights, compute);
}

}  // namespace dsv41
