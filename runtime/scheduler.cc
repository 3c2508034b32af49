#include "runtime/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "loader/error.h"

namespace dsv41 {
namespace {

using Clock = std::chrono::steady_clock;

/// Shorter common prefixes are not worth a copy of a sequence's windows.
constexpr std::size_t kShortestSharedPrefix = 16;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// Bytes at the end of `text` that could still become a stop text.
std::size_t undecided_tail(const std::string& text, const std::vector<std::string>& stops) {
  std::size_t longest = 0;
  for (const std::string& stop : stops) {
    for (std::size_t length = std::min(stop.size() - 1, text.size()); length > longest; --length) {
      if (text.compare(text.size() - length, length, stop, 0, length) == 0) longest = length;
    }
  }
  return longest;
}

}  // namespace

struct Scheduler::Active {
  Active(GenerationRequest asked, RequestCallbacks heard, const Tokenizer& tokenizer)
      : request(std::move(asked)), callbacks(std::move(heard)), decoder(tokenizer, false) {}

  bool prefilled() const { return done == request.prompt.size(); }

  GenerationRequest request;
  RequestCallbacks callbacks;
  GenerationResult result;
  StreamingDecoder decoder;
  std::size_t emitted = 0;  // bytes of result.text that on_text has seen

  std::unique_ptr<Sequence> sequence;
  std::size_t reserved = 0;              // bytes of context_bytes
  std::size_t done = 0;                  // prompt tokens that are in the sequence
  std::vector<std::uint32_t> pending;    // what the next decode step processes
  std::vector<std::size_t> fork_points;  // ascending: prompt lengths at which others want a copy

  // While it waits: whose prefix it will take over, and how much of it.
  const Active* prefix_owner = nullptr;
  std::size_t prefix_length = 0;
  std::shared_ptr<const Sequence> prefix;

