// dsv41-mpi: options -> calls. Every rank runs this program; rank 0 is the host rank, the others compute
// experts (docs/runtime.md, "Roles" and "Behaviour").
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <thread>

#include "loader/checkpoint.h"
#include "loader/error.h"
#include "loader/memory.h"
#include "runtime/agreement.h"
#include "runtime/exchange/communicator.h"
#include "runtime/expert_rank.h"
#include "runtime/expert_store.h"
#include "runtime/experts.h"
#include "runtime/gpu_devices.h"
#include "runtime/gpu_engine.h"
#include "runtime/gpu_transport.h"
#include "runtime/placement.h"
#include "tools/heap.h"
#include "tools/host_rank.h"
#include "tools/load_line.h"
#include "tools/options.h"
#include "tools/profiling.h"
#include "tools/signals.h"

namespace dsv41 {
namespace {

using Clock = std::chrono::steady_clock;

/// Turns whatever was thrown into one line and an exit code.
std::pair<ExitCode, std::string> describe_failure(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::Resources, "out of memory"};
  } catch (const std::domain_error& error) {
    return {ExitCode::Checkpoint, error.what()};
  } catch (const std::exception& error) {
    return {ExitCode::Resources, error.what()};
  }
}

/// Cores this process may use, shared among the ranks of its machine; a launcher that binds has already
/// shared them.
std::size_t default_threads(const Communicator& communicator) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const std::size_t mine =
      sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? static_cast<std::size_t>(CPU_COUNT(&allowed)) : 1;
  const std::size_t machine = std::max(1u, std::thread::hardware_concurrency());
  std::size_t neighbours = 0;
  for (int rank = 0; rank < communicator.size(); ++rank)
    neighbours += communicator.host_of(rank) == communicator.host();
  return std::max<std::size_t>(1, std::min(mine, std::max<std::size_t>(1, machine / neighbours)));
}

/// What a rank has opened before the job starts.
struct Prepared {
  std::optional<Checkpoint> checkpoint;
  std::unique_ptr<Compute> compute;
  std::unique_ptr<ExpertSource> source;
  std::string stored;                    // where a CPU rank keeps its experts, if not mapped
  std::optional<Placement> placement;    // more than one rank
  std::unique_ptr<ExpertEngine> engine;  // of ranks that compute experts
  std::unique_ptr<ProfileFile> profile;  // rank 0, if wanted
  std::unique_ptr<HostRank> host;        // rank 0
};

void add_note(StartReport& report, const std::string& note) {
  if (note.empty()) return;
  if (!report.note.empty()) report.note += "; ";
  report.note += note;
}

/// Where the experts of a CPU rank come from. Memory is planned, not taken.
std::unique_ptr<ExpertStore> plan_store(const Options& options, std::uint32_t owner, Prepared& prepared,
                                        StartReport& report) {
  if (!options.expert_memory) return mapped_expert_store(*prepared.source);
  ExpertStoreOptions memory;
  memory.memory_bytes = *options.expert_memory;
  auto store = cached_expert_store(*prepared.checkpoint, prepared.placement ? &*prepared.placement : nullptr,
                                   owner, memory);
  report.expert_memory = store->memory_bytes();
  report.resident_experts = store->resident_experts();
  add_note(report, store->note());
  prepared.stored = store->describe();
  return store;
}

/// What this rank's experts are computed on. Memory of a device is planned, not taken.
void prepare_engine(const Options& options, const Communicator& communicator, Prepared& prepared,
                    StartReport& report) {
  const ExpertLimits limits = ExpertLimits::of(prepared.checkpoint->config(), options.step_rows());
  const auto owner = static_cast<std::uint32_t>(std::max(communicator.rank() - 1, 0));
  RankDevice taken = open_rank_device(communicator, options.devices);
  // Half of what the other ranks wait for this one at most.
  const TransportChoice transport =
      decide_transport({options.transport, taken.number, communicator.size() == 1, taken.mpi_takes_memory,
                        options.rank_timeout / 2});
  report.transport = fmt::format("{} ({})", name_of(transport.transport),
                                 options.transport != TransportRequest::Auto || taken.why_cpu.empty()
                                     ? transport.why
                                     : "no GPU: " + taken.why_cpu);
  report.needs_device = options.transport == TransportRequest::CudaAware;
  if (!taken.device) {
    prepared.engine = cpu_engine(plan_store(options, owner, prepared, report), *prepared.compute, limits);
    return;
  }
  report.has_device = true;
  report.device = describe_gpu(*taken.device);
  report.gpu = taken.gpu;
  report.share_gpu = options.devices.share;
  GpuEngineOptions memory;
  memory.device_bytes = options.expert_memory.value_or(0);
  memory.pinned_bytes = options.pinned_memory;
  memory.sharers = taken.sharers;
  memory.hang_after = options.rank_timeout;
  memory.messages_on_device = transport.transport == Transport::CudaAware;
  GpuMemoryPlan plan;
  prepared.engine =
      gpu_engine(std::move(taken.device), *prepared.source,
                 prepared.placement ? &*prepared.placement : nullptr, owner, limits, memory, &plan);
  report.residency = plan.describe();
}

