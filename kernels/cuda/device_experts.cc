// Residency and launches of DeviceExperts. Everything here is host code over device.h.
#include "kernels/cuda/device_experts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/slot_cache.h"
#include "kernels/threads.h"

namespace dsv41::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t align(std::size_t bytes) {
  return ceil_div(bytes, kAlignment) * kAlignment;
}

std::uint64_t number(ExpertKey key) {
  return std::uint64_t{key.block} << 32 | key.expert;
}

/// Where the six arrays of an expert lie in its slot.
struct SlotLayout {
  struct Part {
    std::size_t offset, bytes;
  };
  Part w1, w1_scales, w3, w3_scales, w2, w2_scales;
  std::size_t bytes = 0;

  SlotLayout(std::size_t dim, std::size_t inter) {
    const auto part = [this](std::size_t size) {
      const Part result{bytes, size};
      bytes += align(size);
      return result;
    };
    w1 = part(inter * dim / 2);
    w1_scales = part(inter * dim / kBlock);
    w3 = part(inter * dim / 2);
    w3_scales = part(inter * dim / kBlock);
    w2 = part(dim * inter / 2);
    w2_scales = part(dim * inter / kBlock);
  }
};

/// Whether all scale codes allow the fused multiply-add (launch.h).
bool is_regular(const std::uint8_t* scales, std::size_t count) {
  std::uint8_t low = 255, high = 0;
  for (std::size_t i = 0; i < count; ++i) {
    low = std::min(low, scales[i]);
    high = std::max(high, scales[i]);
  }
  return low >= kRegularWeightLow && high <= kRegularWeightHigh;
}

constexpr std::size_t expanded_bytes(std::size_t rows, std::size_t blocks) {
  return align(rows * blocks * 64) + align(rows * blocks * 32) + align(rows * blocks * sizeof(BlockScale));
}
Expanded expanded_at(std::byte* memory, std::size_t rows, std::size_t blocks) {
  std::byte* const top = memory + align(rows * blocks * 64);
  return {reinterpret_cast<std::uint8_t*>(memory), reinterpret_cast<std::uint8_t*>(top),
          reinterpret_cast<BlockScale*>(top + align(rows * blocks * 32))};
}

/// Descriptors of a call's launches, at most: one task and one row tile per route, and per launch the
/// counters and the alignment of seven arrays.
constexpr std::size_t descriptor_bytes(std::size_t routes) {
  return align(routes * (sizeof(DeviceTask) + sizeof(RowTile) + 4 * sizeof(std::uint32_t))) +
         (routes + 1) * 8 * kAlignment;
}

}  // namespace

DeviceMemoryPlan DeviceMemoryPlan::of(const DeviceExpertsOptions& options) {
  const std::size_t dim = options.dim, inter = options.inter, rows = options.max_rows,
                    routes = options.max_routes;
  const std::size_t input = options.in_place ? 0 : align(rows * dim) + align(rows * dim / kBlock);
  const std::size_t output = options.in_place ? 0 : align(routes * dim * sizeof(BFloat16));
  DeviceMemoryPlan plan;
  plan.expert_bytes = SlotLayout(dim, inter).bytes;
  plan.workspace_bytes = input + descriptor_bytes(routes) + expanded_bytes(rows, dim / kBlock) +
                         expanded_bytes(routes, inter / kBlock) + output;
  plan.device_bytes = plan.workspace_bytes + options.slots * plan.expert_bytes;
  plan.pinned_bytes = input + descriptor_bytes(routes) + output + options.pinned_slots * plan.expert_bytes;
  return plan;
}

struct DeviceExperts::Implementation {
  struct Resident {
    Event used = 0;  // behind the last launch that reads the slot
    bool regular1 = false, regular3 = false, regular2 = false;
  };
  struct Pinned {
    Event sent = 0;  // behind the last upload from the slot
    bool regular1 = false, regular3 = false, regular2 = false;
  };

