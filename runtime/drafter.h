// DSpark draft stages (docs/model.md 6): after a backbone step they propose the tokens that will follow.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/attention.h"
#include "runtime/context.h"
#include "runtime/draft_source.h"
#include "runtime/hyper_connections.h"
#include "runtime/moe.h"
#include "runtime/sampler.h"
#include "runtime/step.h"

namespace dsv41 {

class Drafter final : public DraftSource {
 public:
  /// model's max_rows bounds the steps that are seeded; at most `sequences` are drafted for at once.
  /// References must outlive the object. The model must have draft stages.
  Drafter(const ModelContext& model, Experts& experts, std::size_t sequences);

  std::size_t block_size() const override { return block_size_; }
  std::size_t capacity() const override { return context_.max_rows / block_size_; }
  /// Stores the stages' window entries of the step's tokens.
  void seed(const Step& step, std::span<const BFloat16> main_hidden) override;
  /// Tokens are those that serial sampling would draw from the draft's logits.
  void draft(std::uint64_t step, std::span<const Ask> asks) override;
  std::span<const std::uint32_t> tokens(std::size_t ask) const override {
    return std::span(tokens_).subspan(ask * block_size_, block_size_);
  }
  std::span<const float> confidence(std::size_t ask) const override {
    return std::span(confidence_).subspan(ask * block_size_, block_size_);
  }
  /// fp32 [block_size, V], Markov bias added.
  std::span<const float> logits(std::size_t ask) const;

 private:
  void stage(std::uint64_t step, std::uint32_t index);
  void propose(std::span<const Ask> asks);

  ModelContext context_;  // of a draft: block_size rows per ask
  const DraftWeights& weights_;
  const std::size_t block_size_;
  HyperConnections hyper_connections_;
  Attention attention_;
  Attention seeding_;  // its buffers fit a whole step
  Moe moe_;
  Moe::Call moe_call_;
  Stream stream_;
  Mixes mixes_;
  Step draft_step_;
  RowSet rows_, seeded_;
  Sampler sampler_;
  std::vector<std::uint8_t> main_codes_, main_scales_;  // act_quant of main_hidden
  std::vector<BFloat16> main_rows_, main_x_;  // rows that are seeded [max_rows, targets*D], [max_rows, D]
  std::vector<BFloat16> x_, y_;               // [rows, D]
  std::vector<BFloat16> collapsed_;           // [rows, D] before the norm
  std::vector<float> logits_;                 // [asks, block_size, V]
  std::vector<BFloat16> markov_embeds_;       // [asks, rank]
  std::vector<float> markov_logits_;          // [asks, V]
  std::vector<BFloat16> confidence_input_;    // [D + rank]
  std::vector<std::uint32_t> tokens_;
  std::vector<float> confidence_;
};

}  // namespace dsv41
