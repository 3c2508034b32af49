// The GPU engine (gpu_engine.h): plans memory, groups routes by expert, turns device errors into the
// program's.
#include "runtime/gpu_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "runtime/exchange/messages.h"

namespace dsv41 {
namespace {

constexpr double kMiB = 1048576.0;
/// Left free when nothing is asked for: the driver's own needs, and the allocator's granularity.
constexpr std::uint64_t kReserveBytes = std::uint64_t{512} << 20;

std::string size_text(std::uint64_t bytes) {
  const double mib = static_cast<double>(bytes) / kMiB;
  return mib < 1024 ? fmt::format("{:.2f} MiB", mib) : fmt::format("{:.2f} GiB", mib / 1024);
}

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

class GpuEngine final : public ExpertEngine, private MessageMemory {
 public:
  GpuEngine(std::unique_ptr<cuda::Device> device, ExpertSource& source, std::vector<cuda::ExpertKey> owned,
            const GpuMemoryPlan& plan, std::chrono::milliseconds hang_after)
      : source_(source),
        plan_(plan),
        hang_after_(hang_after),
        name_(describe_gpu(*device)),
        device_(std::move(device)),
        owned_(std::move(owned)),
        rows_(plan.options.max_routes),
        outputs_(plan.options.max_routes),
        weights_(plan.options.max_routes) {}

  void load(const LoadReporter& report) override {
    on_device([&] {
      experts_ = std::make_unique<cuda::DeviceExperts>(
          std::move(device_), plan_.options,
          [this](cuda::ExpertKey key) { return source_.expert(key.block, key.expert); });
      LoadProgress last;
      experts_->load(
          owned_,
          [&](std::uint64_t done, std::uint64_t total) {
            last = {done, total};
            report(last);
          },
          patiently("an upload", [&] { report(last); }));
      if (!plan_.options.in_place) return;
      const std::size_t tail = plan_.options.max_routes * sizeof(wire::WireRoute);
      ends_ = experts_->allocate(cuda::DeviceBuffer::Kind::Pinned,
                                 std::max(wire::kRequestHead, sizeof(wire::ReplyHead)) + tail);
    });
  }

  MessageMemory* message_memory() override { return ends_.empty() ? nullptr : this; }

  const ExpertGeometry& geometry() const override { return source_.geometry(); }
  std::string describe() const override { return fmt::format("{}, {}", name_, plan_.describe()); }

  void compute(const ExpertCall& call, std::span<BFloat16> outputs, RankTiming& timing,
               const std::function<void()>& alive) override {
    if (!experts_) throw std::logic_error("GPU engine: not loaded");
    const std::uint64_t begin = monotonic_ns();
    const cuda::DeviceExpertsCounters before = experts_->counters();
    on_device([&] {
      group_by_expert(call);
      if (plan_.options.in_place)
        experts_->begin_in_place(call.x, tasks_, geometry().swiglu_limit, outputs.data(), alive,
                                 patiently("an upload", alive));
      else
        experts_->begin(call.x, tasks_, geometry().swiglu_limit, alive, patiently("an upload", alive));
      wait(
          "a call", [this] { return experts_->ready(); }, alive);
      experts_->finish(plan_.options.in_place ? std::span<BFloat16>() : outputs);
    });
    const cuda::DeviceExpertsCounters& after = experts_->counters();
    timing.experts_touched += static_cast<std::uint32_t>(tasks_.size());
    timing.cache_hits += static_cast<std::uint32_t>(after.hits - before.hits);
    timing.cache_misses += static_cast<std::uint32_t>(after.misses - before.misses);
    timing.bytes_read += after.bytes_read - before.bytes_read;
    timing.compute_ns += monotonic_ns() - begin;
  }

 private:
  std::span<std::byte> allocate(std::size_t bytes) override {
    return on_device([&] { return experts_->allocate(cuda::DeviceBuffer::Kind::Device, bytes); });
  }

