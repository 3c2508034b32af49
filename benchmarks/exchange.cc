// dsv41-bench exchange, under mpirun -np 2: the round trip of one layer's request and reply, once through
// everything that the runtime does with them, once through the communicator alone, and once as raw messages
// of the same sizes. The expert rank computes nothing (docs/exchange.md).
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "benchmarks/bench.h"
#include "runtime/exchange/backoff.h"
#include "runtime/exchange/communicator.h"
#include "runtime/exchange/messages.h"
#include "runtime/exchange/raw_round_trips.h"
#include "runtime/expert_rank.h"
#include "runtime/experts.h"

namespace dsv41::bench {
namespace {

constexpr int kTag = 6;
constexpr std::size_t kTurns = 5, kWarmUp = 20;

/// Answers with whatever is in the buffer.
class IdleEngine final : public ExpertEngine {
 public:
  explicit IdleEngine(ExpertGeometry geometry) : geometry_(std::move(geometry)) {}
  const ExpertGeometry& geometry() const override { return geometry_; }
  void compute(const ExpertCall&, std::span<BFloat16>, RankTiming&, const std::function<void()>&) override {}
  std::string describe() const override { return "nothing"; }

 private:
  ExpertGeometry geometry_;
};

/// The released model's layer.
ModelConfig layer_config() {
  ModelConfig config;
  config.dim = 5120;
  config.moe_inter_dim = 2304;
  config.n_layers = 1;
  config.n_mtp_layers = 0;
  config.n_routed_experts = 384;
  config.n_activated_experts = 6;
  return config;
}

void wait(Communicator& communicator, Request& request, Backoff& backoff) {
  backoff.reset();
  while (!communicator.test(request)) backoff.wait();
}

/// Times on rank 0, in ns.
std::vector<std::uint64_t> communicator_trips(Communicator& communicator, std::size_t bytes_out,
                                              std::size_t bytes_in, std::size_t trips) {
  const wire::Buffer out(bytes_out), in(bytes_in);
  Backoff backoff(communicator.oversubscribed());
  std::vector<std::uint64_t> times;
  for (std::size_t trip = 0; trip < trips; ++trip) {
    const std::uint64_t begin = monotonic_ns();
    const bool host = communicator.rank() == 0;
    Request receive = communicator.receive(host ? in.all() : out.all(), host ? 1 : 0, kTag);
    if (!host) wait(communicator, receive, backoff);
    Request send = communicator.send(host ? out.all() : in.all(), host ? 1 : 0, kTag);
    wait(communicator, send, backoff);
    if (host) wait(communicator, receive, backoff);
    times.push_back(monotonic_ns() - begin);
  }
  return times;
}

struct Times {
  std::vector<std::uint64_t> all;
  void add(std::vector<std::uint64_t> times) {
    times.erase(times.begin(),
                times.begin() + static_cast<std::ptrdiff_t>(std::min(kWarmUp, times.size() / 2)));
    all.insert(all.end(), times.begin(), times.end());
  }
  double at(double quantile) {
    std::sort(all.begin(), all.end());
    return static_cast<double>(
               all[static_cast<std::size_t>(quantile * static_cast<double>(all.size() - 1))]) *
           1e-3;
  }
};

}  // namespace

Json run_exchange(const Options& options) {
  if (!started_by_launcher())
    throw std::runtime_error("exchange: start it as mpirun -np 2 dsv41-bench exchange");
  const auto communicator = make_mpi_communicator();
  if (communicator->size() != 2) throw std::runtime_error("exchange: needs two ranks");
  const bool host = communicator->rank() == 0;
  const ModelConfig config = layer_config();
  const ExpertGeometry geometry = ExpertGeometry::of(config);
  const Placement placement = Placement::make("cyclic", config, 1);

  Json results = Json::array();
  for (const std::size_t rows :
       options.rows.empty() ? std::vector<std::size_t>{1, 6, 32, 256} : options.rows) {
    const auto limits = ExpertLimits::of(config, static_cast<std::uint32_t>(rows));
    const std::size_t routes = rows * config.n_activated_experts;
    const std::size_t bytes_out = wire::RequestLayout(rows, routes, config.dim).bytes,
                      bytes_in = wire::ReplyLayout(routes, config.dim).bytes;
    // About as long for every size.
    const std::size_t trips = std::clamp<std::size_t>(
        static_cast<std::size_t>(options.seconds * 1e9) / (bytes_out + bytes_in), 40, 4000);
    std::vector<std::uint8_t> codes(rows * config.dim, 0x38), scales(rows * config.dim / kBlock, 127);
    std::vector<Route> call_routes;
    for (std::uint32_t row = 0; row < rows; ++row)
      for (std::uint32_t i = 0; i < config.n_activated_experts; ++i)
        call_routes.push_back({row, (row * 7 + i * 61) % 64 + i * 64, 0.25f});
    const ExpertCall call{1, 0, {codes.data(), scales.data(), rows, config.dim}, call_routes};
    std::vector<BFloat16> outputs(routes * config.dim);

    Times raw, plain, whole;
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
      communicator->barrier();
      raw.add(raw_round_trips(bytes_out, bytes_in, trips));
      communicator->barrier();
      plain.add(communicator_trips(*communicator, bytes_out, bytes_in, trips));
      communicator->barrier();
      if (!host) {
        IdleEngine engine(geometry);
        run_expert_rank(*communicator, placement, engine, limits);
        continue;
      }
      const auto experts = remote_experts(*communicator, placement, geometry, limits);
      std::vector<std::uint64_t> times;
      for (std::size_t trip = 0; trip < trips; ++trip) {
        const std::uint64_t begin = monotonic_ns();
        experts->begin(call);
        experts->finish(outputs);
        times.push_back(monotonic_ns() - begin);
      }
      whole.add(std::move(times));
      experts->close(ExitCode::Ok);
    }
    if (!host) continue;
    const double raw_us = raw.at(0.5), plain_us = plain.at(0.5), whole_us = whole.at(0.5);
    fmt::print(stderr,
               "{:>4} rows, {:>8} bytes out, {:>9} back: raw {:9.1f} us, communicator {:9.1f} us ({:.2f}), "
               "exchange {:9.1f} us ({:.2f})\n",
               rows, bytes_out, bytes_in, raw_us, plain_us, plain_us / raw_us, whole_us, whole_us / raw_us);
    results.push_back({{"rows", rows},
                       {"bytes_out", bytes_out},
                       {"bytes_in", bytes_in},
                       {"trips", raw.all.size()},
                       {"raw_us", raw_us},
                       {"raw_p90_us", raw.at(0.9)},
                       {"communicator_us", plain_us},
                       {"exchange_us", whole_us},
                       {"exchange_p90_us", whole.at(0.9)},
                       {"communicator_over_raw", plain_us / raw_us},
                       {"exchange_over_raw", whole_us / raw_us}});
  }
  if (!host) return nullptr;
  return {{"transport", communicator->transport()}, {"cases", results}};
}

}  // namespace dsv41::bench