  std::unique_ptr<Device> device;
  DeviceExpertsOptions options;
  Source source;
  SlotLayout layout;
  ThreadPool threads;
  SlotCache on_device, in_pinned;
  std::vector<Resident> resident;
  std::vector<Pinned> pinned;
  DeviceBuffer slots, pinned_slots, workspace, staging;
  std::vector<DeviceBuffer> of_caller;
  // Offsets of the parts of `workspace`; `staging` mirrors what precedes x_at, and its outputs follow. Codes
  // and outputs have no bytes in calls that work in place.
  std::size_t scales_at, descriptors_at, x_at, hidden_at, outputs_at, staged_outputs_at;
  std::size_t descriptors_used = 0;
  DeviceExpertsCounters counters;

  // The call under way, or the last one.
  std::vector<std::pair<Event, Event>> timed;  // around its launches
  bool busy = false;
  Event done = 0;
  std::size_t routes = 0;       // launched so far
  BFloat16* outputs = nullptr;  // on the device

  Implementation(std::unique_ptr<Device> owned, const DeviceExpertsOptions& chosen, Source from)
      : device(std::move(owned)),
        options(chosen),
        source(std::move(from)),
        layout(chosen.dim, chosen.inter),
        threads(std::max<std::size_t>(chosen.copy_threads, 1)),
        on_device(chosen.slots),
        in_pinned(chosen.pinned_slots),
        resident(chosen.slots),
        pinned(chosen.pinned_slots) {
    if (options.dim == 0 || options.inter == 0 || options.dim % kBlock != 0 || options.inter % kBlock != 0)
      throw std::invalid_argument("device experts: D and I must be multiples of 32");
    if (options.slots == 0 || options.pinned_slots < 2 || options.max_rows == 0 || options.max_routes == 0 ||
        options.dot_rows > kDotRows)
      throw std::invalid_argument("device experts: no slots, rows or routes, or too many dot4 rows");
    const std::uint32_t longest = std::max(options.dim, options.inter) / kBlock;
    for (const std::uint32_t example : {1u, rows_per_tile(Variant::Rows32)}) {
      const Variant variant = device->variant_for(example);
      const std::uint32_t shared = SharedLayout{rows_per_tile(variant), stages(variant)}.total(longest);
      if (shared > device->description().shared_bytes_per_block)
        throw std::invalid_argument("device experts: rows of " + std::to_string(longest * kBlock) + " need " +
                                    std::to_string(shared) + " bytes of shared memory, " +
                                    device->description().name + " has " +
                                    std::to_string(device->description().shared_bytes_per_block));
    }
    const DeviceMemoryPlan plan = DeviceMemoryPlan::of(options);
    const std::size_t rows = options.max_rows, blocks = options.dim / kBlock;
    scales_at = options.in_place ? 0 : align(rows * options.dim);
    descriptors_at = options.in_place ? 0 : scales_at + align(rows * blocks);
    x_at = descriptors_at + descriptor_bytes(options.max_routes);
    hidden_at = x_at + expanded_bytes(rows, blocks);
    outputs_at = hidden_at + expanded_bytes(options.max_routes, options.inter / kBlock);
    staged_outputs_at = x_at;
    workspace = DeviceBuffer(*device, DeviceBuffer::Kind::Device, plan.workspace_bytes);
    slots = DeviceBuffer(*device, DeviceBuffer::Kind::Device, options.slots * layout.bytes);
    const std::size_t slot_bytes = options.pinned_slots * layout.bytes;
    staging = DeviceBuffer(*device, DeviceBuffer::Kind::Pinned, plan.pinned_bytes - slot_bytes);
    pinned_slots = DeviceBuffer(*device, DeviceBuffer::Kind::Pinned, slot_bytes);
  }

  ~Implementation() {
    // Queued copies must not outlive the buffers.
    try {
      device->synchronize(device->record(Queue::Copy));
      device->synchronize(device->record(Queue::Compute));
    } catch (const DeviceError&) {  // a failed device has no queues to wait for
    }
  }

