// Generation of one prompt: prefill in chunks, then token by token, until EOS, the wanted length or a stop
// request.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/backbone.h"
#include "runtime/sampler.h"

namespace dsv41 {

struct GenerationOptions {
  std::uint32_t max_tokens = 128;
  std::uint32_t chunk = 512;  // rows per prefill step
  bool ignore_eos = false;
  bool all_logits = false;  // on_logits sees every position, not only those that are sampled from
  bool skip_rows = true;  // leave out prompt rows that cannot reach the result (RowPlan); never changes a bit
  SamplingOptions sampling;
};

enum class FinishReason { Stop, Length, Stopped };  // EOS, max_tokens or context, SIGUSR1
std::string_view finish_name(FinishReason reason);

struct GenerationCallbacks {
  /// A new token, as soon as it is known; not the EOS that ends the text.
  std::function<void(std::uint32_t id)> on_token;
  /// ids processed in this step and, per row, its logits [rows, V]; only with all_logits.
  std::function<void(std::span<const std::uint32_t> ids, std::span<const float> logits)> on_logits;
  /// Polled between steps.
  std::function<bool()> stop_requested;
  /// "prefill" or "decode", in front of the first step of each.
  std::function<void(std::string_view phase)> on_phase;
};

struct GenerationResult {
  std::vector<std::uint32_t> output_ids;  // the EOS that ended it included
  FinishReason finish = FinishReason::Length;
  double prefill_seconds = 0, decode_seconds = 0;
  std::uint32_t decode_steps = 0;
};

/// prompt: at least one id, all below vocab_size, at most max_positions (checked by check_prompt).
GenerationResult generate(Backbone& backbone, const ModelConfig& config,
                          std::span<const std::uint32_t> prompt, const GenerationOptions& options,
                          const GenerationCallbacks& callbacks);

/// Throws UsageError: no tokens, an id outside the vocabulary, a prompt longer than the context.
void check_prompt(const ModelConfig& config, std::span<const std::uint32_t> prompt);

}  // namespace dsv41
