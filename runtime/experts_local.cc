// Experts computed in this process: the CPU engine, the checkpoint as a source, and the seam around an engine
// (experts.h; docs/model.md 4).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <utility>

#include "loader/weights.h"
#include "runtime/expert_store.h"
#include "runtime/experts.h"

namespace dsv41 {

std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

ExpertLimits ExpertLimits::of(const ModelConfig& config, std::uint32_t max_rows) {
  std::uint32_t most = config.n_activated_experts;
  if (config.n_mtp_layers > 0) most = std::max(most, config.dspark_n_activated_experts);
  if (max_rows == 0 || std::uint64_t{max_rows} * most > 0xFFFFFFFFu)
    throw UsageError(fmt::format("{} rows per step", max_rows));
  return {max_rows, max_rows * most, config.dim};
}

ExpertGeometry ExpertGeometry::of(const ModelConfig& config) {
  ExpertGeometry geometry{config.dim, config.moe_inter_dim, static_cast<float>(config.swiglu_limit), {}};
  for (std::uint32_t block = 0; block < config.n_blocks(); ++block)
    geometry.experts_per_block.push_back(config.experts_of(block));
  return geometry;
}

std::uint64_t ExpertGeometry::expert_bytes() const {
  const std::uint64_t values = 3 * std::uint64_t{dim} * inter_dim;
  return values / 2 + values / kBlock;
}

namespace {

class CheckpointExperts final : public ExpertSource {
 public:
  explicit CheckpointExperts(const Checkpoint& checkpoint)
      : checkpoint_(checkpoint), geometry_(ExpertGeometry::of(checkpoint.config())) {
    for (const std::uint32_t experts : geometry_.experts_per_block) known_.emplace_back(experts);
  }

  const ExpertGeometry& geometry() const override { return geometry_; }

  ExpertMatrices expert(std::uint32_t block, std::uint32_t expert) override {
    if (block >= known_.size() || expert >= known_[block].size())
      throw CheckpointError(fmt::format("no expert {} in block {}", expert, block));
    auto& matrices = known_[block][expert];
    if (!matrices) matrices = expert_weights(checkpoint_, block, expert);
    return *matrices;
  }

 private:
  const Checkpoint& checkpoint_;
  ExpertGeometry geometry_;
  std::vector<std::vector<std::optional<ExpertMatrices>>> known_;  // looked up by name once
};

class CpuEngine final : public ExpertEngine {
 public:
  CpuEngine(std::unique_ptr<ExpertStore> store, Compute& compute, const ExpertLimits& limits)
      : store_(std::move(store)), compute_(compute) {
    std::uint32_t most_experts = 0;
    for (const std::uint32_t experts : geometry().experts_per_block)
      most_experts = std::max(most_experts, experts);
    first_route_.resize(most_experts + 1);
    touched_.reserve(most_experts);
    announced_.reserve(most_experts);
    rows_.resize(limits.max_routes);
    weights_.resize(limits.max_routes);
    outputs_.resize(limits.max_routes);
    tasks_.reserve(std::size_t{most_experts} + limits.max_routes / kSmallestSlice + 1);
  }

  const ExpertGeometry& geometry() const override { return store_->geometry(); }
  std::string describe() const override {
    return fmt::format("CPU {}, {} thread{}", compute_.ops().name, compute_.threads().size(),
                       compute_.threads().size() == 1 ? "" : "s");
  }

  void load(const LoadReporter&) override { store_->load(); }
  bool reads_ahead() const override { return store_->reads_ahead(); }
  void announce(std::uint32_t block, std::span<const Route> routes) override {
    announced_.clear();
    for (const Route& route : routes) announced_.push_back(route.expert);
    std::sort(announced_.begin(), announced_.end());
    announced_.erase(std::unique(announced_.begin(), announced_.end()), announced_.end());
    store_->announce(block, announced_);
  }

  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override {
    const std::uint64_t begin = monotonic_ns();
    const ExpertStore::Counters before = store_->counters();
    group_by_expert(call);
    store_->begin(call.block, touched_);
    if (reads_ahead()) alive();  // its own reads are on their way: now those of the next call may follow
    for (auto ready = store_->take(alive); !ready.empty(); ready = store_->take(alive)) {
      compute_ready(call, ready, outputs, alive);
      store_->release();
    }
    timing.experts_touched += static_cast<std::uint32_t>(touched_.size());
    timing.bytes_read += touched_.size() * geometry().expert_bytes();
    timing.cache_hits += static_cast<std::uint32_t>(store_->counters().hits - before.hits);
    timing.cache_misses += static_cast<std::uint32_t>(store_->counters().misses - before.misses);
    const std::uint64_t elapsed = monotonic_ns() - begin;
    timing.compute_ns += elapsed;
    if (!call.routes.empty()) ns_per_route_ = elapsed / call.routes.size() + 1;
  }

 private:
  // A call is computed in slices of about this long, so that a rank can say that it is alive. Slices change
  // no result.
  static constexpr std::uint64_t kSliceNs = 500'000'000;
  static constexpr std::size_t kSmallestSlice = 16, kFirstSlice = 64;

  std::size_t routes_per_slice() const {
    return ns_per_route_ == 0 ? kFirstSlice : std::max<std::size_t>(kSmallestSlice, kSliceNs / ns_per_route_);
  }

