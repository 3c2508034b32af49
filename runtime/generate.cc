#include "runtime/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "loader/error.h"

namespace dsv41 {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The part of a generation that one step advances.
class Generation {
 public:
  Generation(Backbone& backbone, const ModelConfig& config, const GenerationOptions& options,
             const GenerationCallbacks& callbacks)
      : backbone_(backbone), config_(config), options_(options), callbacks_(callbacks), sequence_(config) {}

  /// Processes ids; returns the logits of the last one when `sampled`. prompt_end as in Step::add.
  std::span<const float> run(std::span<const std::uint32_t> ids, bool sampled, std::uint32_t prompt_end) {
    step_.clear();
    ++step_.number;
    // Only the prompt's last token is asked for anything, unless all logits are wanted.
    const bool skip = options_.skip_rows && !options_.all_logits;
    step_.add(sequence_, ids, options_.all_logits ? ids.size() : (sampled ? 1 : 0), skip ? prompt_end : 0);
    const std::span<const float> logits = backbone_.forward(step_);
    if (options_.all_logits && callbacks_.on_logits) callbacks_.on_logits(ids, logits);
    return logits.empty() ? logits : logits.last(config_.vocab_size);
  }

  std::uint32_t sample(std::span<const float> logits) {
    return sampler_.sample(logits, options_.sampling, sequence_.length() - 1);
  }
  std::uint32_t length() const { return sequence_.length(); }

 private:
  Backbone& backbone_;
  const ModelConfig& config_;
  const GenerationOptions& options_;
  const GenerationCallbacks& callbacks_;
  Sequence sequence_;
  Sampler sampler_;
  Step step_;
};

}  // namespace

std::string_view finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::Stop:
      return "stop";
    case FinishReason::Length:
      return "length";
    case FinishReason::Stopped:
      return "stopped";
  }
  return "";
}

void check_prompt(const ModelConfig& config, std::span<const std::uint32_t> prompt) {
  if (prompt.empty()) throw UsageError("the prompt is empty: give at least one token");
  for (const std::uint32_t id : prompt)
    if (id >= config.vocab_size)
      throw UsageError(
          fmt::format("token id {} is outside the vocabulary of {} entries", id, config.vocab_size));
  if (prompt.size() > config.max_positions())
    throw UsageError(
        fmt::format("the prompt has {} tokens, but the model's context holds {} (max_position_embeddings)",
                    prompt.size(), config.max_positions()));
}

GenerationResult generate(Backbone& backbone, const ModelConfig& config,
                          std::span<const std::uint32_t> prompt, const GenerationOptions& options,
                          const GenerationCallbacks& callbacks) {
  check_prompt(config, prompt);
  const auto stop_requested = [&] { return callbacks.stop_requested && callbacks.stop_requested(); };
  const auto enter = [&](std::string_view phase) {
    if (callbacks.on_phase) callbacks.on_phase(phase);
  };
  Generation generation(backbone, config, options, callbacks);
  GenerationResult result;

  enter("prefill");
  auto start = std::chrono::steady_clock::now();
  std::span<const float> logits;
  for (std::size_t done = 0; done < prompt.size();) {
    if (stop_requested()) {
      result.finish = FinishReason::Stopped;
      return result;
    }
    const std::size_t rows = std::min<std::size_t>(options.chunk, prompt.size() - done);
    done += rows;
    logits =
        generation.run(prompt.subspan(done - rows, rows), done == prompt.size() && options.max_tokens > 0,
                       static_cast<std::uint32_t>(prompt.size()));
  }
  result.prefill_seconds = seconds_since(start);

  enter("decode");
  start = std::chrono::steady_clock::now();
  while (result.output_ids.size() < options.max_tokens) {
    const std::uint32_t id = generation.sample(logits);
    result.output_ids.push_back(id);
    if (id == config.eos_id() && !options.ignore_eos) {
      result.finish = FinishReason::Stop;
      break;
    }
    if (callbacks.on_token) callbacks.on_token(id);
    if (result.output_ids.size() == options.max_tokens || generation.length() >= config.max_positions())
      break;
    if (stop_requested()) {
      result.finish = FinishReason::Stopped;
      break;
    }
    logits = generation.run({&id, 1}, true, 0);
    ++result.decode_steps;
  }
  result.decode_seconds = seconds_since(start);
  return result;
}

}  // namespace dsv41
