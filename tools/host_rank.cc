#include "tools/host_rank.h"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "loader/error.h"
#include "tools/prompt.h"
#include "tools/signals.h"

namespace dsv41 {
namespace {

void write_all(std::FILE* file, std::string_view text, const char* name) {
  if (std::fwrite(text.data(), 1, text.size(), file) != text.size() || std::fflush(file) != 0)
    throw ResourceError(fmt::format("{} cannot be written: {}", name, std::strerror(errno)));
}

double rate(std::size_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

nlohmann::ordered_json json_of(const SpeculationCounts& counts) {
  nlohmann::ordered_json places = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < counts.drafted_at.size(); ++i)
    places.push_back({{"drafted", counts.drafted_at[i]}, {"accepted", counts.accepted_at[i]}});
  return {{"drafted", counts.drafted},           {"accepted", counts.accepted},
          {"wasted_rows", counts.wasted_rows()}, {"by_place", places},
          {"draft_s", counts.draft_seconds},     {"verify_s", counts.verify_seconds}};
}

std::string json_of(std::span<const std::uint32_t> prompt, const GenerationResult& result,
                    const SpeculationCounts& speculation, double load_seconds) {
  nlohmann::ordered_json object;
  object["prompt_ids"] = prompt;
  object["output_ids"] = result.output_ids;
  object["text"] = result.text;
  object["finish"] = finish_name(result.finish);
  object["timings"] = {{"load_s", load_seconds},
                       {"prefill_s", result.prefill_seconds},
                       {"prefill_tokens_per_s", rate(prompt.size(), result.prefill_seconds)},
                       {"decode_s", result.decode_seconds},
                       {"decode_tokens_per_s", rate(result.output_ids.size(), result.decode_seconds)},
                       {"decode_steps", result.decode_steps}};
  object["speculation"] = json_of(speculation);
  return object.dump() + "\n";
}

std::string describe_rows(const Backbone::RowCounts& rows) {
  return fmt::format("{} of {} layer rows skipped", rows.skipped, rows.computed + rows.skipped);
}

/// "; 12 steps in two halves", or nothing.
std::string describe_overlap(const Backbone& backbone) {
  return backbone.halved_steps() == 0 ? "" : fmt::format("; {} steps in two halves", backbone.halved_steps());
}

/// "; drafts: 30 of 41 accepted (by place 90% 71% …), 0.12 s", or nothing.
std::string describe_speculation(const SpeculationCounts& counts) {
  if (counts.drafted == 0) return "";
  std::string places;
  for (std::size_t i = 0; i < counts.drafted_at.size() && counts.drafted_at[i] > 0; ++i)
    places += fmt::format(" {:.0f}%", 100.0 * static_cast<double>(counts.accepted_at[i]) /
                                          static_cast<double>(counts.drafted_at[i]));
  return fmt::format("; drafts: {} of {} accepted (by place{}), {:.2f} s", counts.accepted, counts.drafted,
                     places, counts.draft_seconds);
}

}  // namespace

HostRank::HostRank(const Options& options, const Checkpoint& checkpoint, Compute& compute)
    : options_(options), model_(checkpoint, compute, options.step_rows(), options.engram) {
  if (options.requests) {
    if (options.dry_run) return;
    requests_ = std::make_unique<LineReader>(*options.requests);
    results_ = stdout;
    if (options.out != "-") {
      results_file_.reset(std::fopen(options.out.c_str(), "w"));
      results_ = results_file_.get();
      if (results_ == nullptr)
        throw UsageError(
            fmt::format("--out {}: cannot be written: {}", options.out.string(), std::strerror(errno)));
    }
    std::error_code error;
    if (options.dump_logits && !std::filesystem::create_directories(*options.dump_logits, error) &&
        !std::filesystem::is_directory(*options.dump_logits))
      throw UsageError(
          fmt::format("--dump-logits {}: with --requests this is a directory, and it cannot be made: {}",
                      options.dump_logits->string(), error.message()));
    return;
  }
  if (!options.dry_run || options.prompt || options.prompt_file || options.prompt_ids)
    prompt_ = prompt_tokens(options, model_.tokenizer(), model_.config());
  if (options.dump_logits && !options.dry_run)
    logits_file_ = std::make_unique<LogitsFile>(*options.dump_logits, model_.config().vocab_size);
}

void HostRank::run(Experts& experts, Recorder* recorder, double load_seconds) {
  const auto start = std::chrono::steady_clock::now();
  load_engram(experts);
  load_seconds += seconds_since(start);
  model_.record(recorder);
  Backbone& backbone = model_.connect(experts);
  if (experts.remote() || options_.overlap == Overlap::Mode::Always) backbone.set_overlap(options_.overlap);
  SchedulerOptions scheduling;
  scheduling.batch = options_.batch;
  scheduling.step_rows = options_.step_rows();
  scheduling.chunk = options_.chunk;
  scheduling.context_bytes = options_.context_bytes;
  scheduling.skip_rows = !options_.no_skip;
  scheduling.share_prefixes = !options_.no_prefix_sharing;
  scheduling.speculation = options_.speculation;
  Drafter* drafter = options_.speculation.mode == SpeculationOptions::Mode::Off
                         ? nullptr
                         : model_.connect_drafter(experts, options_.batch);
  Scheduler scheduler(backbone, model_.config(), model_.tokenizer(), scheduling, drafter, recorder);
  if (requests_)
    run_requests(scheduler, experts);
  else
    run_prompt(scheduler, experts, load_seconds);
  if (!options_.quiet)
    fmt::print(stderr, "dsv41-mpi: {}{}{}\n", describe_rows(backbone.row_counts()),
               describe_overlap(backbone), describe_speculation(scheduler.speculation()));
  if (!options_.quiet) print_residency(experts);
}

void HostRank::load_engram(Experts& experts) {
  constexpr double kGiB = 1073741824.0;
  constexpr std::chrono::seconds kLineInterval{2};
  experts.set_phase("load");
  const auto start = std::chrono::steady_clock::now();
  auto last_line = start;
  model_.engram_rows().load([&](std::uint64_t done, std::uint64_t total) {
    experts.keep_alive();
    const auto now = std::chrono::steady_clock::now();
    if (options_.quiet || (done < total && now - last_line < kLineInterval)) return;
    last_line = now;
    const double gib = static_cast<double>(done) / kGiB, seconds = std::max(1e-9, seconds_since(start));
    fmt::print(stderr, "dsv41-mpi: engram tables: {:.3f} of {:.3f} GiB, {:.2f} GiB/s\n", gib,
               static_cast<double>(total) / kGiB, gib / seconds);
  });
}

void HostRank::print_residency(const Experts& experts) const {
  if (options_.expert_memory) {
    const auto [hits, misses] = experts.residency();
    const std::uint64_t bytes = misses * ExpertGeometry::of(model_.config()).expert_bytes();
    fmt::print(stderr, "dsv41-mpi: experts: {} found in memory, {} read ({:.3f} GiB)\n", hits, misses,
               static_cast<double>(bytes) / 1073741824.0);
  }
  if (options_.engram.mode == EngramMode::Direct) {
    const EngramCounters rows = model_.engram_rows().counters();
    fmt::print(
        stderr,
        "dsv41-mpi: engram: {} rows asked for, {} distinct, {} of them in memory; {:.3f} MiB in {} reads\n",
        rows.asked, rows.distinct, rows.cached, static_cast<double>(rows.read_bytes) / 1048576.0, rows.reads);
  }
}

GenerationRequest HostRank::defaults() const {
  GenerationRequest request;
  request.max_tokens = options_.max_tokens;
  request.ignore_eos = options_.ignore_eos;
  request.sampling = {options_.temperature, options_.top_p, options_.seed};
  request.stop = options_.stop;
  return request;
}

void HostRank::run_prompt(Scheduler& scheduler, Experts& experts, double load_seconds) {
  GenerationRequest request = defaults();
  request.prompt = prompt_;
  GenerationResult result;
  RequestCallbacks callbacks;
  if (!options_.json)
    callbacks.on_text = [](const std::string& piece) { write_all(stdout, piece, "standard output"); };
  if (logits_file_)
    callbacks.on_logits = [this](std::span<const std::uint32_t> ids, std::span<const float> logits) {
      logits_file_->append(ids, logits);
    };
  callbacks.on_finish = [&](const GenerationResult& finished) { result = finished; };

  scheduler.submit(std::move(request), std::move(callbacks));
  experts.set_phase("prefill");
  note_step("prefill");
  while (!stop_requested() && scheduler.step()) {
    experts.set_phase(scheduler.phase());
    note_step(scheduler.phase());
    experts.keep_alive();
  }
  scheduler.stop();
  experts.set_phase("output");
  if (logits_file_) logits_file_->close();
  if (options_.json)
    write_all(stdout, json_of(prompt_, result, scheduler.speculation(), load_seconds), "standard output");
  if (!options_.quiet)
    fmt::print(stderr,
               "\ndsv41-mpi: load {:.2f} s; prefill {} tokens, {:.1f} tok/s; decode {} tokens in {} steps, "
               "{:.1f} tok/s; finish: {}\n",
               load_seconds, prompt_.size(), rate(prompt_.size(), result.prefill_seconds),
               result.output_ids.size(), result.decode_steps,
               rate(result.output_ids.size(), result.decode_seconds), finish_name(result.finish));
}

void HostRank::run_requests(Scheduler& scheduler, Experts& experts) {
  const auto start = std::chrono::steady_clock::now();
  bool more = true;
  note_step("prefill");
  while (!stop_requested() && (more || scheduler.pending() > 0)) {
    if (more) more = read_requests(scheduler);
    scheduler.step();
    experts.set_phase(scheduler.phase());
    note_step(scheduler.phase());
    experts.keep_alive();
  }
  scheduler.stop();
  experts.set_phase("output");
  if (!options_.quiet)
    fmt::print(stderr, "dsv41-mpi: {} requests finished, {} refused; {} tokens, {:.1f} tok/s\n", finished_,
               refused_, output_tokens_, rate(output_tokens_, seconds_since(start)));
}

bool HostRank::read_requests(Scheduler& scheduler) {
  std::string line;
  while (!scheduler.saturated()) {
    switch (requests_->next(line, scheduler.pending() == 0)) {
      case LineReader::State::End:
        return false;
      case LineReader::State::NotYet:
        return true;
      case LineReader::State::Line:
        submit_line(scheduler, line, requests_->line_number());
    }
  }
  return true;
}

// A line that cannot be served fails alone, with its number.
void HostRank::submit_line(Scheduler& scheduler, const std::string& line, std::uint64_t number) {
  if (line.find_first_not_of(" \t\r") == std::string::npos) return;
  std::string id;
  try {
    GenerationRequest request = parse_request(line, defaults(), model_.tokenizer(), model_.config());
    id = request.id;
    RequestCallbacks callbacks;
    std::shared_ptr<LogitsFile> dump;
    if (options_.dump_logits) {
      dump = std::make_shared<LogitsFile>(*options_.dump_logits / fmt::format("line-{:06}.h5", number),
                                          model_.config().vocab_size);
      callbacks.on_logits = [dump](std::span<const std::uint32_t> ids, std::span<const float> logits) {
        dump->append(ids, logits);
      };
    }
    callbacks.on_finish = [this, id, number, dump](const GenerationResult& result) {
      if (dump) dump->close();
      ++finished_;
      output_tokens_ += result.output_ids.size();
      write_line(result_line(id, number, result));
    };
    scheduler.submit(std::move(request), std::move(callbacks));
  } catch (const UsageError& error) {
    ++refused_;
    write_line(error_line(id, number, error.what()));
  }
}

void HostRank::write_line(const std::string& line) {
  write_all(results_, line, "--out");
}

}  // namespace dsv41
