// Start agreement: every rank reports what it opened, all get the same verdict (docs/runtime.md, "Roles",
// "Behaviour").
//
// The way of a program:
//   StartReport mine = start_report(communicator);
//   try { open, place, check; mine.config_fingerprint = …; mine.held = held_experts(…); }
//   catch (const Error& error) { mine.fail(error); }
//   const StartVerdict verdict = agree(communicator, mine);
//   if (verdict.code != ExitCode::Ok) { if (rank 0) print verdict.message; return verdict.code; }  // then
//   finalize
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loader/error.h"
#include "runtime/exchange/communicator.h"
#include "runtime/experts.h"
#include "runtime/placement.h"

namespace dsv41 {

/// The experts of one rank.
struct HeldExperts {
  std::uint64_t experts = 0;
  std::uint64_t bytes = 0;
};

/// Looks up every expert that expert rank `owner` (0-based) owns: throws CheckpointError when one is missing.
HeldExperts held_experts(ExpertSource& source, const Placement& placement, std::uint32_t owner);

struct StartReport {
  ExitCode code = ExitCode::Ok;  // this rank's own failure, if any
  std::string message;
  std::uint32_t protocol = 0;  // of the messages (exchange/messages.h)
  std::string program_version;
  std::uint64_t config_fingerprint = 0;     // Checkpoint::fingerprint()
  std::uint64_t placement_fingerprint = 0;  // Placement::fingerprint()
  std::uint32_t max_rows = 0;               // rows per step: sizes every buffer
  HeldExperts held;
  // Memory that the rank is about to take because of --expert-memory and --engram, beside what it maps; and
  // what its machine has left (0: unknown).
  std::uint64_t expert_memory = 0, engram_memory = 0, available_memory = 0;
  std::uint64_t resident_experts = 0;  // that fit in expert_memory; 0: all are mapped
  std::string note;                    // something wanted that is not to be had, for rank 0 to print
  std::string host, device;            // device: ExpertEngine::describe(), or what the host rank computes on
  // The GPU of an expert rank: its bus id, the same for every process of its machine; empty: none. Two ranks
  // with one GPU are refused unless both may share it.
  std::string gpu;
  bool share_gpu = false;
  // How an expert rank's messages reach its device, and why so: "staged (no GPU)".
  std::string transport;
  // What of its experts stays where, for an expert rank with a device; empty: nothing to tell.
  std::string residency;
  // --transport cuda-aware was given, and whether the rank has a device: refused if no rank has one.
  bool needs_device = false, has_device = false;

  void fail(const Error& error) {
    code = error.code();
    message = error.what();
  }
};

/// A report with protocol and host filled in.
StartReport start_report(const Communicator& communicator, std::string program_version);

struct StartVerdict {
  ExitCode code = ExitCode::Ok;
  std::string message;               // one line, the same on every rank
  std::vector<StartReport> reports;  // in rank order; on rank 0 only
};

/// What rank 0 makes of the reports, in rank order.
StartVerdict judge(std::vector<StartReport> reports);

/// Collective: gather, judge, broadcast. A failure that every rank shares is said once; one of some ranks
/// names the first of them and its host; so does a difference in protocol, program, config, placement or rows
/// per step. Memory that a machine does not have is refused with the numbers. Throws PeerError when a rank
/// does not report within the communicator's timeout.
StartVerdict agree(Communicator& communicator, const StartReport& mine);

}  // namespace dsv41
