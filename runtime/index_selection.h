// Which compressed groups a token attends to (docs/model.md 3, "Selection" and "Two-level selection").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/selection.h"
#include "runtime/context.h"
#include "runtime/rope_table.h"
#include "runtime/step.h"

namespace dsv41 {

/// Selections of the newest index source, row by row; Reuse layers read them unchanged.
class IndexSelection {
 public:
  explicit IndexSelection(const ModelContext& context);

  /// Runs an index source. x: bf16 [rows, D]; qr: quantized [rows, Q]; rope: rows of the compressed base.
  void select(const Step& step, std::uint32_t layer, std::span<const BFloat16> x, const QuantizedRows& qr,
              const RopeTable& rope);

  /// Selected groups of a row, ascending.
  std::span<const std::int32_t> selected(std::size_t row) const { return selected_[row]; }

 private:
  void queries(const Step& step, std::uint32_t layer, std::span<const BFloat16> x, const QuantizedRows& qr,
               const RopeTable& rope);
  void score_all(const CompressedCache& cache, std::size_t row, std::size_t visible);
  void score_candidates(const CompressedCache& cache, std::size_t row, std::size_t visible);
  void choose_candidates(std::size_t row);
  /// To the observer, absent slots as -1.
  void show(const Step& step, std::uint32_t layer) const;

  const ModelContext& context_;
  float head_weight_scale_ = 0;
  std::vector<BFloat16> query_, head_weights_;  // [max_rows, heads*dim], [max_rows, heads]
  std::vector<std::uint8_t> query_codes_, query_scales_;
  std::vector<BFloat16> scores_;  // of one row
  std::vector<std::uint8_t> block_mask_;
  std::vector<std::vector<std::uint32_t>> candidates_;  // [max_rows] block ids, ascending
  std::vector<std::vector<std::int32_t>> selected_;     // [max_rows]
};

}  // namespace dsv41
