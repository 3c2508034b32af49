// The loop of an expert rank and the ways it ends (expert_rank.h; docs/runtime.md, "Exchange" and
// "Behaviour").
#include "runtime/expert_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <thread>

#include "runtime/exchange/backoff.h"
#include "runtime/exchange/communicator.h"
#include "runtime/exchange/messages.h"
#include "runtime/exchange/silence.h"

namespace dsv41 {
namespace {

constexpr int kHost = 0;
/// How long handing over last replies and the farewell may take.
constexpr std::uint64_t kLeaveNs = 2'000'000'000;

/// Between two words about the progress of loading.
constexpr std::uint64_t kLoadingNs = 500'000'000;

/// Thrown out of a computation when the host has ended the job meanwhile.
struct Ended {};

class ExpertRank {
 public:
  ExpertRank(Communicator& communicator, const Placement& placement, ExpertEngine& engine,
             const ExpertLimits& limits, const ExpertRankOptions& options)
      : communicator_(communicator),
        engine_(engine),
        limits_(limits),
        rules_{limits_, engine.geometry(), placement, static_cast<std::uint32_t>(communicator.rank() - 1)},
        timeout_ns_(static_cast<std::uint64_t>(std::chrono::nanoseconds(options.rank_timeout).count())),
        keep_alive_ns_(std::clamp<std::uint64_t>(timeout_ns_ / 8, 20'000'000, 5'000'000'000)),
        silence_(timeout_ns_),
        host_(fmt::format("rank 0 ({})", communicator.host_of(kHost))),
        backoff_(communicator.oversubscribed()),
        control_in_(wire::kControlBytes),
        control_out_(wire::kControlBytes) {
    wire::check_limits(limits);
    routes_.reserve(limits.max_routes);
    next_routes_.reserve(limits.max_routes);
    listen();
    begin_to_wait();
  }

  ExitCode run() {
    try {
      load();
      serve();
    } catch (const Ended&) {
    } catch (const Error& error) {
      report(error.code(), error.what());
    } catch (const std::bad_alloc&) {
      report(ExitCode::Resources, "out of memory");
    } catch (const std::exception& error) {
      report(ExitCode::Peer, error.what());
    }
    leave();
    return shutdown_.value_or(ExitCode::Peer);
  }

 private:
  struct Flight {
    std::span<std::byte> request, reply;  // of messages_
    Request receive, send;
    bool sending = false;
    bool arrived = false;  // the request is there, `bytes` long
    std::size_t bytes = 0;
  };

  bool arrived(Flight& flight) {
    flight.arrived = flight.arrived || communicator_.test(flight.receive, &flight.bytes);
    return flight.arrived;
  }

  std::size_t largest_request() const {
    return wire::RequestLayout(limits_.max_rows, limits_.max_routes, limits_.dim).bytes;
  }
  void receive_into(Flight& flight) {
    flight.receive = communicator_.receive(flight.request, kHost, wire::kRequestTag);
  }
  void listen() { control_receive_ = communicator_.receive(control_in_.all(), kHost, wire::kControlTag); }

  void load() {
    engine_.load([this](const LoadProgress& progress) {
      const std::uint64_t now = monotonic_ns();
      if (now - last_alive_ns_ < std::min(keep_alive_ns_, kLoadingNs)) return;
      last_alive_ns_ = now;
      poll();
      if (shutdown_) throw Ended{};
      send_control(wire::Kind::Loading, ExitCode::Ok, wire::write_progress(progress));
    });
    if (MessageMemory* const own = engine_.message_memory()) messages_ = own;
    for (Flight& flight : flights_) {
      flight.request = messages_->allocate(largest_request());
      flight.reply = messages_->allocate(wire::ReplyLayout(limits_.max_routes, limits_.dim).bytes);
      receive_into(flight);
    }
    while (!send_control(wire::Kind::Ready)) {
      if (!poll()) backoff_.wait();
      if (shutdown_) throw Ended{};
    }
    begin_to_wait();
  }

  void begin_to_wait() {
    idle_since_ns_ = monotonic_ns();
    silence_.end(idle_since_ns_);
  }

  void serve() {
    for (std::size_t slot = 0; !shutdown_;) {
      if (arrived(flights_[slot])) {
        next_slot_ = (slot + 1) % kCallsInFlight;
        next_announced_ = false;
        answer(flights_[slot]);
        slot = next_slot_;
        backoff_.reset();
        continue;
      }
      if (poll()) {
        backoff_.reset();
        continue;
      }
      if (silence_.lasts_too_long(monotonic_ns())) host_lost();
      backoff_.wait();
    }
  }

  void answer(Flight& flight) {
    RankTiming timing;
    timing.received_at_ns = monotonic_ns();
    silence_.end(timing.received_at_ns);
    timing.wait_ns = timing.received_at_ns - idle_since_ns_;
    flight.arrived = false;
    const auto tell_host = [this] { keep_alive(); };
    const std::span<const std::byte> message = flight.request.first(flight.bytes);
    wire::ReplyHead head;
    wire::Header& header = head.header;
    header = wire::read_request(
        messages_->read_ends(message, wire::kRequestHead, wire::request_tail(limits_), tell_host), rules_,
        ++calls_, host_, routes_);
    while (
        flight.sending) {  // the reply before last still leaves: only when the host is slower than this rank
      if (!poll()) backoff_.wait();
      if (shutdown_) throw Ended{};
      if (silence_.lasts_too_long(monotonic_ns())) host_lost();
    }
    last_step_ = header.step;
    last_block_ = header.block;
    timing.receive_ns = monotonic_ns() - timing.received_at_ns;
    timing.send_ns = last_send_ns_;

    const wire::ReplyLayout layout(header.routes, header.dim);
    const std::span outputs(reinterpret_cast<BFloat16*>(flight.reply.data() + layout.rows),
                            std::size_t{header.routes} * header.dim);
    engine_.compute({header.step, header.block, wire::request_rows(message, header), routes_}, outputs,
                    timing, [this] { alive(); });

    const std::uint64_t computed_at = monotonic_ns();
    header.kind = wire::Kind::Reply;
    header.bytes = layout.bytes;
    head.timing = timing;
    messages_->write_head(flight.reply, std::as_bytes(std::span(&head, 1)), tell_host);
    // The next receive stands before the reply lets the host send again.
    receive_into(flight);
    flight.send = communicator_.send(flight.reply.first(layout.bytes), kHost, wire::kReplyTag);
    flight.sending = true;
    begin_to_wait();  // what arrived during the computation has not been seen yet
    last_send_ns_ = idle_since_ns_ - computed_at;
  }

  /// Tells the engine about the next request, if it is there already: the other half of a large step, or its
  /// next layer.
  void announce_next() {
    Flight& next = flights_[next_slot_];
    if (next_announced_ || !engine_.reads_ahead() || !arrived(next)) return;
    next_announced_ = true;
    wire::Header header;
    try {
      header = wire::read_request(messages_->read_ends(next.request.first(next.bytes), wire::kRequestHead,
                                                       wire::request_tail(limits_), {}),
                                  rules_, calls_ + 1, host_, next_routes_);
    } catch (const PeerError&) {
      return;  // reported when it is its turn
    }
    engine_.announce(header.block, next_routes_);
  }

  /// Called out of a long computation.
  void alive() {
    announce_next();
    keep_alive();
  }

  void keep_alive() {
    const std::uint64_t now = monotonic_ns();
    if (now - last_alive_ns_ < keep_alive_ns_) return;
    last_alive_ns_ = now;
    poll();
    if (shutdown_) throw Ended{};
    send_control(wire::Kind::KeepAlive);
  }

  /// Completes sends and reads the control channel; true when anything happened.
  bool poll() {
    bool progress = false;
    for (Flight& flight : flights_) {
      if (!flight.sending || !communicator_.test(flight.send)) continue;
      flight.sending = false;
      progress = true;
    }
    if (control_sending_ && communicator_.test(control_send_)) control_sending_ = false;
    if (shutdown_) return progress;
    wire::Control control;
    try {
      std::size_t bytes = 0;
      if (!communicator_.test(control_receive_, &bytes)) return progress;
      control = wire::read_control(control_in_.first(bytes), host_);
    } catch (const PeerError&) {
      listen();
      throw;
    }
    silence_.end(monotonic_ns());
    if (control.kind == wire::Kind::Shutdown) {
      shutdown_ = control.code;
      return true;
    }
    listen();
    if (control.kind != wire::Kind::KeepAlive)
      throw PeerError(fmt::format("malformed message from {}: kind {} from the host", host_,
                                  static_cast<unsigned>(control.kind)));
    return true;
  }

  /// False when the previous control message has not left yet.
  bool send_control(wire::Kind kind, ExitCode code = ExitCode::Ok, std::string_view text = {}) {
    if (control_sending_ && communicator_.test(control_send_)) control_sending_ = false;
    if (control_sending_) return false;
    control_send_ = communicator_.send(wire::write_control(control_out_.all(), kind, code, text), kHost,
                                       wire::kControlTag);
    control_sending_ = true;
    return true;
  }

  /// Lets what still arrives go to host memory: the engine's may be gone with its device.
  void leave_memory_of_engine() {
    if (messages_ == &host_messages_) return;
    messages_ = &host_messages_;
    for (Flight& flight : flights_) {
      if (flight.receive.empty()) continue;
      communicator_.cancel(flight.receive);
      flight.request = messages_->allocate(largest_request());
      receive_into(flight);
    }
  }

  /// Tells the host why this rank cannot go on and waits for the end of the job.
  void report(ExitCode code, const std::string& text) {
    if (shutdown_) return;
    const std::uint64_t deadline = monotonic_ns() + timeout_ns_;
    try {
      leave_memory_of_engine();
      for (bool told = false; !shutdown_;) {
        told = told || send_control(wire::Kind::Failure, code, text);
        if (poll()) continue;
        if (monotonic_ns() > deadline) host_lost();
        backoff_.wait();
      }
    } catch (const std::exception&) {  // not even that works
      fmt::print(stderr, "dsv41-mpi: rank {} ({}): {}\n", communicator_.rank(), communicator_.host(), text);
      communicator_.abort(static_cast<int>(code));
    }
  }

  /// Lets replies leave, says farewell and withdraws the receives. A host that is gone is not waited for.
  void leave() {
    const std::uint64_t deadline = monotonic_ns() + kLeaveNs;
    try {
      for (bool told = false;;) {
        poll();
        const bool sending = std::any_of(flights_.begin(), flights_.end(),
                                         [](const Flight& flight) { return flight.sending; });
        if (!sending && told && !control_sending_) break;
        if (!sending && !told) told = send_control(wire::Kind::Farewell);
        if (monotonic_ns() > deadline) break;
        backoff_.wait();
      }
    } catch (const PeerError&) {
    }
    for (Flight& flight : flights_) communicator_.cancel(flight.receive);
    if (!shutdown_) communicator_.cancel(control_receive_);
  }

  /// The host cannot print any more, so the first expert rank does; the others only make sure that the job
  /// ends.
  [[noreturn]] void host_lost() {
    if (communicator_.rank() != 1) std::this_thread::sleep_for(std::chrono::seconds(2));
    fmt::print(stderr,
               "dsv41-mpi: {} has been silent for {:.3g} s, last heard by rank {} ({}): block {}, step {}\n",
               host_, static_cast<double>(timeout_ns_) * 1e-9, communicator_.rank(), communicator_.host(),
               last_block_, last_step_);
    communicator_.abort(static_cast<int>(ExitCode::Peer));
    std::abort();  // never reached: the compiler does not see that a virtual function does not return
  }

  Communicator& communicator_;
  ExpertEngine& engine_;
  const ExpertLimits limits_;
  const wire::RequestRules rules_;
  const std::uint64_t timeout_ns_, keep_alive_ns_;
  Silence silence_;  // of the host
  const std::string host_;
  Backoff backoff_;
  wire::Buffer control_in_, control_out_;
  Request control_receive_, control_send_;
  bool control_sending_ = false;
  wire::HostMessages host_messages_;
  MessageMemory* messages_ = &host_messages_;  // the engine's, if it has any
  std::array<Flight, kCallsInFlight> flights_;
  std::vector<Route> routes_, next_routes_;
  std::size_t next_slot_ = 1;    // of the request after the one that is being answered
  bool next_announced_ = false;  // whether the engine knows it
  std::optional<ExitCode> shutdown_;
  std::uint64_t calls_ = 0;
  std::uint64_t idle_since_ns_ = 0, last_send_ns_ = 0, last_alive_ns_ = 0;
  std::uint64_t last_step_ = 0;
  std::uint32_t last_block_ = 0;
};

}  // namespace

ExitCode run_expert_rank(Communicator& communicator, const Placement& placement, ExpertEngine& engine,
                         const ExpertLimits& limits, const ExpertRankOptions& options) {
  return ExpertRank(communicator, placement, engine, limits, options).run();
}

ExitCode run_expert_rank(Communicator& communicator, const Placement& placement, ExpertSource& source,
                         Compute& compute, const ExpertLimits& limits, const ExpertRankOptions& options) {
  const auto engine = cpu_engine(source, compute, limits);
  return run_expert_rank(communicator, placement, *engine, limits, options);
}

}  // namespace dsv41
