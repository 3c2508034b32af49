// Where proposals for the next tokens come from. What is proposed never changes the output, only how many
// rows a step can verify at once.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/sampler.h"
#include "runtime/step.h"

namespace dsv41 {

class DraftSource {
 public:
  virtual ~DraftSource() = default;

  /// Tokens per draft at most, and sequences that one draft() takes.
  virtual std::size_t block_size() const = 0;
  virtual std::size_t capacity() const = 0;

  /// After every backbone step. main_hidden: Backbone::main_hidden().
  virtual void seed(const Step& step, std::span<const BFloat16> main_hidden) = 0;

  /// One sequence to draft for: it ends at position p, `next` is the token chosen for p+1.
  struct Ask {
    Sequence* sequence = nullptr;
    std::uint32_t next = 0;
    SamplingOptions sampling;
  };
  /// Drafts for all asks together.
  virtual void draft(std::uint64_t step, std::span<const Ask> asks) = 0;

  /// Of the last draft(): the tokens after `next` [block_size], and how sure the source is of each (a logit,
  /// fp32).
  virtual std::span<const std::uint32_t> tokens(std::size_t ask) const = 0;
  virtual std::span<const float> confidence(std::size_t ask) const = 0;
};

}  // namespace dsv41
