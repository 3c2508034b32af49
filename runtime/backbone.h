// The whole forward pass over a step (docs/model.md 2): from rows of token ids to logits.
#pragma once

#include <vector>

#include "runtime/attention.h"
#include "runtime/context.h"
#include "runtime/engram_layer.h"
#include "runtime/hyper_connections.h"
#include "runtime/moe.h"
#include "runtime/step.h"

namespace dsv41 {

class Backbone {
 public:
  /// All references must outlive the object.
  Backbone(const ModelContext& context, TokenMap token_map, Experts& experts, EngramRows& rows);

  /// Runs one step, stores its keys in the sequences and advances them. Returns fp32 logits [step.logit_rows,
  /// V], valid until the next call. Throws std::invalid_argument when the step has no rows or more than
  /// max_rows.
  std::span<const float> forward(const Step& step);

  /// Means of the stream in front of the draft target layers, bf16 [rows, targets * D], of the rows of the
  /// last step. Rows that were left out below a target layer (Skipped) hold nothing.
  std::span<const BFloat16> main_hidden() const { return main_hidden_; }

  /// Rows times layers that were computed and that RowPlan left out, since the start.
  struct RowCounts {
    std::uint64_t computed = 0, skipped = 0;
  };
  const RowCounts& row_counts() const { return row_counts_; }

 private:
  void embed(const Step& step);
  /// One layer: takes in the rows of `active_`, leaves those whose output is needed.
  void block(const Step& step, std::uint32_t layer);
  /// From the rows whose keys are stored to those whose output of `layer` is needed: stream and x close up.
  void drop_rows(std::uint32_t layer);
  void collect_main_hidden(std::uint32_t layer);
  std::span<const float> head(const Step& step);

  const ModelContext& context_;
  HyperConnections hyper_connections_;
  Attention attention_;
  Moe moe_;
  EngramLayers engram_;
  RowPlan plan_;
  RowCounts row_counts_;
  std::uint64_t total_rows_ = 0;
  RowSet active_;  // rows that are being computed
  RowSet stored_;  // rows whose keys of the layer at hand are stored: active_ before drop_rows
  Stream stream_;
  Mixes mixes_;
  std::vector<BFloat16> x_, y_;  // [max_rows, D]: input and output of a half-block
  std::vector<BFloat16> main_hidden_;
  std::vector<float> logits_;
};

}  // namespace dsv41
