#include "benchmarks/gpu/layer_exchange.h"

#include <algorithm>
#include <future>
#include <thread>
#include <vector>

#include "benchmarks/gpu/thread_communicator.h"
#include "runtime/expert_rank.h"
#include "runtime/gpu_engine.h"
#include "runtime/profile/clocks.h"

namespace dsv41::bench {
namespace {

constexpr std::uint32_t kWarmUp = 2;

ModelConfig one_layer(const LayerShape& shape) {
  ModelConfig config;
  config.dim = shape.dim;
  config.moe_inter_dim = shape.inter;
  config.n_layers = 1;
  config.n_mtp_layers = 0;
  config.n_routed_experts = shape.experts;
  config.n_activated_experts = shape.per_call;
  config.swiglu_limit = 10.0f;
  return config;
}

class SameExperts final : public ExpertSource {
 public:
  SameExperts(const ModelConfig& config, const ExpertMatrices& matrices)
      : geometry_(ExpertGeometry::of(config)), matrices_(matrices) {}
  const ExpertGeometry& geometry() const override { return geometry_; }
  ExpertMatrices expert(std::uint32_t, std::uint32_t) override { return matrices_; }

 private:
  ExpertGeometry geometry_;
  ExpertMatrices matrices_;
};

double at(std::vector<double>& values, double quantile) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(quantile * static_cast<double>(values.size() - 1))];
}

}  // namespace

struct LayerExchange::Implementation {
  LayerShape shape;
  ModelConfig config;
  Placement placement;
  ExpertLimits limits;
  SameExperts source;
  std::unique_ptr<Communicator> host, rank;
  std::thread thread;
  std::unique_ptr<Experts> experts;
  std::uint32_t next = 0;
  std::uint64_t step = 0;

  Implementation(const LayerShape& chosen, const ExpertMatrices& matrices)
      : shape(chosen),
        config(one_layer(chosen)),
        placement(Placement::make("cyclic", config, 1)),
        limits(ExpertLimits::of(config, chosen.max_rows)),
        source(config, matrices) {
    std::tie(host, rank) = thread_communicators();
  }

  void serve(const std::function<std::unique_ptr<cuda::Device>()>& open, std::promise<void>& opened) {
    std::unique_ptr<ExpertEngine> engine;
    try {
      engine = gpu_engine(open(), source, &placement, 0, limits, {});
      opened.set_value();
    } catch (...) {
      opened.set_exception(std::current_exception());
      return;
    }
    run_expert_rank(*rank, placement, *engine, limits);
  }

  ~Implementation() {
    if (experts) experts->close(ExitCode::Ok);
    if (thread.joinable()) thread.join();
  }
};

LayerExchange::LayerExchange(const std::function<std::unique_ptr<cuda::Device>()>& open,
                             const LayerShape& shape, const ExpertMatrices& matrices)
    : implementation_(std::make_unique<Implementation>(shape, matrices)) {
  Implementation& self = *implementation_;
  std::promise<void> opened;
  std::future<void> outcome = opened.get_future();
  self.thread = std::thread([&self, &open, &opened] { self.serve(open, opened); });
  outcome.get();
  self.experts = remote_experts(*self.host, self.placement, self.source.geometry(), self.limits);
  self.experts->await_ready({});
}

LayerExchange::~LayerExchange() = default;

LayerTimes LayerExchange::time(const QuantizedRows& x, std::uint32_t repeats) {
  Implementation& self = *implementation_;
  const LayerShape& shape = self.shape;
  std::vector<BFloat16> outputs(x.rows * shape.per_call * shape.dim);
  std::vector<double> exchange, rank;
  for (std::uint32_t repeat = 0; repeat < repeats + kWarmUp; ++repeat) {
    std::vector<std::uint32_t> chosen;
    for (std::uint32_t i = 0; i < shape.per_call; ++i, self.next = (self.next + 1) % shape.experts)
      chosen.push_back(self.next);
    std::sort(chosen.begin(), chosen.end());
    std::vector<Route> routes;
    for (std::uint32_t row = 0; row < x.rows; ++row)
      for (const std::uint32_t expert : chosen) routes.push_back({row, expert, 0.25f});
    const std::uint64_t begin = monotonic_ns();
    self.experts->begin({++self.step, 0, x, routes});
    self.experts->finish(outputs);
    const std::uint64_t end = monotonic_ns();
    if (repeat < kWarmUp) continue;
    exchange.push_back(static_cast<double>(end - begin) * 1e-3);
    rank.push_back(static_cast<double>(self.experts->reports().front().timing.compute_ns) * 1e-3);
  }
  return {at(exchange, 0.5), at(exchange, 0.9), at(rank, 0.5)};
}

}  // namespace dsv41::bench