  bool finished = false;
  Clock::time_point submitted = Clock::now(), admitted, decoding;
};

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

Scheduler::Scheduler(Backbone& backbone, const ModelConfig& config, const Tokenizer& tokenizer,
                     const SchedulerOptions& options, DraftSource* drafter, Recorder* recorder)
    : backbone_(backbone),
      config_(config),
      tokenizer_(tokenizer),
      options_(options),
      drafter_(drafter),
      recorder_(recorder),
      speculation_(drafter == nullptr ? SpeculationOptions{} : options.speculation,
                   config.dspark_block_size) {}

Scheduler::~Scheduler() = default;

void Scheduler::submit(GenerationRequest request, RequestCallbacks callbacks) {
  check_prompt(config_, request.prompt);
  std::erase_if(request.stop, [](const std::string& stop) { return stop.empty(); });
  if (!fits(request, 0))
    throw UsageError(fmt::format(
        "{} prompt tokens and up to {} new ones need {} bytes of sequence state, but --context-memory "
        "allows {}",
        request.prompt.size(), request.max_tokens, reservation(request), options_.context_bytes));
  waiting_.push_back(std::make_unique<Active>(std::move(request), std::move(callbacks), tokenizer_));
}

std::size_t Scheduler::reservation(const GenerationRequest& request) const {
  const std::size_t longest =
      std::min<std::size_t>(config_.max_positions(), request.prompt.size() + request.max_tokens);
  return Sequence::bytes_for(config_, longest);
}

bool Scheduler::fits(const GenerationRequest& request, std::size_t reserved) const {
  return reservation(request) <= options_.context_bytes - reserved;
}

bool Scheduler::step() {
  admit();
  if (running_.empty()) return false;
  assemble();
  outcome_ = {};
  if (recorder_) recorder_->begin_step(step_kind(), step_.number, static_cast<std::uint32_t>(step_.rows()));
  const auto start = Clock::now();
  const std::span<const float> logits = backbone_.forward(step_);
  if (drafter_ != nullptr) {
    PhaseTimer timer(recorder_, Phase::Draft);
    drafter_->seed(step_, backbone_.main_hidden());
  }
  if (!prefilling_)
    speculation_.step_took(step_.rows(), in_step_.size(), seconds_between(start, Clock::now()));
  collect(logits);
  draft_ahead();
  if (recorder_) recorder_->end_step(outcome_);
  return true;
}

// Rows that decode come first in a step.
StepKind Scheduler::step_kind() const {
  if (!prefilling_) return StepKind::Decode;
  return in_step_.front()->prefilled() ? StepKind::Mixed : StepKind::Prefill;
}

void Scheduler::stop() {
  for (auto& active : running_) finish(*active, FinishReason::Stopped);
  for (auto& active : waiting_) finish(*active, FinishReason::Stopped);
  running_.clear();
  waiting_.clear();
  reserved_bytes_ = 0;
}

// First come, first served. Only a request that waits for another one's prefix is overtaken.
void Scheduler::admit() {
  for (auto next = waiting_.begin(); next != waiting_.end() && running_.size() < options_.batch;) {
    Active& active = **next;
    if (active.prefix_owner != nullptr && active.prefix == nullptr) {
      ++next;
      continue;
    }
    if (!fits(active.request, reserved_bytes_)) return;
    active.admitted = Clock::now();
    active.result.queue_seconds = seconds_between(active.submitted, active.admitted);
    active.result.prompt_tokens = static_cast<std::uint32_t>(active.request.prompt.size());
    active.reserved = reservation(active.request);
    reserved_bytes_ += active.reserved;
    if (active.prefix != nullptr) {
      active.sequence = std::make_unique<Sequence>(*active.prefix);
      active.done = active.prefix_length;
      active.result.reused_tokens = static_cast<std::uint32_t>(active.prefix_length);
      active.prefix.reset();
    } else {
      active.sequence = std::make_unique<Sequence>(config_);
    }
    running_.push_back(std::move(*next));
    next = waiting_.erase(next);
    plan_prefixes(*running_.back());
  }
}

// Those that wait and begin like a prompt that is about to be processed take over a copy of its state at the
// point where they part. The last prompt token is always their own: its logits are wanted.
void Scheduler::plan_prefixes(Active& active) {
  if (!options_.share_prefixes) return;
  const auto& prompt = active.request.prompt;
  for (std::size_t i = 0; i < std::min(waiting_.size(), kLookAhead); ++i) {
    Active& other = *waiting_[i];
    if (other.callbacks.on_logits || other.prefix_owner != nullptr) continue;
    const auto& wanted = other.request.prompt;
    const std::size_t most = std::min(prompt.size(), wanted.size() - 1);
    const auto common = static_cast<std::size_t>(
        std::mismatch(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(most), wanted.begin())
            .first -
        prompt.begin());
    if (common < kShortestSharedPrefix || common <= active.done) continue;
    other.prefix_owner = &active;
    other.prefix_length = common;
    active.fork_points.push_back(common);
  }
  std::sort(active.fork_points.begin(), active.fork_points.end());
}

void Scheduler::assemble() {
  step_.clear();
  ++step_.number;
  in_step_.clear();
  prefilling_ = false;
  std::size_t room = options_.step_rows;

  // The turn moves on, so that every sequence decodes even when there are more of them than rows.
  for (std::size_t i = 0; i < running_.size() && room > 0; ++i) {
    Active& active = *running_[(turn_ + i) % running_.size()];
    if (!active.prefilled()) continue;
    const std::size_t rows = std::min(room, active.pending.size());
    step_.add(*active.sequence, std::span(active.pending).first(rows), rows);
    in_step_.push_back(&active);
    room -= rows;
  }
  ++turn_;

  for (const auto& running : running_) {
    Active& active = *running;
    if (active.prefilled() || room == 0) continue;
    const std::size_t end =
        active.fork_points.empty() ? active.request.prompt.size() : active.fork_points.front();
    const std::size_t rows = std::min({room, options_.chunk, end - active.done});
    const bool last = active.done + rows == active.request.prompt.size();
    const bool all = static_cast<bool>(active.callbacks.on_logits);
    const bool sampled = last && active.request.max_tokens > 0;
    step_.add(*active.sequence, std::span(active.request.prompt).subspan(active.done, rows),
              all ? rows : (sampled ? 1 : 0),
              options_.skip_rows && !all ? static_cast<std::uint32_t>(end) : 0);
    in_step_.push_back(&active);
    room -= rows;
    prefilling_ = true;
  }
}

void Scheduler::collect(std::span<const float> logits) {
  std::size_t wanted = 0;
  for (std::size_t i = 0; i < in_step_.size(); ++i) {
    const Segment& segment = step_.segments[i];
    const std::size_t first = wanted;
    while (wanted < step_.logit_rows.size() && step_.logit_rows[wanted] < segment.first_row + segment.rows)
      ++wanted;
    const auto ids = std::span(step_.tokens).subspan(segment.first_row, segment.rows);
    const auto rows = logits.subspan(first * config_.vocab_size, (wanted - first) * config_.vocab_size);
    if (in_step_[i]->prefilled())
      decoded(*in_step_[i], ids, rows);
    else
      prefilled(*in_step_[i], ids, rows);
  }
  std::erase_if(running_, [](const auto& active) { return active->finished; });
}

void Scheduler::prefilled(Active& active, std::span<const std::uint32_t> ids, std::span<const float> logits) {
  active.done += ids.size();
  if (active.callbacks.on_logits) active.callbacks.on_logits(ids, logits);
  if (!active.fork_points.empty() && active.fork_points.front() == active.done) {
    const auto copy = std::make_shared<const Sequence>(*active.sequence);
    for (auto& other : waiting_)
      if (other->prefix_owner == &active && other->prefix_length == active.done) other->prefix = copy;
    std::erase(active.fork_points, active.done);
  }
  if (!active.prefilled()) return;
  active.decoding = Clock::now();
  active.result.prefill_seconds = seconds_between(active.admitted, active.decoding);
  if (active.request.max_tokens == 0) return finish(active, FinishReason::Length);
  const std::uint32_t id = sample(active, logits.last(config_.vocab_size), active.sequence->length() - 1);
  active.pending.assign(1, id);
  if (const auto reason = accept(active, id)) finish(active, *reason);
}

// Row i holds the token that row i-1 was expected to give. Rows count as long as that was right; the sequence
// forgets the others.
void Scheduler::decoded(Active& active, std::span<const std::uint32_t> ids, std::span<const float> logits) {
  const auto base = static_cast<std::uint32_t>(active.sequence->length() - ids.size());
  std::size_t rows = 0;
  std::uint32_t id = 0;
  std::optional<FinishReason> reason;
  do {
    id = sample(active, logits.subspan(rows * config_.vocab_size, config_.vocab_size),
                base + static_cast<std::uint32_t>(rows));
    ++rows;
    reason = accept(active, id);
  } while (!reason && rows < ids.size() && ids[rows] == id);
  ++active.result.decode_steps;
  const auto drafted = static_cast<std::uint32_t>(ids.size() - 1),
             accepted = static_cast<std::uint32_t>(rows - 1);
  outcome_.drafted += drafted;
  outcome_.accepted += accepted;
  active.result.drafted += drafted;
  active.result.accepted += accepted;
  if (speculating_) speculation_.verified(ids.size() - 1, rows - 1);
  if (active.callbacks.on_logits)
    active.callbacks.on_logits(ids.first(rows), logits.first(rows * config_.vocab_size));
  active.sequence->rollback(base + static_cast<std::uint32_t>(rows));
  active.pending.assign(1, id);
  if (reason) finish(active, *reason);
}

std::uint32_t Scheduler::sample(const Active& active, std::span<const float> logits, std::uint32_t position) {
  PhaseTimer timer(recorder_, Phase::Sampling);
  return sampler_.sample(logits, active.request.sampling, position);
}

std::optional<FinishReason> Scheduler::accept(Active& active, std::uint32_t id) {
  ++outcome_.emitted;
  GenerationResult& result = active.result;
  result.output_ids.push_back(id);
  if (id == config_.eos_id() && !active.request.ignore_eos) return FinishReason::Stop;

  const std::size_t before = result.text.size();
  result.text += active.decoder.push(id);
  std::size_t cut = std::string::npos;
  for (const std::string& stop :
       active.request.stop)  // one that ends in the new piece begins at most its length before it
    cut = std::min(cut, result.text.find(stop, before > stop.size() ? before - stop.size() : 0));
  if (cut != std::string::npos) {
    result.text.resize(cut);
    return FinishReason::Stop;
  }
  emit(active, result.text.size() - undecided_tail(result.text, active.request.stop));
  // The token itself is not in the sequence yet.
  if (result.output_ids.size() == active.request.max_tokens ||
      active.request.prompt.size() + result.output_ids.size() > config_.max_positions())
    return FinishReason::Length;
  return std::nullopt;
}

void Scheduler::draft_ahead() {
  PhaseTimer timer(recorder_, Phase::Draft);
  speculating_ = drafter_ != nullptr && speculation_.wanted();
  if (!speculating_) return;
  asks_.clear();
  asking_.clear();
  for (const auto& active : running_) {
    if (!active->prefilled() || asks_.size() == drafter_->capacity()) continue;
    asks_.push_back({active->sequence.get(), active->pending.front(), active->request.sampling});
    asking_.push_back(active.get());
  }
  if (asks_.empty()) return;
  const auto start = Clock::now();
  drafter_->draft(step_.number, asks_);
  speculation_.draft_took(seconds_between(start, Clock::now()));
  for (std::size_t i = 0; i < asking_.size(); ++i) {
    Active& active = *asking_[i];
    // A draft beyond the last wanted token, or the last position, could never count.
    const std::size_t wanted = active.request.max_tokens - active.result.output_ids.size() - 1;
    const std::size_t positions = config_.max_positions() - active.sequence->length() - 1;
    const std::size_t length = speculation_.length(drafter_->confidence(i), std::min(wanted, positions));
    const auto drafts = drafter_->tokens(i).first(length);
    active.pending.insert(active.pending.end(), drafts.begin(), drafts.end());
  }
}

void Scheduler::emit(Active& active, std::size_t end) {
  if (end <= active.emitted) return;
  if (active.callbacks.on_text)
    active.callbacks.on_text(active.result.text.substr(active.emitted, end - active.emitted));
  active.emitted = end;
}

void Scheduler::finish(Active& active, FinishReason reason) {
  active.result.finish = reason;
  active.finished = true;
  // A stop text has already cut the output; everything else ends with what the decoder held back.
  if (reason != FinishReason::Stop ||
      (!active.result.output_ids.empty() && active.result.output_ids.back() == config_.eos_id()))
    active.result.text += active.decoder.finish();
  emit(active, active.result.text.size());
  if (active.prefilled()) active.result.decode_seconds = seconds_between(active.decoding, Clock::now());
  reserved_bytes_ -= active.reserved;
  for (auto& other : waiting_)  // nobody may wait for a prefix that will not come
    if (other->prefix_owner == &active && other->prefix == nullptr) other->prefix_owner = nullptr;
  if (active.callbacks.on_finish) active.callbacks.on_finish(active.result);
}

}  // namespace dsv41
