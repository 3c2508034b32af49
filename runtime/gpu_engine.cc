// The GPU engine (gpu_engine.h): plans memory, groups routes by expert, turns device errors into the
// program's.
#include "runtime/gpu_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace dsv41 {
namespace {

constexpr double kGiB = 1073741824.0;
/// Left free when nothing is asked for: the driver's own needs, and the allocator's granularity.
constexpr std::uint64_t kReserveBytes = std::uint64_t{512} << 20;

/// Runs `body`; a device's error becomes a ResourceError with the same line.
template <class Body>
auto on_device(const Body& body) {
  try {
    return body();
  } catch (const cuda::DeviceError& error) {
    throw ResourceError(error.what());
  } catch (const std::invalid_argument& error) {  // dimensions that the kernels do not take
    throw ResourceError(error.what());
  }
}

class GpuEngine final : public ExpertEngine {
 public:
  GpuEngine(std::unique_ptr<cuda::Device> device, ExpertSource& source, const GpuMemoryPlan& plan)
      : source_(source),
        plan_(plan),
        name_(device->description().name),
        index_(device->description().index),
        experts_(std::move(device), plan.options,
                 [this](cuda::ExpertKey key) { return source_.expert(key.block, key.expert); }),
        rows_(plan.options.max_routes),
        outputs_(plan.options.max_routes),
        weights_(plan.options.max_routes) {}

  void load(const std::vector<cuda::ExpertKey>& keys,
            const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
    experts_.load(keys, progress);
  }

  const ExpertGeometry& geometry() const override { return source_.geometry(); }
  std::string describe() const override {
    return fmt::format("GPU {} ({}), {}", index_, name_, plan_.describe());
  }

  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override {
    const std::uint64_t begin = monotonic_ns();
    const cuda::DeviceExpertsCounters before = experts_.counters();
    on_device([&] {
      group_by_expert(call);
      experts_.begin(call.x, tasks_, geometry().swiglu_limit);
      wait(alive);
      experts_.finish(outputs);
    });
    const cuda::DeviceExpertsCounters& after = experts_.counters();
    timing.experts_touched += static_cast<std::uint32_t>(tasks_.size());
    timing.cache_hits += static_cast<std::uint32_t>(after.hits - before.hits);
    timing.cache_misses += static_cast<std::uint32_t>(after.misses - before.misses);
    timing.bytes_read += after.bytes_read - before.bytes_read;
    timing.compute_ns += monotonic_ns() - begin;
  }