void prepare(const Options& options, const Communicator& communicator, Prepared& prepared,
             StartReport& report) {
  if (communicator.rank() == 0 && options.profile && !options.dry_run)
    prepared.profile = std::make_unique<ProfileFile>(*options.profile);
  prepared.checkpoint.emplace(options.model);
  const ModelConfig& config = prepared.checkpoint->config();
  const Ops* ops = nullptr;
  try {
    ops = &find_backend(options.backend.c_str());
  } catch (const std::invalid_argument& error) {
    throw UsageError(fmt::format("--backend {}: {}", options.backend, error.what()));
  }
  const std::size_t threads = options.threads > 0 ? options.threads : default_threads(communicator);
  prepared.compute = std::make_unique<Compute>(*ops, threads);
  prepared.source = checkpoint_experts(*prepared.checkpoint);
  if (communicator.size() > 1) {
    prepared.placement =
        Placement::make(options.placement, config, static_cast<std::uint32_t>(communicator.size() - 1));
    report.placement_fingerprint = prepared.placement->fingerprint();
    if (communicator.rank() > 0)
      report.held = held_experts(*prepared.source, *prepared.placement,
                                 static_cast<std::uint32_t>(communicator.rank() - 1));
  }
  if (communicator.rank() == 0) {
    prepared.host = std::make_unique<HostRank>(options, *prepared.checkpoint, *prepared.compute);
    report.engram_memory = prepared.host->engram_rows().memory_bytes();
    add_note(report, prepared.host->engram_rows().note());
  }
  report.available_memory = available_memory().value_or(0);
  report.config_fingerprint = prepared.checkpoint->fingerprint();
  report.max_rows = options.step_rows();
  report.device = fmt::format("{}, {} thread{}", ops->name, threads, threads == 1 ? "" : "s");
  report.needs_device = options.transport == TransportRequest::CudaAware;
  if (communicator.rank() > 0 || communicator.size() == 1)
    prepare_engine(options, communicator, prepared, report);
}

/// One text for all ranks that have the same: "ranks 1, 3 on GPU 0 (…), rank 2 on avx2, 1 thread". A single
/// text is not given ranks.
std::string by_rank(const std::vector<StartReport>& reports, std::string StartReport::*what) {
  const std::size_t first = reports.size() == 1 ? 0 : 1;
  std::string all;
  std::size_t texts = 0;
  for (std::size_t rank = first; rank < reports.size(); ++rank) {
    const std::string& text = reports[rank].*what;
    const auto same = [&](const StartReport& other) { return other.*what == text; };
    const auto begin = reports.begin() + static_cast<std::ptrdiff_t>(first);
    if (std::find_if(begin, reports.end(), same) - begin != static_cast<std::ptrdiff_t>(rank - first))
      continue;
    std::string ranks;
    std::size_t count = 0;
    for (std::size_t other = rank; other < reports.size(); ++other)
      if (same(reports[other])) ranks += fmt::format("{}{}", count++ == 0 ? "" : ", ", other);
    if (count == reports.size() - first) return text;
    all += fmt::format("{}rank{} {} {}", texts++ == 0 ? "" : "; ", count == 1 ? "" : "s", ranks, text);
  }
  return all;
}

void print_start(const Options& options, const Communicator& communicator, const Prepared& prepared,
                 const std::vector<StartReport>& reports) {
  const ModelConfig& config = prepared.checkpoint->config();
  if (options.bundled_model)
    fmt::print(stderr, "dsv41-mpi: no --model and no $DSV41_MODEL: using the bundled small checkpoint {}\n",
               options.model.string());
  fmt::print(stderr, "dsv41-mpi {}: {} layers, {} experts, {:.3f} GiB; ", DSV41_VERSION, config.n_layers,
             config.n_routed_experts,
             static_cast<double>(prepared.checkpoint->payload_bytes()) / (1024.0 * 1024 * 1024));
  if (prepared.placement)
    fmt::print(stderr, "{} expert rank{}, {} placement; ", prepared.placement->ranks(),
               prepared.placement->ranks() == 1 ? "" : "s", prepared.placement->name());
  fmt::print(stderr, "transport {}, {}; backend {}, {} thread{}; experts on {}", communicator.transport(),
             by_rank(reports, &StartReport::transport), prepared.compute->ops().name,
             prepared.compute->threads().size(), prepared.compute->threads().size() == 1 ? "" : "s",
             by_rank(reports, &StartReport::device));
  if (!prepared.stored.empty()) fmt::print(stderr, ", {}", prepared.stored);
  if (options.engram.mode != EngramMode::Mmap)
    fmt::print(stderr, "; engram {}", prepared.host->engram_rows().describe());
  fmt::print(stderr, "\n");
}

