// The whole forward pass over a step (docs/model.md 2): from rows of token ids to logits.
#pragma once

#include <array>
#include <vector>

#include "runtime/attention.h"
#include "runtime/context.h"
#include "runtime/engram_layer.h"
#include "runtime/hyper_connections.h"
#include "runtime/moe.h"
#include "runtime/overlap.h"
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
  /// last step. Rows that were left out below a target layer (RowPlan) hold nothing.
  std::span<const BFloat16> main_hidden() const { return main_hidden_; }

  /// Which steps run as two halves: while the experts of one are away, the other is computed here. Exact: the
  /// second half finds in the caches what the first has stored. Default: none.
  void set_overlap(Overlap::Mode mode) { overlap_ = Overlap(mode); }

  /// Rows times layers that were computed and that RowPlan left out, since the start.
  struct RowCounts {
    std::uint64_t computed = 0, skipped = 0;
  };
  const RowCounts& row_counts() const { return row_counts_; }

  /// Steps that ran as two halves, since the start.
  std::uint64_t halved_steps() const { return halved_steps_; }

 private:
  /// The rows that go through the layers together.
  struct Lane {
    RowSet active;  // rows that are being computed
    RowSet stored;  // rows whose keys of the layer at hand are stored: active before drop_rows
    Stream stream;
    Mixes mixes;
    std::vector<BFloat16> x, y;  // [max_rows, D]: input and output of a half-block
    Moe::Call moe;
  };

  std::span<Lane> make_lanes(const Step& step, std::size_t count);
  /// All layers, each lane in turn.
  void run_layers(const Step& step, std::span<Lane> lanes);
  void embed(const Step& step, Lane& lane);
  /// One layer up to the experts' departure, and from their return. Takes in the rows of lane.active, leaves
  /// those whose output is needed.
  void begin_block(const Step& step, std::uint32_t layer, Lane& lane);
  void finish_block(std::uint32_t layer, Lane& lane);
  /// From the rows whose keys are stored to those whose output of `layer` is needed: stream and x close up.
  void drop_rows(std::uint32_t layer, Lane& lane);
  void collect_main_hidden(std::uint32_t layer, const Lane& lane);
  std::span<const float> head(const Step& step, std::span<const Lane> lanes);

  const ModelContext& context_;
  HyperConnections hyper_connections_;
  Attention attention_;
  Moe moe_;
  EngramLayers engram_;
  RowPlan plan_;
  Overlap overlap_;
  std::uint64_t total_rows_ = 0;
  RowCounts row_counts_;
  std::uint64_t halved_steps_ = 0;
  std::array<Lane, kCallsInFlight> lanes_;
  std::vector<BFloat16> main_hidden_;
  std::vector<BFloat16> hidden_;  // [max_rows, D] input of the head
  std::vector<float> logits_;
};

}  // namespace dsv41
