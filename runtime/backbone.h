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

  /// Means of the stream in front of the draft target layers, bf16 [rows, targets * D], of the last step.
  std::span<const BFloat16> main_hidden() const { return main_hidden_; }

 private:
  void embed(const Step& step);
  void block(const Step& step, std::uint32_t layer);
  void collect_main_hidden(const Step& step, std::uint32_t layer);
  std::span<const float> head(const Step& step);

  const ModelContext& context_;
  HyperConnections hyper_connections_;
  Attention attention_;
  Moe moe_;
  EngramLayers engram_;
  Stream stream_;
  Mixes mixes_;
  std::vector<BFloat16> x_, y_;  // [max_rows, D]: input and output of a half-block
  std::vector<BFloat16> main_hidden_;
  std::vector<float> logits_;
};

}  // namespace dsv41