/// What ranks wanted and cannot have: never silently something else.
void print_notes(const StartVerdict& verdict) {
  std::set<std::string> said;
  for (const StartReport& report : verdict.reports)
    if (!report.note.empty() && said.insert(report.note).second)
      fmt::print(stderr, "dsv41-mpi: rank {} ({}): {}\n", &report - verdict.reports.data(), report.host,
                 report.note);
}

void print_holdings(const Prepared& prepared, const StartVerdict& verdict) {
  constexpr double kGiB = 1024.0 * 1024 * 1024;
  const ExpertGeometry& geometry = prepared.source->geometry();
  std::uint64_t experts = 0;
  for (const std::uint32_t count : geometry.experts_per_block) experts += count;
  const std::uint64_t expert_bytes = experts * geometry.expert_bytes();
  const std::uint64_t host_bytes = prepared.checkpoint->payload_bytes() - expert_bytes;
  for (std::size_t rank = 0; rank < verdict.reports.size(); ++rank) {
    const StartReport& report = verdict.reports[rank];
    std::string residency;
    if (report.resident_experts > 0)
      residency += fmt::format("; {} experts in {:.3f} GiB of memory at a time", report.resident_experts,
                               static_cast<double>(report.expert_memory) / kGiB);
    if (report.engram_memory > 0)
      residency += fmt::format("; {:.3f} GiB of memory for engram rows",
                               static_cast<double>(report.engram_memory) / kGiB);
    if (rank == 0)
      fmt::print(stderr, "rank 0 on {}: host, {:.3f} GiB of tensors{}; {}{}\n", report.host,
                 static_cast<double>(host_bytes) / kGiB,
                 verdict.reports.size() == 1 ? fmt::format(" and {} experts, {:.3f} GiB", experts,
                                                           static_cast<double>(expert_bytes) / kGiB)
                                             : "",
                 report.device, residency);
    else
      fmt::print(stderr, "rank {} on {}: {} experts, {:.3f} GiB; {}{}{}\n", rank, report.host,
                 report.held.experts, static_cast<double>(report.held.bytes) / kGiB, report.device,
                 report.residency.empty() ? "" : ": " + report.residency, residency);
  }
}

/// The host rank's run after everybody agreed; whatever happens, the expert ranks are told.
ExitCode run_host(const Options& options, Communicator& communicator, Prepared& prepared, Recorder* recorder,
                  double load_seconds) {
  const ExpertLimits limits = ExpertLimits::of(prepared.checkpoint->config(), options.step_rows());
  std::unique_ptr<Experts> experts;
  try {
    const auto start = Clock::now();
    LoadLine line(options.quiet);
    const LoadReporter report = [&](const LoadProgress& progress) { line.show(progress); };
    if (prepared.placement) {
      experts = remote_experts(communicator, *prepared.placement, prepared.source->geometry(), limits,
                               options.rank_timeout);
      experts->set_phase("load");
      experts->await_ready(report);
    } else {
      prepared.engine->load(report);
      experts = local_experts(std::move(prepared.engine));
    }
    line.end();
    load_seconds += std::chrono::duration<double>(Clock::now() - start).count();
    prepared.host->run(*experts, recorder, load_seconds);
    if (recorder) recorder->close();
    experts->close(ExitCode::Ok);
    return ExitCode::Ok;
  } catch (...) {
    const auto [code, message] = describe_failure(std::current_exception());
    fmt::print(stderr, "dsv41-mpi: {}\n", message);
    if (recorder) recorder->close();  // what was measured until here stays
    if (experts) experts->close(code);
    return code;
  }
}

