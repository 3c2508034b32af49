// The command line of dsv41-mpi. The only part of the project that knows Boost.Program_options.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engram/rows.h"
#include "loader/audit/audit.h"
#include "runtime/gpu_devices.h"
#include "runtime/gpu_transport.h"
#include "runtime/overlap.h"
#include "runtime/speculation.h"

namespace dsv41 {

struct Options {
  std::filesystem::path model;
  bool bundled_model = false;  // neither --model nor $DSV41_MODEL was given

  std::optional<std::string> prompt;
  std::optional<std::filesystem::path> prompt_file;
  std::optional<std::vector<std::uint32_t>> prompt_ids;

  std::uint32_t max_tokens = 128;
  double temperature = 0, top_p = 1;
  std::uint64_t seed = 0;
  bool ignore_eos = false;
  std::vector<std::string> stop;
  std::uint32_t chunk = 512;

  std::optional<std::filesystem::path> requests;  // JSON lines; "-" is standard input
  std::filesystem::path out = "-";
  std::uint32_t batch = 1;
  std::uint32_t step_tokens = 0;  // 0: what chunk and batch need
  std::uint64_t context_bytes = ~std::uint64_t{0};
  SpeculationOptions speculation{SpeculationOptions::Mode::Auto, 0};
  Overlap::Mode overlap = Overlap::Mode::Measured;  // with experts on other ranks; in one process only Always
  bool no_skip = false, no_prefix_sharing = false;

  static constexpr std::uint32_t kRowsPerSequence = 8;  // a decode row and its drafts
  /// Rows per step at most: sizes every buffer.
  std::uint32_t step_rows() const { return step_tokens > 0 ? step_tokens : chunk + batch * kRowsPerSequence; }

  std::string placement = "cyclic";
  std::string backend = "auto";
  EngramOptions engram;
  GpuRequest devices;
  TransportRequest transport = TransportRequest::Auto;
  std::optional<std::uint64_t> expert_memory;  // none: experts are mapped; on a GPU, all that is free
  std::uint64_t pinned_memory = 0;             // of ranks with a GPU: for experts that do not fit on it
  std::size_t threads = 0;                     // 0: the cores of this machine shared among its ranks
  std::chrono::milliseconds rank_timeout = std::chrono::seconds(60);

  std::optional<std::filesystem::path> dump_logits, profile;
  bool profile_routes = false;
  bool dry_run = false, json = false, quiet = false;

  bool audit_only = false;
  audit::AuditOptions audit;  // with audit_only
};

/// What argv asks for besides a run.
enum class Action { Run, Help, Version };

struct CommandLine {
  Action action = Action::Run;
  Options options;
};

/// Throws UsageError with one line that names the flag and the value.
CommandLine parse_command_line(int argc, const char* const* argv);
/// The audit's options are in it, too.
std::string help_text();
std::string version_text();

}  // namespace dsv41
