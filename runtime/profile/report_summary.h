// What a profile says in numbers: time by phase, slowest layers, exchange, critical path, caches, bandwidth.
#pragma once

#include <string>
#include <vector>

#include "runtime/profile/profile.h"
#include "runtime/profile/statistics.h"

namespace dsv41 {

struct PhaseSummary {
  Phase phase = Phase::Other;
  Distribution time;
  double share = 0;  // of the time of all steps of the kind
};

struct KindSummary {
  StepKind kind = StepKind::Prefill;
  std::uint64_t tokens = 0, emitted = 0, drafted = 0, accepted = 0;
  Distribution step;
  std::vector<PhaseSummary> phases;  // those that occur, in the order of schema.h
  /// Prefill: rows per second. Decode: tokens added to the output per second (rows where that was not
  /// recorded).
  double tokens_per_second = 0;
};

struct LayerSummary {
  std::size_t block = 0;
  Distribution time;
  double share = 0;  // of the time of all steps
  Phase largest = Phase::Other;
  double largest_share = 0;  // of the block's time
};

struct RankSummary {
  std::size_t rank = 0;  // communicator rank
  std::string host, device;
  std::uint64_t requests = 0, routes = 0, cache_hits = 0, cache_misses = 0, bytes_read = 0, bytes_out = 0,
                bytes_in = 0;
  Distribution request, receive, compute, reply, wait;  // request, reply: on the way, after clock correction
  double gigabytes_per_second = 0,
         measured_gigabytes_per_second = 0;  // effective; at the start of the run (0: unknown)
  double slowest_share = 0;                  // of the blocks in which this rank replied last
};

/// Where the time of a step goes if only what it waits for is counted.
struct CriticalPath {
  struct Part {
    std::string name;
    double share = 0;
  };
  std::vector<Part> parts;  // sums to 1
};

struct Summary {
  std::vector<KindSummary> kinds;
  std::vector<LayerSummary> layers;  // slowest first
  std::vector<RankSummary> ranks;
  bool messages = false;         // whether expert ranks are other processes
  double compute_imbalance = 1;  // sum over blocks and steps of the slowest rank's time over that of the mean
  double routes_imbalance = 1;   // the same of (token, expert) pairs
  CriticalPath critical_path;
};

Summary summarize(const Profile& profile);
/// The steps first … last (positions, inclusive) only.
Profile select_steps(const Profile& profile, std::size_t first, std::size_t last);

std::string summary_text(const Profile& profile, const Summary& summary);
std::string summary_json(const Profile& profile, const Summary& summary);
/// One line per step, with a header line.
std::string steps_csv(const Profile& profile);

}  // namespace dsv41
