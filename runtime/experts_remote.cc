// The host side of the exchange: routed experts on other ranks (experts.h; docs/runtime.md, "Exchange").
// One request per rank that owns a chosen expert, one reply from each; nothing is allocated once the object
// exists.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "runtime/exchange/backoff.h"
#include "runtime/exchange/communicator.h"
#include "runtime/exchange/messages.h"
#include "runtime/exchange/silence.h"
#include "runtime/experts.h"

namespace dsv41 {
namespace {

/// How long expert ranks may take to confirm that they end.
constexpr std::uint64_t kCloseNs = 2'000'000'000;

/// One request to one rank and its reply.
struct Flight {
  Flight(const ExpertLimits& limits)
      : request(wire::RequestLayout(limits.max_rows, limits.max_routes, limits.dim).bytes),
        reply(wire::ReplyLayout(limits.max_routes, limits.dim).bytes) {
    route_indices.reserve(limits.max_routes);
  }
  wire::Buffer request, reply;
  Request send, receive;
  bool sending = false, awaiting = false;
  wire::Header header;
  std::vector<std::uint32_t> route_indices;  // in the call, of the routes this rank was given
  RankReport report;
};

struct Peer {
  Peer(int number, std::string label, const ExpertLimits& limits, std::uint64_t timeout_ns)
      : rank(number),
        name(std::move(label)),
        control_in(wire::kControlBytes),
        control_out(wire::kControlBytes),
        silence(timeout_ns),
        flights{Flight(limits), Flight(limits)} {}
  int rank;
  std::string name;  // "rank 3 (node7)"
  wire::Buffer control_in, control_out;
  Request control_receive, control_send;
  bool control_sending = false;
  bool ready = false, farewell = false;
  bool lost = false;  // silent for too long, talks nonsense or cannot be reached: not waited for
  LoadProgress loaded;
  std::uint64_t calls = 0;
  Silence silence;  // while the host waits for it
  std::array<Flight, kCallsInFlight> flights;
};

class RemoteExperts final : public Experts {
 public:
  RemoteExperts(Communicator& communicator, const Placement& placement, const ExpertGeometry& geometry,
                const ExpertLimits& limits, std::chrono::milliseconds rank_timeout)
      : communicator_(communicator),
        placement_(placement),
        geometry_(geometry),
        limits_(limits),
        timeout_ns_(static_cast<std::uint64_t>(std::chrono::nanoseconds(rank_timeout).count())),
        keep_alive_ns_(std::clamp<std::uint64_t>(timeout_ns_ / 8, 20'000'000, 5'000'000'000)),
        backoff_(communicator.oversubscribed()) {
    wire::check_limits(limits);
    if (communicator.size() != static_cast<int>(placement.ranks()) + 1)
      throw UsageError(fmt::format("placement for {} expert ranks in a job of {} ranks", placement.ranks(),
                                   communicator.size()));
    peers_.reserve(placement.ranks());
    reports_.reserve(placement.ranks());
    for (int rank = 1; rank <= static_cast<int>(placement.ranks()); ++rank) {
      Peer& peer = peers_.emplace_back(rank, fmt::format("rank {} ({})", rank, communicator.host_of(rank)),
                                       limits, timeout_ns_);
      peer.control_receive = communicator_.receive(peer.control_in.all(), rank, wire::kControlTag);
    }
  }

  ~RemoteExperts() override {
    try {
      close(ExitCode::Peer);
    } catch (...) {  // the failure that unwinds this object is the one to report
    }
  }

  void begin(const ExpertCall& call) override;
  void finish(std::span<BFloat16> outputs) override;
  bool remote() const override { return true; }
  Residency residency() const override { return residency_; }
  std::span<const RankReport> reports() const override { return reports_; }
  void set_phase(std::string_view phase) override { phase_ = phase; }
  void keep_alive() override {
    if (monotonic_ns() - last_keep_alive_ns_ >= keep_alive_ns_) tend_control();
  }
  void await_ready(const LoadReporter& report) override;
  void close(ExitCode code) override;

 private:
  void check_call(const ExpertCall& call) const;
  /// Copies rows and routes into the request buffers of slot; headers hold the counts already.
  void pack(const ExpertCall& call, std::size_t slot);
  /// Polls one flight; true when something has completed.
  bool advance(Peer& peer, Flight& flight, std::span<BFloat16> outputs);
  void scatter(Peer& peer, Flight& flight, std::size_t bytes, std::span<BFloat16> outputs);
  /// Reads what ranks say beside replies, and tells them that the host is alive when that is due.
  void tend_control();
  void read_control(Peer& peer);
  void send_control(Peer& peer, wire::Kind kind, ExitCode code = ExitCode::Ok);
  /// Replies do not progress while the host computes, so only the time it waits counts.
  void begin_to_wait();
  void check_silence(Peer& peer, const Flight& flight) const;
  /// "prefill, block 5, step 12"
  std::string where() const { return fmt::format("{}, block {}, step {}", phase_, last_block_, last_step_); }

  PeerError located(const PeerError& error) const {
    return PeerError(fmt::format("{} ({})", error.what(), where()));
  }

  Communicator& communicator_;
  const Placement& placement_;
  const ExpertGeometry geometry_;
  const ExpertLimits limits_;
  const std::uint64_t timeout_ns_, keep_alive_ns_;
  Backoff backoff_;
  std::vector<Peer> peers_;
  std::array<ExpertCall, kCallsInFlight> calls_;
  std::uint64_t begun_ = 0, finished_ = 0;
  std::uint64_t last_keep_alive_ns_ = 0;
  std::uint64_t last_step_ = 0;
  std::uint32_t last_block_ = 0;
  std::string phase_ = "start";
  std::vector<RankReport> reports_;
  Residency residency_;
  bool closed_ = false;
};

void RemoteExperts::check_call(const ExpertCall& call) const {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(std::string("experts call: ") + what);
  };
  require(begun_ - finished_ < kCallsInFlight, "too many calls in flight");
  require(call.block < geometry_.experts_per_block.size(), "block out of range");
  require(call.x.k == limits_.dim && call.x.rows <= limits_.max_rows, "rows beyond the limits");
  require(call.routes.size() <= limits_.max_routes, "routes beyond the limits");
  const std::uint32_t experts = geometry_.experts_per_block[call.block];
  for (std::size_t index = 0; index < call.routes.size(); ++index) {
    const Route& route = call.routes[index];
    require(route.row < call.x.rows && route.expert < experts, "route out of range");
    if (index == 0) continue;
    const Route& previous = call.routes[index - 1];
    require(previous.row < route.row || (previous.row == route.row && previous.expert < route.expert),
            "routes out of order");
  }
}

void RemoteExperts::begin(const ExpertCall& call) {
  check_call(call);
  const std::size_t slot = begun_++ % kCallsInFlight;
  calls_[slot] = call;
  last_step_ = call.step;
  last_block_ = call.block;
  for (Peer& peer : peers_) {
    Flight& flight = peer.flights[slot];
    flight.header.rows = flight.header.routes = 0;
    flight.route_indices.clear();
  }
  for (std::uint32_t index = 0; index < call.routes.size(); ++index) {
    const Route& route = call.routes[index];
    Flight& flight = peers_[placement_.owner(call.block, route.expert)].flights[slot];
    if (flight.route_indices.empty() || call.routes[flight.route_indices.back()].row != route.row)
      ++flight.header.rows;
    flight.route_indices.push_back(index);
  }
  for (Peer& peer : peers_) {
    Flight& flight = peer.flights[slot];
    if (flight.route_indices.empty()) continue;
    flight.header.routes = static_cast<std::uint32_t>(flight.route_indices.size());
    const wire::RequestLayout layout(flight.header.rows, flight.header.routes, limits_.dim);
    flight.header.step = call.step;
    flight.header.call = ++peer.calls;
    flight.header.bytes = layout.bytes;
    flight.header.block = call.block;
    flight.header.dim = limits_.dim;

    // The receive stands before the request leaves. It is as long as the longest reply: a wrong length is
    // then reported with both numbers.
    flight.receive = communicator_.receive(flight.reply.all(), peer.rank, wire::kReplyTag);
    flight.awaiting = true;
  }
  pack(call, slot);
  for (Peer& peer : peers_) {
    Flight& flight = peer.flights[slot];
    if (flight.route_indices.empty()) continue;
    flight.report = {static_cast<std::uint32_t>(peer.rank),
                     flight.header.rows,
                     flight.header.routes,
                     flight.header.bytes,
                     0,
                     monotonic_ns(),
                     0,
                     {}};
    flight.send = communicator_.send(flight.request.first(flight.header.bytes), peer.rank, wire::kRequestTag);
    flight.sending = true;
  }
}

void RemoteExperts::pack(const ExpertCall& call, std::size_t slot) {
  const std::size_t dim = limits_.dim;
  for (Peer& peer : peers_) {
    Flight& flight = peer.flights[slot];
    if (flight.route_indices.empty()) continue;
    const wire::RequestLayout layout(flight.header.rows, flight.header.routes, dim);
    std::byte* const message = flight.request.data();
    wire::store(message, flight.header);
    std::uint32_t rows = 0;
    std::uint32_t previous_row = 0;
    std::byte* route_out = message + layout.routes;
    for (const std::uint32_t index : flight.route_indices) {
      const Route& route = call.routes[index];
      if (rows == 0 || route.row != previous_row) {
        std::memcpy(message + layout.codes + rows * dim, call.x.codes + route.row * dim, dim);
        std::memcpy(message + layout.scales + rows * (dim / kBlock),
                    call.x.scales + route.row * (dim / kBlock), dim / kBlock);
        previous_row = route.row;
        ++rows;
      }
      wire::store(route_out, wire::WireRoute{rows - 1, route.expert, route.weight});
      route_out += sizeof(wire::WireRoute);
    }
  }
}

bool RemoteExperts::advance(Peer& peer, Flight& flight, std::span<BFloat16> outputs) try {
  bool progress = false;
  if (flight.sending && communicator_.test(flight.send)) {
    flight.sending = false;
    progress = true;
  }
  std::size_t bytes = 0;
  if (flight.awaiting && communicator_.test(flight.receive, &bytes)) {
    flight.awaiting = false;
    scatter(peer, flight, bytes, outputs);
    progress = true;
  }
  return progress;
} catch (const PeerError& error) {
  throw located(error);
}

void RemoteExperts::scatter(Peer& peer, Flight& flight, std::size_t bytes, std::span<BFloat16> outputs) {
  flight.report.replied_at_ns = monotonic_ns();
  peer.silence.end(flight.report.replied_at_ns);
  flight.report.bytes_in = bytes;
  const std::size_t dim = limits_.dim;
  flight.report.timing = wire::read_reply(flight.reply.first(bytes), flight.header, peer.name);
  const std::byte* row = flight.reply.data() + wire::ReplyLayout(flight.header.routes, dim).rows;
  for (const std::uint32_t index : flight.route_indices) {
    std::memcpy(outputs.data() + index * dim, row, dim * sizeof(BFloat16));
    row += dim * sizeof(BFloat16);
  }
}

void RemoteExperts::finish(std::span<BFloat16> outputs) {
  if (begun_ == finished_) throw std::logic_error("no experts call to finish");
  const std::size_t slot = finished_ % kCallsInFlight;
  if (outputs.size() != calls_[slot].routes.size() * limits_.dim)
    throw std::invalid_argument("experts call: outputs of the wrong size");
  last_step_ = calls_[slot].step;
  last_block_ = calls_[slot].block;
  begin_to_wait();
  for (;;) {
    bool pending = false, progress = false;
    for (Peer& peer : peers_) {
      Flight& flight = peer.flights[slot];
      progress |= advance(peer, flight, outputs);
      pending |= flight.sending || flight.awaiting;
    }
    if (!pending) break;
    if (progress) {
      backoff_.reset();
      continue;
    }
    tend_control();
    for (Peer& peer : peers_) check_silence(peer, peer.flights[slot]);
    backoff_.wait();
  }
  ++finished_;
  reports_.clear();
  for (const Peer& peer : peers_) {
    if (peer.flights[slot].route_indices.empty()) continue;
    reports_.push_back(peer.flights[slot].report);
    residency_.hits += reports_.back().timing.cache_hits;
    residency_.misses += reports_.back().timing.cache_misses;
  }
}

void RemoteExperts::begin_to_wait() {
  const std::uint64_t now = monotonic_ns();
  for (Peer& peer : peers_) peer.silence.end(now);
  backoff_.reset();
}

void RemoteExperts::check_silence(Peer& peer, const Flight& flight) const {
  if (!flight.sending && !flight.awaiting) return;
  if (!peer.silence.lasts_too_long(monotonic_ns())) return;
  peer.lost = true;
  throw PeerError(fmt::format(
      "{} has been silent for {:.3g} s while it owes a reply ({}); raise --rank-timeout if it is only slow",
      peer.name, static_cast<double>(timeout_ns_) * 1e-9, where()));
}

void RemoteExperts::tend_control() {
  const std::uint64_t now = monotonic_ns();
  const bool due = now - last_keep_alive_ns_ >= keep_alive_ns_;
  if (due) last_keep_alive_ns_ = now;
  for (Peer& peer : peers_) {
    read_control(peer);
    if (due) send_control(peer, wire::Kind::KeepAlive);
  }
}

void RemoteExperts::read_control(Peer& peer) {
  const auto listen = [&] {
    peer.control_receive = communicator_.receive(peer.control_in.all(), peer.rank, wire::kControlTag);
  };
  wire::Control control;
  try {
    std::size_t bytes = 0;
    if (!communicator_.test(peer.control_receive, &bytes)) return;
    control = wire::read_control(peer.control_in.first(bytes), peer.name);
  } catch (const PeerError& error) {
    listen();
    throw located(error);
  }
  listen();
  peer.silence.end(monotonic_ns());
  switch (control.kind) {
    case wire::Kind::KeepAlive:
      return;
    case wire::Kind::Loading:
      peer.loaded = wire::read_progress(control.text, peer.name);
      return;
    case wire::Kind::Ready:
      peer.ready = true;
      peer.loaded.done_bytes = peer.loaded.total_bytes;
      return;
    case wire::Kind::Farewell:
      peer.farewell = true;
      return;
    case wire::Kind::Failure:
      if (closed_) return;  // the job ends already; its first failure is the one that is told
      throw Error(control.code == ExitCode::Ok ? ExitCode::Peer : control.code,
                  fmt::format("{}: {} ({})", peer.name, control.text, where()));
    default:
      throw PeerError(fmt::format("malformed message from {}: kind {} from an expert rank ({})", peer.name,
                                  static_cast<unsigned>(control.kind), where()));
  }
}

void RemoteExperts::send_control(Peer& peer, wire::Kind kind, ExitCode code) {
  if (peer.control_sending && communicator_.test(peer.control_send)) peer.control_sending = false;
  if (peer.control_sending) return;  // the previous one still waits for the rank to look
  peer.control_send = communicator_.send(wire::write_control(peer.control_out.all(), kind, code), peer.rank,
                                         wire::kControlTag);
  peer.control_sending = true;
}

void RemoteExperts::await_ready(const LoadReporter& report) {
  begin_to_wait();
  for (;;) {
    tend_control();
    LoadProgress sum;
    bool ready = true;
    for (Peer& peer : peers_) {
      sum.done_bytes += peer.loaded.done_bytes;
      sum.total_bytes += peer.loaded.total_bytes;
      ready = ready && peer.ready;
      if (peer.ready || !peer.silence.lasts_too_long(monotonic_ns())) continue;
      peer.lost = true;
      throw PeerError(fmt::format("{} has been silent for {:.3g} s while it loads its experts ({})",
                                  peer.name, static_cast<double>(timeout_ns_) * 1e-9, phase_));
    }
    if (report) report(sum);
    if (ready) return;
    backoff_.wait();
  }
}

void RemoteExperts::close(ExitCode code) {
  if (closed_) return;
  closed_ = true;
  const std::uint64_t deadline = monotonic_ns() + kCloseNs;
  std::vector<bool> told(peers_.size(), false);
  for (;;) {
    bool pending = false;
    for (std::size_t index = 0; index < peers_.size(); ++index) {
      Peer& peer = peers_[index];
      if (peer.lost) continue;
      try {
        if (peer.control_sending && communicator_.test(peer.control_send)) peer.control_sending = false;
        if (!told[index] && !peer.control_sending) {
          send_control(peer, wire::Kind::Shutdown, code);
          told[index] = true;
        }
        // Requests that are under way must leave before the message layer ends; replies no longer interest.
        for (Flight& flight : peer.flights) {
          if (flight.sending && communicator_.test(flight.send)) flight.sending = false;
          if (flight.awaiting && communicator_.test(flight.receive)) flight.awaiting = false;
          pending |= flight.sending;
        }
        if (!peer.farewell) read_control(peer);
        pending |= !peer.farewell || peer.control_sending;
      } catch (const Error&) {
        peer.lost = true;
      }
    }
    if (!pending) break;
    if (monotonic_ns() > deadline) {
      for (Peer& peer : peers_) peer.lost = true;
      break;
    }
    backoff_.wait();
  }
  if (std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.lost; })) {
    if (code == ExitCode::Ok) {
      for (const Peer& peer : peers_)
        if (!peer.farewell)
          fmt::print(stderr, "dsv41-mpi: {} did not confirm the end of the job\n", peer.name);
    }
    communicator_.abort(static_cast<int>(code == ExitCode::Ok ? ExitCode::Peer : code));
  }
  for (Peer& peer : peers_) {
    communicator_.cancel(peer.control_receive);
    for (Flight& flight : peer.flights)
      if (flight.awaiting) communicator_.cancel(flight.receive);
  }
}

}  // namespace

std::unique_ptr<Experts> remote_experts(Communicator& communicator, const Placement& placement,
                                        const ExpertGeometry& geometry, const ExpertLimits& limits,
                                        std::chrono::milliseconds rank_timeout) {
  return std::make_unique<RemoteExperts>(communicator, placement, geometry, limits, rank_timeout);
}

}  // namespace dsv41