  void check(const Fp4Matrix& matrix, std::size_t n, std::size_t k, ExpertKey key) const {
    if (matrix.n == n && matrix.k == k) return;
    throw std::invalid_argument("device experts: expert " + std::to_string(key.expert) + " of block " +
                                std::to_string(key.block) + " has a matrix of " + std::to_string(matrix.n) +
                                " x " + std::to_string(matrix.k) + ", not " + std::to_string(n) + " x " +
                                std::to_string(k));
  }

  void wait_for(Event event, const Wait& wait) {
    if (!wait) return device->synchronize(event);
    wait([this, event] { return device->reached(event); });
  }

  /// The expert's slot in pinned memory, read from the source if it is not there.
  SlotCache::Slot read(ExpertKey key, const Wait& wait) {
    if (const auto found = in_pinned.find(number(key))) return *found;
    const ExpertMatrices matrices = source(key);
    check(matrices.w1, options.inter, options.dim, key);
    check(matrices.w3, options.inter, options.dim, key);
    check(matrices.w2, options.dim, options.inter, key);
    const SlotCache::Slot slot = in_pinned.place(number(key));
    wait_for(pinned[slot].sent, wait);
    std::byte* const target = pinned_slots.data() + slot * layout.bytes;
    const auto copy = [&](const SlotLayout::Part& part, const std::uint8_t* from) {
      constexpr std::size_t kGrain = std::size_t{1} << 20;
      threads.parallel_for(part.bytes, kGrain, [&](Range range) {
        std::memcpy(target + part.offset + range.begin, from + range.begin, range.size());
      });
      std::memset(target + part.offset + part.bytes, 0, align(part.bytes) - part.bytes);
    };
    copy(layout.w1, matrices.w1.codes);
    copy(layout.w1_scales, matrices.w1.scales);
    copy(layout.w3, matrices.w3.codes);
    copy(layout.w3_scales, matrices.w3.scales);
    copy(layout.w2, matrices.w2.codes);
    copy(layout.w2_scales, matrices.w2.scales);
    pinned[slot] = {0, is_regular(matrices.w1.scales, layout.w1_scales.bytes),
                    is_regular(matrices.w3.scales, layout.w3_scales.bytes),
                    is_regular(matrices.w2.scales, layout.w2_scales.bytes)};
    counters.bytes_read += layout.bytes;
    return slot;
  }

  /// Puts the expert on its way to a device slot; the copy queue runs ahead of what uses it.
  SlotCache::Slot upload(ExpertKey key, const Wait& wait) {
    const SlotCache::Slot from = read(key, wait);
    const SlotCache::Slot to = on_device.place(number(key));
    device->wait(Queue::Copy, resident[to].used);
    device->upload(Queue::Copy, slots.data() + to * layout.bytes, pinned_slots.data() + from * layout.bytes,
                   layout.bytes);
    pinned[from].sent = device->record(Queue::Copy);
    resident[to] = {0, pinned[from].regular1, pinned[from].regular3, pinned[from].regular2};
    counters.bytes_uploaded += layout.bytes;
    return to;
  }

  DeviceTask describe(SlotCache::Slot slot) const {
    const auto* const base = reinterpret_cast<const std::uint8_t*>(slots.data() + slot * layout.bytes);
    const Resident& state = resident[slot];
    return {{base + layout.w1.offset, base + layout.w1_scales.offset, options.inter, state.regular1},
            {base + layout.w3.offset, base + layout.w3_scales.offset, options.inter, state.regular3},
            {base + layout.w2.offset, base + layout.w2_scales.offset, options.dim, state.regular2},
            0,
            0};
  }

