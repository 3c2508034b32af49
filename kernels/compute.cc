// Operations spread over threads (kernels/compute.h). Work is split over output features or rows, never
// inside a sum.
#include "kernels/compute.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace dsv41 {
namespace {

constexpr std::size_t kFeatureGrain =
    kBlock;  // a tile of FP8 weights shares its scale; a block shares codes' scale
constexpr std::size_t kSerialElements = 1
                                        << 15;  // below this many activations a loop costs more than it saves

/// How many rows to give one thread at a time.
std::size_t row_grain(std::size_t k) {
  return std::max<std::size_t>(1, kSerialElements / 4 / std::max<std::size_t>(k, 1));
}

/// How many features to give one thread at a time where every range prepares the activations anew, which for
/// many rows costs as much as some tens of features: ranges are long then, a few for every thread.
std::size_t feature_grain(std::size_t features, std::size_t rows, std::size_t threads) {
  constexpr std::size_t kManyRows = 4, kLongRange = 512;
  if (rows < kManyRows) return kFeatureGrain;
  const std::size_t ranges =
      std::clamp(features / kLongRange / threads, std::size_t{1}, std::size_t{4}) * threads;
  return ceil_div(ceil_div(features, ranges), kFeatureGrain) * kFeatureGrain;
}

QuantizedRows named(QuantizedRows x) {
  if (x.name == 0) x.name = Compute::new_name();
  return x;
}

bool consecutive(std::span<const std::uint32_t> indices) {
  for (std::size_t i = 1; i < indices.size(); ++i)
    if (indices[i] != indices[0] + i) return false;
  return true;
}

}  // namespace

/// Buffers of one experts() call, kept between calls. Routes of all tasks stand one after another.
struct Compute::ExpertScratch {
  struct Task {
    QuantizedRows x;                // gathered, or in place when the rows are consecutive
    std::uint64_t hidden_name = 0;  // QuantizedRows::name
    std::size_t first_route = 0;    // of all routes
    std::size_t hidden_begin = 0;   // elements before this task's [routes, I] part of the buffers below
    std::size_t result_begin = 0;   // elements before its [routes, D] part of `results`
    std::size_t up_units = 0,
                down_units = 0;  // blocks of features before this task, in the first and second loop
    BFloat16* result = nullptr;  // [routes, D], in `results` or in the caller's outputs
  };
  std::vector<Task> tasks;
  std::vector<std::uint8_t> codes, scales;
  std::vector<BFloat16> gate, up, hidden;
  std::vector<std::uint8_t> hidden_codes, hidden_scales;
  std::vector<BFloat16> results;

  template <class T>
  static void reserve(std::vector<T>& buffer, std::size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }

  /// Calls body(task index, Range of features) for the blocks of `units`, which number the blocks of all
  /// tasks.
  template <class Body>
  void for_each_task(Range units, std::size_t Task::*units_before, std::span<const ExpertTask> sources,
                     std::size_t (*features)(const ExpertTask&), const Body& body) const {
    const auto after =
        std::upper_bound(tasks.begin(), tasks.end(), units.begin,
                         [=](std::size_t unit, const Task& task) { return unit < task.*units_before; });
    for (std::size_t t = static_cast<std::size_t>(after - tasks.begin()) - 1; t < tasks.size(); ++t) {
      const std::size_t before = tasks[t].*units_before;
      if (before >= units.end) break;
      const std::size_t begin = (std::max(units.begin, before) - before) * kFeatureGrain;
      const std::size_t end = std::min((units.end - before) * kFeatureGrain, features(sources[t]));
      if (begin < end) body(t, Range{begin, end});
    }
  }
};

Compute::Compute(const Ops& ops, std::size_t threads)
    : ops_(ops), pool_(threads), scratch_(std::make_shared<ExpertScratch>()) {}

std::uint64_t Compute::new_name() {
  static std::atomic<std::uint64_t> names{0};
  return ++names;
}

