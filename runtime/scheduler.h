// Continuous batching: many requests share steps, a finished one makes room at once, and every one gets the
// bits it would get alone (docs/runtime.md, "Invariance"). Decode rows go first into each step, prompt chunks
// fill what is left in the order of arrival, so that neither starves the other.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loader/tokenizer.h"
#include "runtime/backbone.h"
#include "runtime/draft_source.h"
#include "runtime/sampler.h"
#include "runtime/speculation.h"

namespace dsv41 {

struct GenerationRequest {
  std::string id;                     // the caller's; not interpreted
  std::vector<std::uint32_t> prompt;  // BOS included
  std::uint32_t max_tokens = 128;
  bool ignore_eos = false;
  SamplingOptions sampling;
  std::vector<std::string> stop;  // texts that end the output, not part of it
};

enum class FinishReason { Stop, Length, Stopped };  // EOS or stop text, max_tokens or context, stop request
inline std::string_view finish_name(FinishReason reason) {
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

struct GenerationResult {
  std::vector<std::uint32_t> output_ids;  // the EOS that ended it included
  std::string text;
  FinishReason finish = FinishReason::Length;
  std::uint32_t prompt_tokens = 0, reused_tokens = 0;  // reused: taken over from another request's prefix
  double queue_seconds = 0, prefill_seconds = 0, decode_seconds = 0;
  std::uint32_t decode_steps = 0;
  std::uint32_t drafted = 0, accepted = 0;  // draft tokens in steps, and those that agreed
};

/// What a request's owner hears. Any of them may be empty.
struct RequestCallbacks {
  std::function<void(const std::string& piece)> on_text;  // certain text, as soon as it is
  /// ids processed and the logits after each, [rows, V]; makes the scheduler compute all of them.
  std::function<void(std::span<const std::uint32_t> ids, std::span<const float> logits)> on_logits;
  std::function<void(const GenerationResult& result)> on_finish;
};

struct SchedulerOptions {
  std::size_t batch = 1;                        // sequences at a time
  std::size_t step_rows = 512;                  // rows per step at most
  std::size_t chunk = 512;                      // prompt rows of one sequence per step at most
  std::size_t context_bytes = ~std::size_t{0};  // of sequence state
  bool skip_rows = true;                        // RowPlan; never changes a bit
  bool share_prefixes = true;                   // never changes a bit
  SpeculationOptions speculation{};             // never changes a bit
};

class Scheduler {
 public:
  /// All references must outlive the object.
  /// drafter: for speculation; null where the model has no draft stages or nobody wants them. recorder: gets
  /// begin and end of every step; null: nothing is measured.
  Scheduler(Backbone& backbone, const ModelConfig& config, const Tokenizer& tokenizer,
            const SchedulerOptions& options, DraftSource* drafter = nullptr, Recorder* recorder = nullptr);
  ~Scheduler();

  /// Throws UsageError: empty prompt, id outside the vocabulary, longer than the context, or state that can
  /// never fit.
  void submit(GenerationRequest request, RequestCallbacks callbacks);
  /// Requests that wait or run.
  std::size_t pending() const { return waiting_.size() + running_.size(); }
  /// Whether more requests would only wait.
  bool saturated() const { return waiting_.size() >= kLookAhead; }

  /// Runs one step; false when nothing is pending.
  bool step();
  /// Ends everything that is pending with FinishReason::Stopped.
  void stop();

  /// "prefill" while the last step held prompt rows, else "decode".
  std::string_view phase() const { return prefilling_ ? "prefill" : "decode"; }

  const SpeculationCounts& speculation() const { return speculation_.counts(); }

  /// Waiting requests whose prompts are compared for common prefixes.
  static constexpr std::size_t kLookAhead = 256;

 private:
  struct Active;

  void admit();
  std::size_t reservation(const GenerationRequest& request) const;
  bool fits(const GenerationRequest& request, std::size_t reserved) const;
  void plan_prefixes(Active& active);
  void assemble();
  StepKind step_kind() const;
  std::uint32_t sample(const Active& active, std::span<const float> logits, std::uint32_t position);
  /// Hands each sequence its part of the step: the tokens that were processed and the logits that were
  /// wanted.
  void collect(std::span<const float> logits);
  void prefilled(Active& active, std::span<const std::uint32_t> ids, std::span<const float> logits);
  void decoded(Active& active, std::span<const std::uint32_t> ids, std::span<const float> logits);
  /// Takes a sampled token into the output; the reason if it ends the request.
  std::optional<FinishReason> accept(Active& active, std::uint32_t id);
  /// Drafts for every sequence that goes on decoding.
  void draft_ahead();
  void emit(Active& active, std::size_t end);
  void finish(Active& active, FinishReason reason);

  Backbone& backbone_;
  const ModelConfig& config_;
  const Tokenizer& tokenizer_;
  SchedulerOptions options_;
  DraftSource* drafter_;
  Recorder* recorder_;
  Speculation speculation_;
  std::vector<DraftSource::Ask> asks_;
  std::vector<Active*> asking_;
  Sampler sampler_;
  Step step_;
  StepOutcome outcome_;  // of the step at hand
  bool prefilling_ = false, speculating_ = false;
  std::size_t turn_ = 0;
  std::size_t reserved_bytes_ = 0;
  std::deque<std::unique_ptr<Active>> waiting_;
  std::vector<std::unique_ptr<Active>> running_;
  std::vector<Active*> in_step_;  // in the order of the step's segments
};

/// Throws UsageError: no tokens, an id outside the vocabulary, a prompt longer than the context.
void check_prompt(const ModelConfig& config, std::span<const std::uint32_t> prompt);

}  // namespace dsv41