  MessageEnds read_ends(std::span<const std::byte> message, std::size_t head, std::size_t tail,
                        const std::function<void()>& alive) override {
    head = std::min(head, message.size());
    tail = std::min(tail, message.size());
    const std::span<std::byte> first = ends_.first(head), last = ends_.subspan(head, tail);
    on_device([&] {
      cuda::Device& device = experts_->device();
      device.download(cuda::Queue::Compute, first.data(), message.data(), head);
      device.download(cuda::Queue::Compute, last.data(), message.last(tail).data(), tail);
      wait_for_copies(alive);
    });
    return {first, last, message.size()};
  }

  void write_head(std::span<std::byte> message, std::span<const std::byte> bytes,
                  const std::function<void()>& alive) override {
    on_device([&] {
      std::memcpy(ends_.data(), bytes.data(), bytes.size());
      experts_->device().upload(cuda::Queue::Compute, message.data(), ends_.data(), bytes.size());
      wait_for_copies(alive);
    });
  }

  void wait_for_copies(const std::function<void()>& alive) {
    const cuda::Event copied = experts_->device().record(cuda::Queue::Compute);
    wait(
        "a copy", [&] { return experts_->device().reached(copied); }, alive);
  }

  cuda::DeviceExperts::Wait patiently(const char* what, std::function<void()> alive) {
    return [this, what, alive = std::move(alive)](const auto& reached) { wait(what, reached, alive); };
  }