  /// One launch for tasks whose experts have the given slots; x lies on the device. The first launch of a
  /// call expands the activations.
  void launch(const QuantizedRows& x, std::span<const DeviceExpertTask* const> tasks,
              std::span<const SlotCache::Slot> places, float limit) {
    const bool first = routes == 0;
    std::size_t largest = 0, count = 0;
    for (const DeviceExpertTask* task : tasks) {
      largest = std::max(largest, task->rows.size());
      count += task->rows.size();
    }
    const Variant variant = device->variant_for(static_cast<std::uint32_t>(largest));
    const std::uint32_t tile_rows = rows_per_tile(variant);
    std::size_t tile_count = 0;
    for (const DeviceExpertTask* task : tasks) tile_count += ceil_div(task->rows.size(), tile_rows);

    // Descriptors and counters, one block of pinned memory that goes over in one copy.
    const std::size_t begin = descriptors_used;
    std::size_t end = begin;
    const auto array = [&](std::size_t bytes) {
      const std::size_t offset = end;
      end += align(bytes);
      return offset;
    };
    const std::size_t counters_at = array((2 + tile_count) * sizeof(std::uint32_t));
    const std::size_t tasks_at = array(tasks.size() * sizeof(DeviceTask));
    const std::size_t tiles_at = array(tile_count * sizeof(RowTile));
    const std::size_t rows_at = array(count * sizeof(std::uint32_t));
    const std::size_t weights_at = array(count * sizeof(float));
    const std::size_t destinations_at = array(count * sizeof(std::uint32_t));
    descriptors_used = end;
    const auto staged = [&](std::size_t offset) { return staging.data() + descriptors_at + offset; };
    const auto remote = [&](std::size_t offset) { return workspace.data() + descriptors_at + offset; };

    const std::uint32_t expand = expand_items(static_cast<std::uint32_t>(x.rows), options.dim);
    auto* const counts = reinterpret_cast<std::uint32_t*>(staged(counters_at));
    std::fill_n(counts, 2 + tile_count, 0u);
    if (!first) counts[0] = counts[1] = expand;
    auto* task_out = reinterpret_cast<DeviceTask*>(staged(tasks_at));
    auto* tile_out = reinterpret_cast<RowTile*>(staged(tiles_at));
    auto* row_out = reinterpret_cast<std::uint32_t*>(staged(rows_at));
    auto* weight_out = reinterpret_cast<float*>(staged(weights_at));
    auto* destination_out = reinterpret_cast<std::uint32_t*>(staged(destinations_at));
    std::uint32_t tile = 0, route = 0;
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      const auto size = static_cast<std::uint32_t>(tasks[t]->rows.size());
      DeviceTask description = describe(places[t]);
      description.first_tile = tile;
      description.tiles = static_cast<std::uint32_t>(ceil_div(size, tile_rows));
      task_out[t] = description;
      for (std::uint32_t done_rows = 0; done_rows < size; done_rows += tile_rows)
        tile_out[tile++] = {static_cast<std::uint32_t>(t), route + done_rows,
                            std::min(tile_rows, size - done_rows)};
      std::copy(tasks[t]->rows.begin(), tasks[t]->rows.end(), row_out + route);
      std::copy(tasks[t]->route_weights.begin(), tasks[t]->route_weights.end(), weight_out + route);
      std::copy(tasks[t]->outputs.begin(), tasks[t]->outputs.end(), destination_out + route);
      route += size;
    }
    device->upload(Queue::Compute, remote(begin), staged(begin), end - begin);

