// An index query as a fast backend prepares it, once for all keys that it meets (kernels/ops.h,
// index_scores).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/views.h"

namespace dsv41 {

/// `Block` is what the backend makes of each block of each head.
template <class Block>
struct PreparedQuery {
  std::vector<Block> blocks;   // [heads][dim / 32]
  std::vector<float> weights;  // [heads]
  int spread = 0;              // largest difference between the scales of one head
  bool usual = false;          // what the backend can do; the others are left to the plain one
  PreparedName name;           // of the IndexQuery

  /// prepare(codes, scales, heads, blocks of a head, out, spread) fills the blocks; false when the query is
  /// unusual.
  template <class Prepare>
  void set(const IndexQuery& query, std::size_t largest_blocks, const Prepare& prepare) {
    if (name.is(query.name)) return;
    const std::size_t count = query.dim / kBlock;
    blocks.resize(query.heads * count), weights.resize(query.heads);
    usual = query.dim % kBlock == 0 && count <= largest_blocks &&
            prepare(query.codes, query.scales, query.heads, count, blocks.data(), spread);
    for (std::size_t head = 0; head < query.heads && usual; ++head) {
      weights[head] = to_float(query.head_weights[head]);
      usual = std::isfinite(weights[head]);
    }
    name.set(query.name);
  }
};

}  // namespace dsv41
