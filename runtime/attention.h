// Attention of one layer over a step (docs/model.md 3): window, compressed groups, output projection.
#pragma once

#include <vector>

#include "runtime/compressor.h"
#include "runtime/context.h"
#include "runtime/index_selection.h"
#include "runtime/rope_table.h"
#include "runtime/step.h"

namespace dsv41 {

class Attention {
 public:
  explicit Attention(const ModelContext& context);

  /// Once per step, before the first layer: rotation angles of all its rows.
  void prepare(const Step& step);

  /// First half of a layer: window keys, compressed KV and index keys of all rows that come in, x bf16 [rows,
  /// D] (normalized), into the sequences' caches and this layer's scratch.
  void store_keys(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x);

  /// Second half, for rows that are a suffix of each segment of `stored`: out bf16
  /// [rows, D].
  void attend(const RowSet& stored, const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x,
              std::span<BFloat16> out);

  // Draft stages (docs/model.md 6); layer counts on from the backbone's layers.

  /// Window entries of backbone tokens from main_x, bf16 [rows, D].
  void store_main(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> main_x);
  /// Rows of a draft: every row sees the last W window entries before its segment and all rows of the
  /// segment, whose own entries are not kept.
  void attend_block(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x,
                    std::span<BFloat16> out);

 private:
  void attend_rows(const RowSet& stored, const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x,
                   std::span<BFloat16> out);
  const RopeTable& rope(std::uint32_t layer) const {
    return context_.config.compress_ratios[layer] > 0 ? compressed_rope_ : window_rope_;
  }
  void queries(const RowSet& rows, const AttentionWeights& weights, const RopeTable& angles);
  void attend_segment(const Segment& stored, const Segment& segment, std::span<const std::uint32_t> origins,
                      std::uint32_t layer);
  void attend_heads(std::size_t row, std::size_t slots, std::uint32_t layer);
  void decode_window(const Segment& stored, const Segment& segment, std::uint32_t layer);
  void store_window(const Segment& stored, std::uint32_t layer);
  void rotate_back(const RowSet& rows, const RopeTable& angles);
  void project(std::size_t rows, const AttentionWeights& weights, std::span<BFloat16> out);

  const ModelContext& context_;
  const std::size_t heads_, dim_, window_;
  const float scale_;  // RN32(Dh^-0.5)
  RopeTable window_rope_, compressed_rope_;
  Compressor compressor_;
  IndexSelection selection_;

  std::vector<std::uint8_t> x_codes_,
      x_scales_;              // act_quant of the input, and later of the output projection
  std::vector<BFloat16> qr_;  // [max_rows, Q]
  std::vector<std::uint8_t> qr_codes_, qr_scales_;
  std::vector<BFloat16> q_;                         // [max_rows, H, Dh]
  std::vector<BFloat16> kv_;                        // [max_rows, Dh]
  std::vector<std::uint8_t> kv_codes_, kv_scales_;  // window entries of the step
  std::vector<float> window_values_;                // decoded entries of one segment [W-1+max_rows, Dh]
  std::vector<float> group_values_;                 // decoded selection of one row [index_topk, Dh]
  std::vector<const float*> slots_;                 // of one row
  std::vector<BFloat16> heads_out_;                 // [max_rows, H, Dh]
  std::vector<BFloat16> groups_out_;                // [max_rows, G*O]
};

}  // namespace dsv41
