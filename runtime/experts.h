// The one seam of the system: routed experts, wherever they live (docs/runtime.md, "Roles" and "Exchange").
// The forward pass sees Experts only; ExpertEngine is what computes them on a rank, ExpertSource where their
// matrices come from.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/compute.h"
#include "loader/checkpoint.h"
#include "loader/error.h"
#include "runtime/placement.h"

namespace dsv41 {

class Communicator;
class MessageMemory;

/// One (row, expert, weight) of a step. Routes are ordered by row, then ascending expert id; no pair occurs
/// twice.
struct Route {
  std::uint32_t row = 0;
  std::uint32_t expert = 0;
  float weight = 0;
};

struct ExpertCall {
  std::uint64_t step = 0;
  std::uint32_t block = 0;  // backbone layers, then draft stages
  QuantizedRows x;          // [rows, D]
  std::span<const Route> routes;
};

/// The largest call there will be: buffers are sized once from it.
struct ExpertLimits {
  std::uint32_t max_rows = 0;    // activation rows of one call
  std::uint32_t max_routes = 0;  // routes of one call: max_rows times the largest experts per token
  std::uint32_t dim = 0;         // D, a multiple of 32

  static ExpertLimits of(const ModelConfig& config, std::uint32_t max_rows);
};

/// What a rank did for one call: travels in the header of its reply. Times in ns.
struct RankTiming {
  std::uint64_t received_at_ns = 0;  // that rank's monotonic clock when the request was complete
  std::uint64_t wait_ns = 0;         // idle before it: from the end of the previous reply
  std::uint64_t receive_ns = 0;      // validating and unpacking
  std::uint64_t compute_ns = 0;
  std::uint64_t send_ns = 0;     // handing over the rank's previous reply (its own cannot be known yet)
  std::uint64_t bytes_read = 0;  // of expert matrices the computation went over
  std::uint32_t experts_touched = 0;
  std::uint32_t cache_hits = 0;
  std::uint32_t cache_misses = 0;
  std::uint32_t reserved = 0;  // no padding: the struct travels as it lies in memory
};

/// One rank's part in a finished call, as the host saw it.
struct RankReport {
  std::uint32_t rank = 0;  // communicator rank; 0 when computed in this process
  std::uint32_t rows = 0, routes = 0;
  std::uint64_t bytes_out = 0, bytes_in = 0;
  std::uint64_t sent_at_ns = 0, replied_at_ns = 0;  // this process's monotonic clock
  RankTiming timing;
};

/// How far an engine, or all of them, have come with loading experts.
struct LoadProgress {
  std::uint64_t done_bytes = 0, total_bytes = 0;
};
using LoadReporter = std::function<void(const LoadProgress&)>;

/// Monotonic clock of this process in ns; every *_at_ns above is read from it.
std::uint64_t monotonic_ns();

/// Up to kCallsInFlight calls may be begun before the oldest is finished.
inline constexpr std::size_t kCallsInFlight = 2;

class Experts {
 public:
  virtual ~Experts() = default;
  /// Starts the experts of one block. The call's arrays must stay valid until its finish().
  virtual void begin(const ExpertCall& call) = 0;
  /// Ends the oldest call that was begun. outputs: bf16 [routes, D], in route order. Blocks until all are
  /// there. Throws PeerError naming rank, host, block and step.
  virtual void finish(std::span<BFloat16> outputs) = 0;
  /// Whether a call leaves this process, so that waiting for it can be filled with other work.
  virtual bool remote() const { return false; }
  /// Experts of all calls so far that were in memory, or had to be read.
  struct Residency {
    std::uint64_t hits = 0, misses = 0;
  };
  virtual Residency residency() const { return {}; }
  /// The parts of the call that finish() ended last, in rank order; valid until the next finish().
  virtual std::span<const RankReport> reports() const = 0;
  /// Tells waiting ranks that the host is at work. Cheap: call it wherever time passes (every block, every
  /// wait for input). Throws what an expert rank has reported meanwhile.
  virtual void keep_alive() {}
  /// Blocks until every rank has loaded its experts. `report` (may be empty) is called again and again with
  /// the sums over all ranks. Throws what a rank reports, and PeerError naming a rank that is silent.
  virtual void await_ready(const LoadReporter&) {}
  /// What the host is doing, for messages about a failure: "load", "prefill", "decode", "output".
  virtual void set_phase(std::string_view) {}
  /// Ends the expert ranks with this code, once, within seconds: ranks that do not confirm are ended by
  /// Communicator::abort. No call may follow.
  virtual void close(ExitCode) {}
};

/// Shapes that every expert of a model shares.
struct ExpertGeometry {
  std::uint32_t dim = 0, inter_dim = 0;          // D, I
  float swiglu_limit = 0;                        // 0: no clamp
  std::vector<std::uint32_t> experts_per_block;  // backbone layers, then draft stages

  static ExpertGeometry of(const ModelConfig& config);
  /// Bytes of one expert in the stored format.
  std::uint64_t expert_bytes() const;
};

/// Where expert matrices come from.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  virtual const ExpertGeometry& geometry() const = 0;
  /// The views must stay valid as long as the source. Throws CheckpointError when there is no such expert.
  virtual ExpertMatrices expert(std::uint32_t block, std::uint32_t expert) = 0;
};

/// Experts of a checkpoint, which must outlive the source. Views are looked up once, at construction.
std::unique_ptr<ExpertSource> checkpoint_experts(const Checkpoint& checkpoint);

/// What computes experts on one rank: CPU threads, or a GPU. Blocking; routes name rows of the call.
class ExpertEngine {
 public:
  virtual ~ExpertEngine() = default;
  virtual const ExpertGeometry& geometry() const = 0;
  /// The routes of a call that will be computed later: experts that are not in memory may be fetched
  /// meanwhile.
  virtual bool reads_ahead() const { return false; }  // whether announce() has any effect
  virtual void announce(std::uint32_t block, std::span<const Route> routes) {
    (void)block;
    (void)routes;
  }
  /// Takes memory and loads experts; once, before the first call. `report` is to be called at least every
  /// second or so, and may throw.
  virtual void load(const LoadReporter& report) { (void)report; }
  /// After load(): where calls and outputs of compute() must lie, if not in host memory.
  virtual MessageMemory* message_memory() { return nullptr; }
  /// outputs: bf16 [routes, D] in route order. `alive` is to be called at least every second or so of a long
  /// call, and may announce() the next one. Fills compute time and counters of `timing`.
  virtual void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
                       const std::function<void()>& alive) = 0;
  /// For the start line: "avx2, 2 threads".
  virtual std::string describe() const = 0;
};

/// Experts on CPU threads, straight from the views of `source`. Both must outlive the engine.
std::unique_ptr<ExpertEngine> cpu_engine(ExpertSource& source, Compute& compute, const ExpertLimits& limits);

/// Experts computed in this process (-np 1).
std::unique_ptr<Experts> local_experts(std::unique_ptr<ExpertEngine> engine);
std::unique_ptr<Experts> local_experts(ExpertSource& source, Compute& compute, const ExpertLimits& limits);

/// The host side of the exchange: experts on ranks 1 … placement.ranks() of the communicator, each in
/// run_expert_rank() (runtime/expert_rank.h). All arguments by reference must outlive the object.
/// rank_timeout: how long a rank may be silent while it owes a reply.
std::unique_ptr<Experts> remote_experts(Communicator& communicator, const Placement& placement,
                                        const ExpertGeometry& geometry, const ExpertLimits& limits,
                                        std::chrono::milliseconds rank_timeout = std::chrono::seconds(60));

}  // namespace dsv41