    const std::size_t inter_blocks = options.inter / kBlock;
    Expanded hidden = expanded_at(workspace.data() + hidden_at, options.max_routes, inter_blocks);
    hidden.digits += routes * inter_blocks * 64;
    hidden.top += routes * inter_blocks * 32;
    hidden.scales += routes * inter_blocks;
    const ExpertLaunch parameters{
        .dim = options.dim,
        .inter = options.inter,
        .rows = static_cast<std::uint32_t>(x.rows),
        .tiles = tile,
        .dot_rows = options.dot_rows,
        .limit = limit,
        .codes = x.codes,
        .scales = x.scales,
        .tasks = reinterpret_cast<const DeviceTask*>(remote(tasks_at)),
        .row_tiles = reinterpret_cast<const RowTile*>(remote(tiles_at)),
        .route_rows = reinterpret_cast<const std::uint32_t*>(remote(rows_at)),
        .route_weights = reinterpret_cast<const float*>(remote(weights_at)),
        .route_outputs = reinterpret_cast<const std::uint32_t*>(remote(destinations_at)),
        .x = expanded_at(workspace.data() + x_at, options.max_rows, options.dim / kBlock),
        .hidden = hidden,
        .outputs = outputs,
        .ticket = reinterpret_cast<std::uint32_t*>(remote(counters_at)),
        .expanded = reinterpret_cast<std::uint32_t*>(remote(counters_at)) + 1,
        .finished = reinterpret_cast<std::uint32_t*>(remote(counters_at)) + 2,
    };
    const Event before = options.time_launches ? device->record(Queue::Compute) : 0;
    device->launch(parameters, variant);
    const Event event = device->record(Queue::Compute);
    if (options.time_launches) timed.emplace_back(before, event);
    for (const SlotCache::Slot slot : places) resident[slot].used = event;
    routes += count;
    ++counters.launches;
  }

  /// Checks a call; returns the number of its routes.
  std::size_t check(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks) const {
    std::size_t total = 0;
    for (const DeviceExpertTask& task : tasks) {
      if (task.rows.size() != task.route_weights.size() || task.rows.size() != task.outputs.size())
        throw std::invalid_argument("device experts: a task's lists differ in length");
      total += task.rows.size();
    }
    const auto inside = [](const char* what, std::span<const std::uint32_t> numbers, std::size_t count) {
      for (const std::uint32_t number : numbers)
        if (number >= count)
          throw std::invalid_argument("device experts: a task names " + std::string(what) + " " +
                                      std::to_string(number) + " of " + std::to_string(count));
    };
    for (const DeviceExpertTask& task : tasks) {
      inside("row", task.rows, x.rows);
      inside("output row", task.outputs, total);
    }
    if (x.k != options.dim || x.rows > options.max_rows || total > options.max_routes)
      throw std::invalid_argument("device experts: a call of " + std::to_string(x.rows) + " rows and " +
                                  std::to_string(total) + " routes, sized for " +
                                  std::to_string(options.max_rows) + " and " +
                                  std::to_string(options.max_routes));
    return total;
  }

  void start(BFloat16* into, bool in_place) {
    if (busy) throw std::logic_error("device experts: a call is under way");
    if (in_place != options.in_place)
      throw std::logic_error("device experts: rows in the memory of the other side");
    busy = true;
    routes = descriptors_used = 0;
    outputs = into;
    timed.clear();
  }

  void begin(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks, float limit,
             const std::function<void()>& alive, const Wait& wait) {
    const std::size_t total = check(x, tasks);
    start(reinterpret_cast<BFloat16*>(workspace.data() + outputs_at), false);
    if (total > 0) {
      const std::size_t scale_bytes = x.rows * (x.k / kBlock);
      std::memcpy(staging.data(), x.codes, x.rows * x.k);
      std::memcpy(staging.data() + scales_at, x.scales, scale_bytes);
      device->upload(Queue::Compute, workspace.data(), staging.data(), scales_at + scale_bytes);
      const auto* const codes = reinterpret_cast<const std::uint8_t*>(workspace.data());
      run({codes, codes + scales_at, x.rows, x.k}, tasks, limit, alive, wait);
      device->download(Queue::Compute, staging.data() + staged_outputs_at, workspace.data() + outputs_at,
                       total * options.dim * sizeof(BFloat16));
    }
    done = device->record(Queue::Compute);
  }

  void begin_in_place(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks, float limit,
                      BFloat16* into, const std::function<void()>& alive, const Wait& wait) {
    const std::size_t total = check(x, tasks);
    start(into, true);
    if (total > 0) run(x, tasks, limit, alive, wait);
    done = device->record(Queue::Compute);
  }

  /// Experts that are there first, in one launch; meanwhile the others are read and uploaded, in groups as
  /// large as pinned memory holds at a time.
  void run(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks, float limit,
           const std::function<void()>& alive, const Wait& wait) {
    std::vector<const DeviceExpertTask*> present, missing;
    std::vector<SlotCache::Slot> places;
    for (const DeviceExpertTask& task : tasks) {
      if (task.rows.empty()) continue;
      if (const auto slot = on_device.find(number(task.key))) {
        present.push_back(&task);
        places.push_back(*slot);
      } else {
        missing.push_back(&task);
      }
    }
    counters.hits += present.size();
    counters.misses += missing.size();
    if (!present.empty()) launch(x, present, places, limit);
    const std::size_t group = std::min(options.slots, options.pinned_slots);
    for (std::size_t next = 0; next < missing.size(); next += group) {
      const auto part = std::span(missing).subspan(next, std::min(group, missing.size() - next));
      places.clear();
      for (const DeviceExpertTask* task : part) {
        const auto there = on_device.find(number(task->key));  // two tasks may name one expert
        places.push_back(there ? *there : upload(task->key, wait));
        if (alive) alive();
      }
      device->wait(Queue::Compute, device->record(Queue::Copy));
      launch(x, part, places, limit);
    }
  }
};