ExitCode run(const Options& options, Communicator& communicator) {
  const auto start = Clock::now();
  const bool host = communicator.rank() == 0;
  communicator.set_timeout(options.rank_timeout);
  Prepared prepared;
  StartReport report = start_report(communicator, DSV41_VERSION);
  try {
    prepare(options, communicator, prepared, report);
  } catch (...) {
    std::tie(report.code, report.message) = describe_failure(std::current_exception());
  }
  const StartVerdict verdict = agree(communicator, report);
  if (verdict.code != ExitCode::Ok) {
    if (host) fmt::print(stderr, "dsv41-mpi: {}\n", verdict.message);
    return verdict.code;
  }
  if (host && !options.quiet) {
    print_start(options, communicator, prepared, verdict.reports);
    print_notes(verdict);
  }
  if (options.dry_run) {
    if (host) print_holdings(prepared, verdict);
    return ExitCode::Ok;
  }
  std::unique_ptr<Recorder> recorder;
  if (options.profile) {
    const RankMachine machine = measure_machine(communicator, *prepared.compute);
    if (host)
      recorder = start_recorder(options, communicator, *prepared.checkpoint, prepared.placement,
                                verdict.reports, machine, std::move(prepared.profile));
  }
  if (host)
    return run_host(options, communicator, prepared, recorder.get(),
                    std::chrono::duration<double>(Clock::now() - start).count());
  return run_expert_rank(communicator, *prepared.placement, *prepared.engine,
                         ExpertLimits::of(prepared.checkpoint->config(), options.step_rows()),
                         {options.rank_timeout});
}

/// A rank did not come to the agreement, so an orderly end, which needs all, is not possible. The host rank
/// has the first word, then rank 1; whoever speaks ends the job.
[[noreturn]] void leave_without_peers(Communicator& communicator, const std::string& message) {
  std::this_thread::sleep_for(std::chrono::seconds(std::min(communicator.rank(), 2)));
  fmt::print(stderr, "dsv41-mpi: {}\n", message);
  communicator.abort(static_cast<int>(ExitCode::Peer));
  std::abort();  // never reached: the compiler does not see that a virtual function does not return
}

/// The audit is one rank's work. The others wait for its exit code, however long a whole payload takes.
int audit_once(const Options& options, Communicator& communicator) {
  std::int32_t code = 0;
  if (communicator.rank() == 0) {
    prepare_heap_for_bulk();
    try {
      code = audit::run_audit(options.audit, std::cout, std::cerr);
    } catch (...) {
      const auto [failure, message] = describe_failure(std::current_exception());
      fmt::print(stderr, "dsv41-mpi: {}\n", message);
      code = static_cast<std::int32_t>(failure);
    }
  }
  communicator.set_timeout(std::chrono::hours(24 * 30));
  communicator.broadcast(std::as_writable_bytes(std::span(&code, 1)), 0);
  communicator.barrier();  // nobody leaves before all know
  return code;
}

/// refused: what was wrong with the command line; told by the host rank only.
int code_of_rank(const CommandLine& command, const std::exception_ptr& refused, Communicator& communicator) {
  const bool host = communicator.rank() == 0;
  try {
    if (refused) std::rethrow_exception(refused);
    if (command.action != Action::Run) {
      if (host) fmt::print("{}", command.action == Action::Help ? help_text() : version_text());
      return static_cast<int>(ExitCode::Ok);
    }
    if (command.options.audit_only) return audit_once(command.options, communicator);
    const ExitCode code = run(command.options, communicator);
    if (end_signal() == 0) return static_cast<int>(code);
    if (host) fmt::print(stderr, "dsv41-mpi: ended by {}\n", end_cause());
    return 128 + end_signal();
  } catch (...) {
    const auto [code, message] = describe_failure(std::current_exception());
    if (code == ExitCode::Peer) leave_without_peers(communicator, message);
    if (host) fmt::print(stderr, "dsv41-mpi: {}\n", message);
    return static_cast<int>(code);
  }
}

int main_of_rank(int argc, char** argv) {
  CommandLine command;
  std::exception_ptr refused;
  try {
    command = parse_command_line(argc, argv);
  } catch (...) {
    refused = std::current_exception();
  }
  std::unique_ptr<Communicator> communicator = started_by_launcher()
                                                   ? make_mpi_communicator(command.options.rank_timeout)
                                                   : make_single_communicator();
  install_fault_handler(communicator->size() > 1
                            ? fmt::format("rank {} ({})", communicator->rank(), communicator->host())
                            : std::string());
  const int code = code_of_rank(command, refused, *communicator);
  settle_exit_code(code);
  return code;  // the message layer ends here
}

}  // namespace
}  // namespace dsv41

int main(int argc, char** argv) {
  // This process is a child of a rank that asks whether MPI takes device memory, and may crash.
  if (argc == 3 && dsv41::kSelfTestFlag == argv[1]) return dsv41::transport_self_test(argv[2]);
  dsv41::install_signal_handlers();
  try {
    return dsv41::main_of_rank(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "dsv41-mpi: {}\n", error.what());
    return static_cast<int>(dsv41::ExitCode::Peer);
  }
}