void Compute::quantize_rows(std::span<const BFloat16> x, std::size_t k, std::span<std::uint8_t> codes,
                            std::span<std::uint8_t> scales) {
  if (x.empty()) return;
  pool_.parallel_for(x.size() / k, row_grain(k), [&](Range rows) {
    ops_.quantize_rows(x.data() + rows.begin * k, rows.size(), k, codes.data() + rows.begin * k,
                       scales.data() + rows.begin * (k / kBlock));
  });
}

void Compute::linear(const QuantizedRows& x, const Fp8Matrix& w, std::span<BFloat16> out) {
  const QuantizedRows rows = named(x);
  pool_.parallel_for(w.n, kFeatureGrain,
                     [&](Range features) { ops_.linear_fp8(rows, w, features, out.data()); });
}

void Compute::linear(const QuantizedRows& x, const Fp4Matrix& w, std::span<BFloat16> out) {
  const QuantizedRows rows = named(x);
  pool_.parallel_for(w.n, kFeatureGrain,
                     [&](Range features) { ops_.linear_fp4(rows, w, features, out.data()); });
}

void Compute::linear(std::span<const BFloat16> x, const Bf16Matrix& w, std::span<BFloat16> out) {
  pool_.parallel_for(w.n, feature_grain(w.n, x.size() / w.k, pool_.size()), [&](Range features) {
    ops_.linear_bf16(x.data(), x.size() / w.k, w.k, w, features, out.data());
  });
}

void Compute::linear_wide(std::span<const BFloat16> x, const Bf16Matrix& w, std::span<float> out) {
  pool_.parallel_for(w.n, feature_grain(w.n, x.size() / w.k, pool_.size()), [&](Range features) {
    ops_.linear_wide(x.data(), x.size() / w.k, w, features, out.data());
  });
}

void Compute::rms_norm(std::span<const BFloat16> x, std::span<const BFloat16> weight, float eps,
                       std::span<BFloat16> out) {
  const std::size_t k = weight.size();
  if (x.empty()) return;
  pool_.parallel_for(x.size() / k, row_grain(k), [&](Range rows) {
    ops_.rms_norm(x.data() + rows.begin * k, weight.data(), eps, rows.size(), k, out.data() + rows.begin * k);
  });
}

