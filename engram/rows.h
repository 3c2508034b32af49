// Where Engram table rows come from. A source gathers rows of one layer's table for many tokens at once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/compute.h"
#include "loader/weights.h"

namespace dsv41 {

/// Gathers are announced before layer 0 runs and collected when the Engram layer needs them.
class EngramRows {
 public:
  virtual ~EngramRows() = default;
  /// Announces the ids of a step for table `table` (index in engram_layer_ids). ids: [tokens * columns], copied.
  virtual void request(std::size_t table, std::span<const std::uint64_t> ids) = 0;
  /// Rows of the announced ids, dequantized: bf16 [tokens * columns, width]. Blocks until they are there.
  virtual void collect(std::size_t table, std::span<BFloat16> rows) = 0;
};

/// Rows read through the mapped file.
std::unique_ptr<EngramRows> mapped_engram_rows(const ModelWeights& weights, Compute& compute);

}  // namespace dsv41
