// What all row sources do alike: checks of ids and room, and the way from codes to bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engram/rows.h"

namespace dsv41 {

/// Values of one row.
inline std::size_t row_width(const EngramWeights& table) {
  return table.rows == 0 ? 0 : table.table_codes.size() / table.rows;
}

/// Throws CheckpointError.
void check_row_ids(const EngramWeights& weights, std::size_t table, std::span<const std::uint64_t> ids);
/// Throws std::invalid_argument.
void check_room(std::size_t table, std::size_t ids, std::size_t width, std::size_t room);

/// What keeps reads from going past the page cache, or from going through io_uring; empty: nothing.
std::string direct_read_note(const std::string& refusal,
                             const std::map<const MappedFile*, DirectFile>& files);

struct StoredRow {
  const std::uint8_t *codes, *scales;  // [width], [width / 32]
};

/// rows: bf16 [count, width]; stored(i) says where row i lies.
template <class Stored>
void dequantize_rows(Compute& compute, std::size_t count, std::size_t width, const Stored& stored,
                     std::span<BFloat16> rows) {
  compute.threads().parallel_for(count, 1, [&](Range range) {
    std::vector<float> values(width);
    for (std::size_t i = range.begin; i < range.end; ++i) {
      const StoredRow row = stored(i);
      compute.ops().dequantize_window(row.codes, row.scales, width, values.data());
      for (std::size_t k = 0; k < width; ++k) rows[i * width + k] = to_bfloat16(values[k]);
    }
  });
}

}  // namespace dsv41