  /// All routes of these experts, in slices.
  void compute_ready(const ExpertCall& call, std::span<const std::uint32_t> experts,
                     std::span<BFloat16> outputs, const std::function<void()>& alive) {
    const std::size_t slice = routes_per_slice();
    std::size_t in_slice = 0;
    tasks_.clear();
    const auto run = [&] {
      if (tasks_.empty()) return;
      compute_.experts(call.x, tasks_, geometry().swiglu_limit, outputs);
      tasks_.clear();
      in_slice = 0;
    };
    for (const std::uint32_t expert : experts) {
      const ExpertMatrices matrices = store_->matrices(expert);
      const std::size_t end = first_route_[expert + 1];
      for (std::size_t first = first_route_[expert]; first < end;) {
        const std::size_t count = std::min(end - first, slice - in_slice);
        tasks_.push_back({matrices, std::span(rows_).subspan(first, count),
                          std::span(weights_).subspan(first, count),
                          std::span(outputs_).subspan(first, count)});
        first += count;
        in_slice += count;
        if (in_slice == slice) {
          run();
          alive();
        }
      }
    }
    run();
  }

  /// Counting sort of the routes: expert e has first_route_[e] … first_route_[e + 1] of the three arrays.
  void group_by_expert(const ExpertCall& call) {
    if (call.routes.size() > rows_.size())
      throw std::length_error("more routes than the engine was sized for");
    std::fill(first_route_.begin(), first_route_.end(), 0);
    for (const Route& route : call.routes) ++first_route_[route.expert];
    std::size_t sum = 0;
    for (std::size_t& first : first_route_) sum += std::exchange(first, sum);
    for (std::uint32_t index = 0; index < call.routes.size(); ++index) {
      const Route& route = call.routes[index];
      const std::size_t at = first_route_[route.expert]++;
      rows_[at] = route.row;
      weights_[at] = route.weight;
      outputs_[at] = index;
    }
    // Every entry has moved on to the begin of the next expert.
    std::copy_backward(first_route_.begin(), first_route_.end() - 1, first_route_.end());
    first_route_.front() = 0;
    touched_.clear();
    for (std::uint32_t expert = 0; expert < geometry().experts_per_block[call.block]; ++expert)
      if (first_route_[expert] != first_route_[expert + 1]) touched_.push_back(expert);
  }

  std::unique_ptr<ExpertStore> store_;
  Compute& compute_;
  std::vector<std::size_t> first_route_;
  std::vector<std::uint32_t> touched_, announced_;  // experts, ascending
  std::vector<std::uint32_t> rows_, outputs_;
  std::vector<float> weights_;
  std::vector<ExpertTask> tasks_;
  std::uint64_t ns_per_route_ = 0;
};

class LocalExperts final : public Experts {
 public:
  explicit LocalExperts(std::unique_ptr<ExpertEngine> engine) : engine_(std::move(engine)) {}

  void begin(const ExpertCall& call) override {
    if (begun_ - finished_ == kCallsInFlight) throw std::logic_error("too many calls in flight");
    calls_[begun_++ % kCallsInFlight] = call;
    if (engine_->reads_ahead()) engine_->announce(call.block, call.routes);
  }

  void finish(std::span<BFloat16> outputs) override {
    if (begun_ == finished_) throw std::logic_error("no call to finish");
    const ExpertCall& call = calls_[finished_++ % kCallsInFlight];
    report_ = {};
    report_.rows = static_cast<std::uint32_t>(call.x.rows);
    report_.routes = static_cast<std::uint32_t>(call.routes.size());
    report_.sent_at_ns = report_.timing.received_at_ns = monotonic_ns();
    if (!call.routes.empty()) engine_->compute(call, outputs, report_.timing, [] {});
    report_.replied_at_ns = monotonic_ns();
    residency_.hits += report_.timing.cache_hits;
    residency_.misses += report_.timing.cache_misses;
  }

  Residency residency() const override { return residency_; }
  std::span<const RankReport> reports() const override { return {&report_, 1}; }

 private:
  std::unique_ptr<ExpertEngine> engine_;
  std::array<ExpertCall, kCallsInFlight> calls_;
  std::uint64_t begun_ = 0, finished_ = 0;
  RankReport report_;
  Residency residency_;
};

}  // namespace

std::unique_ptr<ExpertSource> checkpoint_experts(const Checkpoint& checkpoint) {
  return std::make_unique<CheckpointExperts>(checkpoint);
}

std::unique_ptr<ExpertEngine> cpu_engine(std::unique_ptr<ExpertStore> store, Compute& compute,
                                         const ExpertLimits& limits) {
  return std::make_unique<CpuEngine>(std::move(store), compute, limits);
}

std::unique_ptr<ExpertEngine> cpu_engine(ExpertSource& source, Compute& compute, const ExpertLimits& limits) {
  return cpu_engine(mapped_expert_store(source), compute, limits);
}

std::unique_ptr<Experts> local_experts(std::unique_ptr<ExpertEngine> engine) {
  return std::make_unique<LocalExperts>(std::move(engine));
}

std::unique_ptr<Experts> local_experts(ExpertSource& source, Compute& compute, const ExpertLimits& limits) {
  return local_experts(cpu_engine(source, compute, limits));
}

}  // namespace dsv41