 private:
  /// Polls the device: without a pause for the first moments (a decode step takes tens of microseconds), then
  /// politely.
  void wait(const std::function<void()>& alive) {
    constexpr std::uint64_t kBusyNs = 2'000'000, kAliveNs = 200'000'000;
    const std::uint64_t begin = monotonic_ns();
    std::uint64_t last_alive = begin;
    while (!experts_.ready()) {
      const std::uint64_t now = monotonic_ns();
      if (now - last_alive > kAliveNs) {
        alive();
        last_alive = now;
      }
      if (now - begin > kBusyNs) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  /// Counting sort of the routes into one task per expert, ascending.
  void group_by_expert(const ExpertCall& call) {
    if (call.routes.size() > rows_.size())
      throw std::invalid_argument("more routes than the engine was sized for");
    first_route_.assign(geometry().experts_per_block.at(call.block) + 1, 0);
    for (const Route& route : call.routes) ++first_route_.at(route.expert + 1);
    for (std::size_t expert = 1; expert < first_route_.size(); ++expert)
      first_route_[expert] += first_route_[expert - 1];
    next_ = first_route_;
    for (std::uint32_t index = 0; index < call.routes.size(); ++index) {
      const Route& route = call.routes[index];
      const std::size_t at = next_[route.expert]++;
      rows_[at] = route.row;
      weights_[at] = route.weight;
      outputs_[at] = index;
    }
    tasks_.clear();
    for (std::uint32_t expert = 0; expert + 1 < first_route_.size(); ++expert) {
      const std::size_t first = first_route_[expert], count = first_route_[expert + 1] - first;
      if (count == 0) continue;
      tasks_.push_back({{call.block, expert},
                        std::span(rows_).subspan(first, count),
                        std::span(weights_).subspan(first, count),
                        std::span(outputs_).subspan(first, count)});
    }
  }

  ExpertSource& source_;
  GpuMemoryPlan plan_;
  std::string name_;
  int index_;
  cuda::DeviceExperts experts_;
  std::vector<std::size_t> first_route_, next_;
  std::vector<std::uint32_t> rows_, outputs_;
  std::vector<float> weights_;
  std::vector<cuda::DeviceExpertTask> tasks_;
};

}  // namespace

std::string GpuMemoryPlan::describe() const {
  const double each =
      owned_experts == 0 ? 0.0 : static_cast<double>(owned_bytes) / static_cast<double>(owned_experts) / kGiB;
  std::string text =
      fmt::format("{} of {} experts ({:.1f} of {:.1f} GiB) stay on the GPU", resident_experts, owned_experts,
                  each * static_cast<double>(resident_experts), static_cast<double>(owned_bytes) / kGiB);
  if (resident_experts < owned_experts)
    text += fmt::format(", {} in pinned host memory, the others are read on demand",
                        std::min(pinned_experts, owned_experts - resident_experts));
  return text;
}

GpuMemoryPlan plan_gpu_memory(const ExpertGeometry& geometry, const ExpertLimits& limits,
                              std::uint64_t owned_experts, std::uint64_t free_device_bytes,
                              const GpuEngineOptions& options) {
  GpuMemoryPlan plan;
  plan.options.dim = geometry.dim;
  plan.options.inter = geometry.inter_dim;
  plan.options.max_rows = limits.max_rows;
  plan.options.max_routes = limits.max_routes;
  plan.options.dot_rows = options.dot_rows;
  plan.options.copy_threads = options.copy_threads;
  plan.options.slots = plan.options.pinned_slots = 0;
  const cuda::DeviceMemoryPlan bare = cuda::DeviceMemoryPlan::of(plan.options);

  if (options.device_bytes > free_device_bytes)
    throw ResourceError(fmt::format(
        "--expert-memory asks for {:.2f} GiB of GPU memory, {:.2f} GiB are free: ask for less",
        static_cast<double>(options.device_bytes) / kGiB, static_cast<double>(free_device_bytes) / kGiB));
  const std::uint64_t reserve = std::min(kReserveBytes, free_device_bytes / 16);
  const std::uint64_t budget = options.device_bytes != 0 ? options.device_bytes : free_device_bytes - reserve;
  if (budget < bare.workspace_bytes + bare.expert_bytes)
    throw ResourceError(fmt::format(
        "{:.2f} GiB of GPU memory are not enough: {} rows per step need {:.2f} GiB of workspace, and each "
        "expert {:.2f} MiB "
        "(free {:.2f} GiB; raise --expert-memory, or lower the rows per step)",
        static_cast<double>(budget) / kGiB, limits.max_rows, static_cast<double>(bare.workspace_bytes) / kGiB,
        static_cast<double>(bare.expert_bytes) / 1048576.0, static_cast<double>(free_device_bytes) / kGiB));
  const std::uint64_t fitting = (budget - bare.workspace_bytes) / bare.expert_bytes;
  plan.owned_experts = owned_experts;
  plan.owned_bytes = owned_experts * geometry.expert_bytes();
  plan.resident_experts = std::min(owned_experts, fitting);
  plan.options.slots = static_cast<std::uint32_t>(std::max<std::uint64_t>(plan.resident_experts, 1));
  const std::uint64_t left = owned_experts - plan.resident_experts;
  // Two at least: one is read while the other is sent.
  plan.pinned_experts = std::min(left, options.pinned_bytes / bare.expert_bytes);
  plan.options.pinned_slots = static_cast<std::uint32_t>(std::max<std::uint64_t>(plan.pinned_experts, 2));
  const cuda::DeviceMemoryPlan whole = cuda::DeviceMemoryPlan::of(plan.options);
  plan.device_bytes = whole.device_bytes;
  plan.host_bytes = whole.pinned_bytes;
  return plan;
}

std::unique_ptr<ExpertEngine> gpu_engine(std::unique_ptr<cuda::Device> device, ExpertSource& source,
                                         const Placement& placement, std::uint32_t owner,
                                         const ExpertLimits& limits, const GpuEngineOptions& options,
                                         const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  std::vector<cuda::ExpertKey> keys;
  const ExpertGeometry& geometry = source.geometry();
  for (std::uint32_t block = 0; block < geometry.experts_per_block.size(); ++block)
    for (std::uint32_t expert = 0; expert < geometry.experts_per_block[block]; ++expert)
      if (placement.owner(block, expert) == owner) keys.push_back({block, expert});
  return on_device([&]() -> std::unique_ptr<ExpertEngine> {
    const GpuMemoryPlan plan = plan_gpu_memory(geometry, limits, keys.size(), device->free_bytes(), options);
    auto engine = std::make_unique<GpuEngine>(std::move(device), source, plan);
    engine->load(keys, progress);
    return engine;
  });
}

}  // namespace dsv41
