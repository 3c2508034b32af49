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

  /// Once per step, before the first layer.
  void prepare(const Step& step);

  /// x: bf16 [rows, D] (normalized). out: bf16 [rows, D]. Stores the step's keys in the sequences.
  void forward(const Step& step, std::uint32_t layer, std::span<const BFloat16> x, std::span<BFloat16> out);

 private:
  void queries(std::size_t rows, const AttentionWeights& weights, const RopeTable& rope);
  void window_keys(std::size_t rows, const AttentionWeights& weights, const RopeTable& rope);
  void attend(const Segment& segment, std::uint32_t layer);
  void decode_window(const Segment& segment, std::uint32_t layer);
  void store_window(const Segment& segment, std::uint32_t layer);
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
