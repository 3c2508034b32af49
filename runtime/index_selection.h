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

/// Selections of the newest index source, row by row; Reuse layers read them unchanged. They are kept by the
/// row's number in the step, which does not change when rows are left out between layers.
class IndexSelection {
 public:
  explicit IndexSelection(const ModelContext& context);

  /// Runs an index source. x: bf16 [rows, D]; qr: quantized [rows, Q]; rope: rows of the compressed base.
  void select(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x, const QuantizedRows& qr,
              const RopeTable& rope);

  /// Selected groups, ascending, of the row that was `origin` in the step.
  std::span<const std::int32_t> selected(std::size_t origin) const { return selected_[origin]; }

 private:
  void queries(const RowSet& rows, std::uint32_t layer, std::span<const BFloat16> x, const QuantizedRows& qr,
               const RopeTable& rope);
  IndexQuery query(std::size_t row) const;
  void score_all(const CompressedCache& cache, std::size_t row, std::size_t visible);
  void score_candidates(const CompressedCache& cache, std::size_t row, std::size_t visible,
                        const std::vector<std::uint32_t>& candidates, std::vector<std::int32_t>& selected);
  void choose_candidates(std::vector<std::uint32_t>& candidates);
  /// To the observer, absent slots as -1.
  void show(const RowSet& rows, std::uint32_t layer) const;

  const ModelContext& context_;
  float head_weight_scale_ = 0;
  std::vector<BFloat16> query_, head_weights_;  // [max_rows, heads*dim], [max_rows, heads]
  std::vector<std::uint8_t> query_codes_, query_scales_;
  std::vector<std::uint64_t> query_names_;  // [max_rows]: IndexQuery::name
  std::vector<BFloat16> scores_;  // of one row
  std::vector<std::uint8_t> block_mask_;
  std::vector<std::vector<std::uint32_t>> candidates_;  // [max_rows] block ids, ascending
  std::vector<std::vector<std::int32_t>> selected_;     // [max_rows]
};

}  // namespace dsv41