  /// Polls the device: without a pause for the first moments (a decode step takes tens of microseconds), then
  /// politely.
  template <class Ready>
  void wait(const char* what, const Ready& ready, const std::function<void()>& alive) {
    constexpr std::uint64_t kBusyNs = 2'000'000, kAliveNs = 200'000'000;
    // A device that is asked rarely is not blamed: this process may have been stopped, and an emulated device
    // works while it is asked.
    constexpr std::uint64_t kAskedAtLeast = 1000;
    const auto hang_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(hang_after_).count());
    const std::uint64_t begin = monotonic_ns();
    std::uint64_t last_alive = begin, asked = 0;
    while (!ready()) {
      const std::uint64_t now = monotonic_ns();
      if (now - last_alive > kAliveNs) {
        alive();
        last_alive = now;
      }
      if (now - begin > hang_ns && ++asked > kAskedAtLeast) {
        experts_->abandon();
        experts_.reset();
        throw ResourceError(
            fmt::format("{} hangs: it has not finished {} for {:.3g} s; the kernel log "
                        "(dmesg) names the Xid if the device itself failed",
                        name_, what, static_cast<double>(hang_ns) * 1e-9));
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
  const std::chrono::milliseconds hang_after_;
  std::string name_;
  std::unique_ptr<cuda::Device> device_;  // until load()
  std::vector<cuda::ExpertKey> owned_;
  std::unique_ptr<cuda::DeviceExperts> experts_;  // from load() on
  // Pinned, for what of messages on the device goes through the host; empty: they lie in host memory.
  std::span<std::byte> ends_;
  std::vector<std::size_t> first_route_, next_;
  std::vector<std::uint32_t> rows_, outputs_;
  std::vector<float> weights_;
  std::vector<cuda::DeviceExpertTask> tasks_;
};

}  // namespace

std::string describe_gpu(const cuda::Device& device) {
  return fmt::format("GPU {} ({})", device.description().index, device.description().name);
}

std::string GpuMemoryPlan::describe() const {
  const std::uint64_t each = owned_experts == 0 ? 0 : owned_bytes / owned_experts;
  std::string text = fmt::format("{} of {} experts ({} of {}) stay on the GPU", resident_experts,
                                 owned_experts, size_text(each * resident_experts), size_text(owned_bytes));
  if (resident_experts == owned_experts) return text;
  text += fmt::format(", {} in pinned host memory", pinned_experts);
  if (resident_experts + pinned_experts < owned_experts) text += ", the others are read on demand";
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
  plan.options.in_place = options.messages_on_device;
  if (options.messages_on_device)
    plan.message_bytes =
        kCallsInFlight * (wire::RequestLayout(limits.max_rows, limits.max_routes, limits.dim).bytes +
                          wire::ReplyLayout(limits.max_routes, limits.dim).bytes);
  plan.options.slots = plan.options.pinned_slots = 0;
  const cuda::DeviceMemoryPlan bare = cuda::DeviceMemoryPlan::of(plan.options);
  const std::uint64_t workspace_bytes = bare.workspace_bytes + plan.message_bytes;

  if (options.device_bytes > free_device_bytes)
    throw ResourceError(fmt::format(
        "--expert-memory asks for {} of GPU memory, {} are free{}: ask for less",
        size_text(options.device_bytes), size_text(free_device_bytes),
        options.sharers > 1 ? fmt::format(" for each of the {} ranks that share it", options.sharers) : ""));
  const std::uint64_t reserve = std::min(kReserveBytes, free_device_bytes / 16);
  const std::uint64_t budget = options.device_bytes != 0 ? options.device_bytes : free_device_bytes - reserve;
  if (budget < workspace_bytes + bare.expert_bytes)
    throw ResourceError(fmt::format(
        "{} of GPU memory are not enough: {} rows per step need {} of workspace, and each expert {} "
        "(free {}; {}lower the rows per step with --chunk or --step-tokens)",
        size_text(budget), limits.max_rows, size_text(workspace_bytes), size_text(bare.expert_bytes),
        size_text(free_device_bytes), options.device_bytes != 0 ? "raise --expert-memory, or " : ""));
  const std::uint64_t fitting = (budget - workspace_bytes) / bare.expert_bytes;
  plan.owned_experts = owned_experts;
  plan.owned_bytes = owned_experts * geometry.expert_bytes();
  plan.resident_experts = std::min(owned_experts, fitting);
  plan.options.slots = static_cast<std::uint32_t>(std::max<std::uint64_t>(plan.resident_experts, 1));
  const std::uint64_t left = owned_experts - plan.resident_experts;
  // Two at least: one is read while the other is sent.
  plan.pinned_experts = std::min(left, options.pinned_bytes / bare.expert_bytes);
  plan.options.pinned_slots = static_cast<std::uint32_t>(std::max<std::uint64_t>(plan.pinned_experts, 2));
  const cuda::DeviceMemoryPlan whole = cuda::DeviceMemoryPlan::of(plan.options);
  plan.device_bytes = whole.device_bytes + plan.message_bytes;
  plan.host_bytes = whole.pinned_bytes;
  return plan;
}

std::unique_ptr<ExpertEngine> gpu_engine(std::unique_ptr<cuda::Device> device, ExpertSource& source,
                                         const Placement* placement, std::uint32_t owner,
                                         const ExpertLimits& limits, const GpuEngineOptions& options,
                                         GpuMemoryPlan* planned) {
  std::vector<cuda::ExpertKey> keys;
  const ExpertGeometry& geometry = source.geometry();
  for (std::uint32_t block = 0; block < geometry.experts_per_block.size(); ++block)
    for (std::uint32_t expert = 0; expert < geometry.experts_per_block[block]; ++expert)
      if (placement == nullptr || placement->owner(block, expert) == owner) keys.push_back({block, expert});
  return on_device([&]() -> std::unique_ptr<ExpertEngine> {
    const std::uint64_t free = device->free_bytes() / std::max(options.sharers, 1u);
    const GpuMemoryPlan plan = plan_gpu_memory(geometry, limits, keys.size(), free, options);
    if (planned != nullptr) *planned = plan;
    return std::make_unique<GpuEngine>(std::move(device), source, std::move(keys), plan, options.hang_after);
  });
}

}  // namespace dsv41
