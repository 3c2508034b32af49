// Engram (docs/model.md 5): n-gram rows gathered from the tables join the residual stream through a gate.
#pragma once

#include <vector>

#include "engram/hashing.h"
#include "engram/rows.h"
#include "engram/token_map.h"
#include "runtime/context.h"
#include "runtime/hyper_connections.h"
#include "runtime/step.h"

namespace dsv41 {

class EngramLayers {
 public:
  /// Throws CheckpointError when the token map or the primes contradict the config.
  EngramLayers(const ModelContext& context, TokenMap map, EngramRows& rows);

  /// Before layer 0: remembers the step's tokens, hashes them and announces all gathers.
  void prepare(const Step& step);
  /// Table `table` (index in engram_layer_ids) into the stream of these rows of the step.
  void forward(const RowSet& active, std::size_t table, Stream& stream);

 private:
  const ModelContext& context_;
  TokenMap map_;
  EngramRows& rows_source_;
  std::vector<HashLayer> layers_;
  std::size_t step_rows_ = 0;
  EngramCounters counted_;           // when the recorder was told last
  std::vector<std::uint64_t> ids_;   // [tables, rows, columns]
  std::vector<HashedToken> recent_;  // [max_ngram_size]
  std::vector<BFloat16> rows_;       // [max_rows, columns * width]
  std::vector<std::uint8_t> codes_, scales_;
  std::vector<BFloat16> kv_;  // [max_rows, (M + 1) * D]: keys, then the value
  std::vector<float> gates_;  // [max_rows, M]
};

}  // namespace dsv41
