// The memory that host and kernels share: what one launch works on, and how its work is numbered. Plain
// structs, no CUDA types; all pointers are device addresses, multiples of 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/views.h"

namespace dsv41::cuda {

inline constexpr unsigned kThreads = 128;      // per thread block, four warps
inline constexpr unsigned kTileFeatures = 64;  // weight rows of one work item: 16 per warp
inline constexpr unsigned kHalf =
    kTileFeatures / 2;                       // in the first product, 32 rows of w1 beside the same 32 of w3
inline constexpr unsigned kStageBlocks = 4;  // blocks of 32 along K that one pipeline stage holds
inline constexpr unsigned kRowsPerProduct =
    4;  // activation rows of one tensor-core product: 8 columns, two digits
inline constexpr unsigned kExpandBlocks = 32;  // activation blocks that one expanding work item converts
inline constexpr unsigned kDotRows = 2;        // most rows of the dot4 path

/// One block of 32 activations as the products want it. The E4M3 codes are integers in units of 2^-9; v is
/// the integer without the block's common factor of two, written in balanced digits: v = low + 256 high +
/// 65536 top.
struct BlockScale {
  // What both sums start from: kMagic - 12 * (sum of digits). Weights are looked up with 12 added (so that
  // bytes never borrow), and kMagic makes the int32 sum readable as a float.
  std::int32_t start_low, start_high;
  float scale;  // s_x
  float unit;   // value of one step of v times one half unit of E2M1; the sign bit marks a block as special:
                // it has top digits, or its scale is outside kRegularActivation. NaN if a code is NaN.
};
/// 1.5 * 2^23 as a float's bits: adding an integer below 2^22 to the bits adds it to the value.
inline constexpr std::int32_t kMagicBits = 0x4B400000;
inline constexpr float kMagic = 12582912.0f;

/// Scale codes for which s_x * unit * s_w and everything behind it is exact in fp32, so that one fused
/// multiply-add has the contract's single rounding (docs/cuda.md).
inline constexpr unsigned kRegularActivationLow = 64, kRegularActivationHigh = 190;
inline constexpr unsigned kRegularWeightLow = 64, kRegularWeightHigh = 174;

/// Activations expanded into digits, [rows, blocks].
struct Expanded {
  std::uint8_t* digits;  // 64 per block: 32 low, 32 high
  std::uint8_t* top;     // 32 per block, zero unless the block is special
  BlockScale* scales;
};

/// A resident weight matrix [n, k]: the file's bytes.
struct DeviceMatrix {
  const std::uint8_t* codes;
  const std::uint8_t* scales;  // readable to the next multiple of 16
  std::uint32_t n;
  std::uint32_t regular;  // all scale codes inside kRegularWeight
};

struct DeviceTask {
  DeviceMatrix w1, w3, w2;
  std::uint32_t first_tile, tiles;  // its row tiles
};

/// At most `rows_per_tile` routes of one task.
struct RowTile {
  std::uint32_t task, first_route, rows;
};

/// One call: all routed experts of one block on this device.
struct ExpertLaunch {
  std::uint32_t dim, inter;    // D and I
  std::uint32_t rows, tiles;   // activation rows; row tiles of all tasks
  std::uint32_t dot_rows;      // row tiles of at most this many rows take the dot4 path (<= kDotRows)
  float limit;                 // swiglu_limit
  const std::uint8_t* codes;   // [rows, D]
  const std::uint8_t* scales;  // [rows, D/32]
  const DeviceTask* tasks;
  const RowTile* row_tiles;
  const std::uint32_t* route_rows;     // [routes]
  const float* route_weights;          // [routes]
  const std::uint32_t* route_outputs;  // [routes]: the row of `outputs` that each fills
  Expanded x;                          // [rows, D/32]
  Expanded hidden;                     // [routes, I/32]
  BFloat16* outputs;                   // rows of D
  // Zero before the launch: next work item, expanded items of x, finished tiles of `hidden` per row tile.
  std::uint32_t* ticket;
  std::uint32_t* expanded;
  std::uint32_t* finished;
};

/// One FP4 linear by the same code: tests with any number of features, and the benchmark.
struct LinearLaunch {
  std::uint32_t k, rows, rows_per_tile, dot_rows;
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  DeviceMatrix weight;
  Expanded x;
  BFloat16* outputs;  // [rows, weight.n]
  std::uint32_t* ticket;
  std::uint32_t* expanded;
};

constexpr std::uint32_t expand_items(std::uint32_t rows, std::uint32_t k) {
  return static_cast<std::uint32_t>(ceil_div(std::size_t{rows} * (k / kBlock), kExpandBlocks));
}

/// Kernel variants: the rows of a tile and the stages of the pipeline are compile-time constants.
enum class Variant : std::uint8_t { Rows8, Rows16, Rows32, Rows8Deep };
constexpr std::uint32_t rows_per_tile(Variant variant) {
  return variant == Variant::Rows32 ? 32 : variant == Variant::Rows16 ? 16 : 8;
}
constexpr unsigned stages(Variant variant) {
  return variant == Variant::Rows8Deep ? 4 : variant == Variant::Rows32 ? 3 : 2;
}

/// Byte offsets in a thread block's shared memory. Strides are chosen so that no access has bank conflicts.
struct SharedLayout {
  static constexpr std::uint32_t kWeightStride = kStageBlocks * 16 + 16;
  static constexpr std::uint32_t kDigitStride = kStageBlocks * 64 + 64;
  static constexpr std::uint32_t kScaleStride = kStageBlocks * sizeof(BlockScale) + 16;
  static constexpr std::uint32_t kBroadcast = 16;  // the work item's number

  std::uint32_t rows, stage_count;
  constexpr std::uint32_t digits() const { return kTileFeatures * kWeightStride; }
  constexpr std::uint32_t scales() const { return digits() + rows * kDigitStride; }
  constexpr std::uint32_t stage_bytes() const { return scales() + rows * kScaleStride; }
  constexpr std::uint32_t weight_scales() const { return kBroadcast + stage_count * stage_bytes(); }
  /// longest: the larger of D and I, in blocks.
  constexpr std::uint32_t total(std::uint32_t longest) const {
    return weight_scales() + 2 * static_cast<std::uint32_t>(ceil_div(kHalf * std::size_t{longest}, 16) * 16);
  }
};

}  // namespace dsv41::cuda
