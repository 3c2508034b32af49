// The kernels: all routed experts of one call in one launch (docs/model.md 4), and a single FP4 linear.
// Thread blocks take work items from a counter until none is left: first items that expand the activations,
// then tiles of w1 and w3, then tiles of w2. An item waits only for items with smaller numbers, which running
// blocks hold: no launch order and no number of resident blocks can stall it. Device code through portable.h
// only.
#pragma once

#include "kernels/cuda/block_dot.h"
#include "kernels/exact_math.h"

namespace dsv41::cuda {

/// The next work item, the same for all threads of the block.
DSV41_DEVICE std::uint32_t next_item(std::uint32_t* ticket) {
  auto* const broadcast = reinterpret_cast<std::uint32_t*>(shared_memory());
  if (thread_index() == 0) *broadcast = take_ticket(ticket);
  sync_block();
  const std::uint32_t item = *broadcast;
  sync_block();
  return item;
}

/// After all threads have written what `counter` promises.
DSV41_DEVICE void announce(std::uint32_t* counter) {
  sync_block();
  if (thread_index() == 0) release_one(counter);
}

DSV41_DEVICE void expand_item(std::uint32_t item, std::uint32_t total, const std::uint8_t* codes,
                              const std::uint8_t* scales, const Expanded& out, std::uint32_t* counter) {
  const std::uint32_t end = (item + 1) * kExpandBlocks < total ? (item + 1) * kExpandBlocks : total;
  for (std::uint32_t block = item * kExpandBlocks + warp_index(); block < end; block += kThreads / kWarp)
    expand_block(codes[std::size_t{block} * kBlock + lane_index()], scales[block], out, block);
  announce(counter);
}

/// bf16(silu(min(g, limit)) * clamp(u) * weight), one chain in fp64 (docs/numerics.md 4).
DSV41_DEVICE float activate(std::uint16_t gate, std::uint16_t up, float weight, float limit) {
  float g = to_float(BFloat16{gate}), u = to_float(BFloat16{up});
  if (limit != 0.0f) {
    g = g > limit ? limit : g;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
  }
  const double silu = g / (1.0 + exact::exp(-static_cast<double>(g)));
  return to_float(to_bfloat16(silu * static_cast<double>(u) * static_cast<double>(weight)));
}

/// act_quant of one block (docs/model.md 1), a value per lane: the lane's code; the block's scale code in
/// `scale`.
DSV41_DEVICE std::uint32_t quantize_lane(float value, std::uint32_t& scale) {
  float largest = magnitude(value);
  if (value != value) largest = 0.0f;
  for (unsigned mask = 16; mask != 0; mask >>= 1) {
    const float other = bits_float(shuffle_xor(float_bits(largest), mask));
    largest = other > largest ? other : largest;
  }
  largest = largest > 1e-4f ? largest : 1e-4f;
  const std::uint32_t bits = float_bits(multiply(largest, 1.0f / 448.0f));
  scale = (bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u);
  if (scale == 255) return 0x7F;  // the block holds an infinity: its scale is NaN, and so is all it divides
  // Dividing by a power of two is multiplying by its inverse, which fp32 holds for every scale but NaN.
  float scaled = multiply(value, decode_scale(254 - scale));
  scaled = scaled > 448.0f ? 448.0f : scaled < -448.0f ? -448.0f : scaled;
  return encode_e4m3(scaled);
}

template <unsigned kRows, unsigned kStages>
DSV41_DEVICE void run_experts(const ExpertLaunch& launch) {
  const std::uint32_t dim_blocks = launch.dim / kBlock, inter_blocks = launch.inter / kBlock;
  const std::uint32_t expand_count = expand_items(launch.rows, launch.dim);
  const std::uint32_t up_features = launch.inter / kHalf;
  const std::uint32_t down_features = (launch.dim + kTileFeatures - 1) / kTileFeatures;
  const std::uint32_t up_count = launch.tiles * up_features, down_count = launch.tiles * down_features;

  for (;;) {
    std::uint32_t item = next_item(launch.ticket);
    if (item < expand_count) {
      expand_item(item, launch.rows * dim_blocks, launch.codes, launch.scales, launch.x, launch.expanded);
      continue;
    }
    item -= expand_count;
    if (item >= up_count + down_count) return;
    const bool up = item < up_count;
    if (!up) item -= up_count;

    // Items of a task are numbered feature tile by feature tile, its row tiles inside, so that blocks which
    // run at the same time read the same weights.
    const std::uint32_t features = up ? up_features : down_features;
    const DeviceTask& task = launch.tasks[launch.row_tiles[item / features].task];
    const std::uint32_t inside = item - task.first_tile * features;
    const std::uint32_t tile_index = task.first_tile + inside % task.tiles;
    const std::uint32_t feature_tile = inside / task.tiles;
    const RowTile rows = launch.row_tiles[tile_index];

    Tile<kRows, kStages> tile;
    tile.source.first = rows.first_route;
    tile.source.rows = rows.rows;
    tile.source.dot_rows = launch.dot_rows;
    // Of D only a multiple of 32 is certain: where a tile of w2 is half empty, its second half repeats the
    // first.
    const std::uint32_t left = launch.dim - feature_tile * kTileFeatures;
    tile.source.set_matrices(up ? task.w1 : task.w2, up ? task.w3 : task.w2,
                             up ? feature_tile * kHalf : feature_tile * kTileFeatures,
                             up || left <= kHalf ? 0 : kHalf, kHalf, kHalf, up ? dim_blocks : inter_blocks);
    tile.source.x = up ? launch.x : launch.hidden;
    tile.source.gather = up ? launch.route_rows : nullptr;
    tile.source.ready = up ? launch.expanded : launch.finished + tile_index;
    tile.source.ready_count = up ? expand_count : up_features;
    tile.compute();

    const std::uint16_t* const results = tile.results();
    constexpr unsigned kStride = Tile<kRows, kStages>::kResultStride;
    if (up) {
      for (unsigned row = warp_index(); row < rows.rows; row += kThreads / kWarp) {
        const std::uint16_t* const pair = results + row * kStride + lane_index();
        const std::uint32_t route = rows.first_route + row;
        std::uint32_t scale = 0;
        const std::uint32_t code =
            quantize_lane(activate(pair[0], pair[kHalf], launch.route_weights[route], launch.limit), scale);
        expand_block(code, scale, launch.hidden, std::size_t{route} * inter_blocks + feature_tile);
      }
      announce(launch.finished + tile_index);
    } else {
      const unsigned valid = left < kTileFeatures ? left : kTileFeatures;
      for (unsigned i = thread_index(); i < rows.rows * kTileFeatures; i += kThreads) {
        const unsigned row = i / kTileFeatures, feature = i % kTileFeatures;
        if (feature < valid)
          launch
              .outputs[std::size_t{launch.route_outputs[rows.first_route + row]} * launch.dim +
                       feature_tile * kTileFeatures + feature]
              .bits = results[row * kStride + feature];
      }
    }
  }
}

template <unsigned kRows, unsigned kStages>
DSV41_DEVICE void run_linear(const LinearLaunch& launch) {
  const std::uint32_t blocks = launch.k / kBlock, expand_count = expand_items(launch.rows, launch.k);
  const std::uint32_t row_tiles = (launch.rows + launch.rows_per_tile - 1) / launch.rows_per_tile;
  const std::uint32_t feature_tiles = (launch.weight.n + kTileFeatures - 1) / kTileFeatures;
  for (;;) {
    std::uint32_t item = next_item(launch.ticket);
    if (item < expand_count) {
      expand_item(item, launch.rows * blocks, launch.codes, launch.scales, launch.x, launch.expanded);
      continue;
    }
    item -= expand_count;
    if (item >= row_tiles * feature_tiles) return;
    const std::uint32_t row_tile = item % row_tiles, feature_tile = item / row_tiles;
    const std::uint32_t left = launch.weight.n - feature_tile * kTileFeatures;

    Tile<kRows, kStages> tile;
    tile.source.first = row_tile * launch.rows_per_tile;
    tile.source.rows = launch.rows - tile.source.first < launch.rows_per_tile
                           ? launch.rows - tile.source.first
                           : launch.rows_per_tile;
    tile.source.dot_rows = launch.dot_rows;
    tile.source.set_matrices(launch.weight, launch.weight, feature_tile * kTileFeatures,
                             left <= kHalf ? 0 : kHalf, left < kHalf ? left : kHalf,
                             left <= kHalf          ? left
                             : left < kTileFeatures ? left - kHalf
                                                    : kHalf,
                             blocks);
    tile.source.x = launch.x;
    tile.source.gather = nullptr;
    tile.source.ready = launch.expanded;
    tile.source.ready_count = expand_count;
    tile.compute();

    const unsigned valid = left < kTileFeatures ? left : kTileFeatures;
    for (unsigned i = thread_index(); i < tile.source.rows * kTileFeatures; i += kThreads) {
      const unsigned row = i / kTileFeatures, feature = i % kTileFeatures;
      if (feature < valid)
        launch
            .outputs[std::size_t{tile.source.first + row} * launch.weight.n + feature_tile * kTileFeatures +
                     feature]
            .bits = tile.results()[row * Tile<kRows, kStages>::kResultStride + feature];
    }
  }
}

}  // namespace dsv41::cuda