void Compute::experts(const QuantizedRows& x, std::span<const ExpertTask> tasks, float swiglu_limit,
                      std::span<BFloat16> outputs) {
  ExpertScratch& scratch = *scratch_;
  const std::size_t dim = x.k, dim_blocks = dim / kBlock;

  // Where each task's routes lie in the buffers.
  scratch.tasks.resize(tasks.size());
  std::size_t routes = 0, hidden_size = 0, result_size = 0, up_units = 0, down_units = 0;
  for (std::size_t t = 0; t < tasks.size(); ++t) {
    const ExpertTask& task = tasks[t];
    ExpertScratch::Task& place = scratch.tasks[t];
    place.first_route = routes;
    place.hidden_begin = hidden_size;
    place.result_begin = result_size;
    place.up_units = up_units;
    place.down_units = down_units;
    place.hidden_name = new_name();
    routes += task.rows.size();
    hidden_size += task.rows.size() * task.weights.w1.n;
    result_size += task.rows.size() * task.weights.w2.n;
    up_units += ceil_div(task.weights.w1.n, kFeatureGrain);
    down_units += ceil_div(task.weights.w2.n, kFeatureGrain);
  }
  ExpertScratch::reserve(scratch.codes, routes * dim);
  ExpertScratch::reserve(scratch.scales, routes * dim_blocks);
  ExpertScratch::reserve(scratch.gate, hidden_size);
  ExpertScratch::reserve(scratch.up, hidden_size);
  ExpertScratch::reserve(scratch.hidden, hidden_size);
  ExpertScratch::reserve(scratch.hidden_codes, hidden_size);
  ExpertScratch::reserve(scratch.hidden_scales, hidden_size / kBlock);
  ExpertScratch::reserve(scratch.results, result_size);

  // Rows of a task must stand one after another; at one row they already do.
  for (std::size_t t = 0; t < tasks.size(); ++t) {
    const ExpertTask& task = tasks[t];
    ExpertScratch::Task& place = scratch.tasks[t];
    place.x = {};
    place.result = scratch.results.data() + place.result_begin;
    if (task.rows.empty()) continue;
    if (consecutive(task.outputs)) place.result = outputs.data() + task.outputs[0] * task.weights.w2.n;
    if (consecutive(task.rows)) {
      place.x = {x.codes + task.rows[0] * dim, x.scales + task.rows[0] * dim_blocks, task.rows.size(), dim};
      const QuantizedRows& before = scratch.tasks[t > 0 ? t - 1 : 0].x;
      const bool same = t > 0 && before.codes == place.x.codes && before.rows == place.x.rows;
      place.x.name = same ? before.name : new_name();
      continue;
    }
    std::uint8_t* const codes = scratch.codes.data() + place.first_route * dim;
    std::uint8_t* const scales = scratch.scales.data() + place.first_route * dim_blocks;
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      std::memcpy(codes + r * dim, x.codes + task.rows[r] * dim, dim);
      std::memcpy(scales + r * dim_blocks, x.scales + task.rows[r] * dim_blocks, dim_blocks);
    }
    place.x = {codes, scales, task.rows.size(), dim, new_name()};
  }

  // First loop: w1, w3, activation and its quantization. A unit is a block of 32 hidden features, which share
  // a scale.
  pool_.parallel_for(up_units, 1, [&](Range units) {
    scratch.for_each_task(
        units, &ExpertScratch::Task::up_units, tasks,
        [](const ExpertTask& task) { return task.weights.w1.n; },
        [&](std::size_t t, Range features) {
          const ExpertTask& task = tasks[t];
          const ExpertScratch::Task& place = scratch.tasks[t];
          const std::size_t inner = task.weights.w1.n;
          if (task.rows.empty()) return;
          ops_.linear_fp4(place.x, task.weights.w1, features, scratch.gate.data() + place.hidden_begin);
          ops_.linear_fp4(place.x, task.weights.w3, features, scratch.up.data() + place.hidden_begin);
          for (std::size_t r = 0; r < task.rows.size(); ++r) {
            const std::size_t at = place.hidden_begin + r * inner + features.begin;
            ops_.swiglu(scratch.gate.data() + at, scratch.up.data() + at, task.route_weights[r], swiglu_limit,
                        features.size(), scratch.hidden.data() + at);
            ops_.quantize_rows(scratch.hidden.data() + at, 1, features.size(),
                               scratch.hidden_codes.data() + at, scratch.hidden_scales.data() + at / kBlock);
          }
        });
  });

  // Second loop: w2.
  pool_.parallel_for(down_units, 1, [&](Range units) {
    scratch.for_each_task(
        units, &ExpertScratch::Task::down_units, tasks,
        [](const ExpertTask& task) { return task.weights.w2.n; },
        [&](std::size_t t, Range features) {
          const ExpertTask& task = tasks[t];
          const ExpertScratch::Task& place = scratch.tasks[t];
          const std::size_t inner = task.weights.w2.k, out_dim = task.weights.w2.n;
          if (task.rows.empty()) return;
          const QuantizedRows hidden{scratch.hidden_codes.data() + place.hidden_begin,
                                     scratch.hidden_scales.data() + place.hidden_begin / kBlock,
                                     task.rows.size(), inner, place.hidden_name};
          ops_.linear_fp4(hidden, task.weights.w2, features, place.result);
          if (place.result != scratch.results.data() + place.result_begin) return;
          for (std::size_t r = 0; r < task.rows.size(); ++r)
            std::copy_n(place.result + r * out_dim + features.begin, features.size(),
                        outputs.data() + task.outputs[r] * out_dim + features.begin);
        });
  });
}

}  // namespace dsv41
