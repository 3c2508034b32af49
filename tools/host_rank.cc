#include "tools/host_rank.h"

#include <fmt/format.h>
#include <signal.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "loader/error.h"
#include "runtime/generate.h"
#include "tools/prompt.h"

namespace dsv41 {
namespace {

volatile sig_atomic_t g_stop_requested = 0;

void write_output(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw ResourceError(fmt::format("standard output cannot be written: {}", std::strerror(errno)));
}

double rate(std::size_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

}  // namespace

void install_stop_signal() {
  struct sigaction action = {};
  action.sa_handler = [](int) { g_stop_requested = 1; };
  sigaction(SIGUSR1, &action, nullptr);
}

HostRank::HostRank(const Options& options, const Checkpoint& checkpoint, Compute& compute)
    : options_(options), model_(checkpoint, compute, options.chunk) {
  if (!options.dry_run || options.prompt || options.prompt_file || options.prompt_ids)
    prompt_ = prompt_tokens(options, model_.tokenizer(), model_.config());
  if (options.dump_logits && !options.dry_run)
    logits_file_ = std::make_unique<LogitsFile>(*options.dump_logits, model_.config().vocab_size);
}

void HostRank::run(Experts& experts, double load_seconds) {
  Backbone& backbone = model_.connect(experts);
  StreamingDecoder decoder(model_.tokenizer(), false);
  std::string text;
  const auto emit = [&](const std::string& piece) {
    text += piece;
    if (!options_.json) write_output(piece);
  };

  GenerationOptions generation;
  generation.max_tokens = options_.max_tokens;
  generation.chunk = options_.chunk;
  generation.ignore_eos = options_.ignore_eos;
  generation.all_logits = logits_file_ != nullptr;
  generation.sampling = {options_.temperature, options_.top_p, options_.seed};

  GenerationCallbacks callbacks;
  callbacks.on_token = [&](std::uint32_t id) { emit(decoder.push(id)); };
  callbacks.on_logits = [&](std::span<const std::uint32_t> ids, std::span<const float> logits) {
    logits_file_->append(ids, logits);
  };
  callbacks.stop_requested = [&] {
    experts.keep_alive();
    return g_stop_requested != 0;
  };
  callbacks.on_phase = [&](std::string_view phase) { experts.set_phase(phase); };

  const GenerationResult result = generate(backbone, model_.config(), prompt_, generation, callbacks);
  experts.set_phase("output");
  emit(decoder.finish());
  if (logits_file_) logits_file_->close();
  if (options_.json) write_json(result, text, load_seconds);
  if (!options_.quiet) write_summary(result, load_seconds);
}

void HostRank::write_json(const GenerationResult& result, const std::string& text,
                          double load_seconds) const {
  nlohmann::ordered_json object;
  object["prompt_ids"] = prompt_;
  object["output_ids"] = result.output_ids;
  object["text"] = text;
  object["finish"] = finish_name(result.finish);
  object["timings"] = {{"load_s", load_seconds},
                       {"prefill_s", result.prefill_seconds},
                       {"prefill_tokens_per_s", rate(prompt_.size(), result.prefill_seconds)},
                       {"decode_s", result.decode_seconds},
                       {"decode_tokens_per_s", rate(result.decode_steps, result.decode_seconds)}};
  write_output(object.dump() + "\n");
}

void HostRank::write_summary(const GenerationResult& result, double load_seconds) const {
  fmt::print(stderr,
             "\ndsv41-mpi: load {:.2f} s; prefill {} tokens, {:.1f} tok/s; decode {} steps, {:.1f} tok/s; "
             "finish: {}\n",
             load_seconds, prompt_.size(), rate(prompt_.size(), result.prefill_seconds), result.decode_steps,
             rate(result.decode_steps, result.decode_seconds), finish_name(result.finish));
}

}  // namespace dsv41