DeviceExperts::DeviceExperts(std::unique_ptr<Device> device, const DeviceExpertsOptions& options,
                             Source source)
    : implementation_(std::make_unique<Implementation>(std::move(device), options, std::move(source))) {}
DeviceExperts::~DeviceExperts() = default;

std::span<std::byte> DeviceExperts::allocate(DeviceBuffer::Kind kind, std::size_t bytes) {
  const DeviceBuffer& buffer = implementation_->of_caller.emplace_back(*implementation_->device, kind, bytes);
  return {buffer.data(), buffer.size()};
}

void DeviceExperts::load(std::span<const ExpertKey> keys,
                         const std::function<void(std::uint64_t, std::uint64_t)>& progress,
                         const Wait& wait) {
  Implementation& self = *implementation_;
  const std::size_t uploads = std::min<std::size_t>(keys.size(), self.options.slots - self.on_device.used());
  const std::size_t reads = std::min<std::size_t>(keys.size() - uploads, self.options.pinned_slots);
  const std::uint64_t total = (uploads + reads) * self.layout.bytes;
  for (std::size_t i = 0; i < uploads + reads; ++i) {
    if (self.on_device.contains(number(keys[i]))) continue;
    if (i < uploads)
      self.upload(keys[i], wait);
    else
      self.read(keys[i], wait);
    if (progress) progress((i + 1) * self.layout.bytes, total);
  }
  self.wait_for(self.device->record(Queue::Copy), wait);
}

void DeviceExperts::begin(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks, float swiglu_limit,
                          const std::function<void()>& alive, const Wait& wait) {
  implementation_->begin(x, tasks, swiglu_limit, alive, wait);
}

void DeviceExperts::begin_in_place(const QuantizedRows& x, std::span<const DeviceExpertTask> tasks,
                                   float swiglu_limit, BFloat16* outputs, const std::function<void()>& alive,
                                   const Wait& wait) {
  implementation_->begin_in_place(x, tasks, swiglu_limit, outputs, alive, wait);
}

bool DeviceExperts::ready() {
  return implementation_->device->reached(implementation_->done);
}

void DeviceExperts::finish(std::span<BFloat16> outputs) {
  Implementation& self = *implementation_;
  if (!self.busy) throw std::logic_error("device experts: no call is under way");
  self.busy = false;
  self.device->synchronize(self.done);
  const std::size_t values = self.options.in_place ? 0 : self.routes * self.options.dim;
  if (outputs.size() < values)
    throw std::invalid_argument("device experts: outputs for " +
                                std::to_string(outputs.size() / self.options.dim) + " routes of " +
                                std::to_string(self.routes));
  if (values > 0)
    std::memcpy(outputs.data(), self.staging.data() + self.staged_outputs_at, values * sizeof(BFloat16));
}

void DeviceExperts::abandon() noexcept {
  // Reachable until the process ends: what a device may still write to is never given back.
  static auto* const abandoned = new std::vector<Implementation*>();
  abandoned->push_back(implementation_.release());
}

float DeviceExperts::launch_ms() {
  float sum = 0;
  for (const auto& [from, to] : implementation_->timed) sum += implementation_->device->elapsed_ms(from, to);
  return sum;
}

const DeviceExpertsCounters& DeviceExperts::counters() const {
  return implementation_->counters;
}
Device& DeviceExperts::device() {
  return *implementation_->device;
}

}  // namespace dsv41::cuda
