// dsv41-bench-gpu: how fast a GPU computes routed experts of the released size, as a fraction of what a
// device copy moves in the same run, for several rows per expert; and what the exchange of a layer with a GPU
// rank adds to that (docs/cuda.md, "Measuring"). Random weights: no checkpoint is needed.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <vector>

#include "benchmarks/gpu/layer_exchange.h"
#include "kernels/cuda/device_experts.h"
#include "kernels/cuda/emulated_device.h"
#include "runtime/gpu_engine.h"

namespace dsv41 {
namespace {

struct Options {
  int device = 0;
  bool emulated = false;
  std::uint32_t dim = 5120, inter = 2304;  // the released D and I
  std::uint32_t experts = 24;  // resident; calls go round, so that weights come from memory, not from a cache
  std::uint32_t per_call = 6;  // experts of one call
  std::vector<std::uint32_t> rows = {1, 2, 4, 8, 32, 128, 512};
  std::uint32_t repeats = 30;
  std::string json;
};

constexpr double kLayers = 40;  // of the released model, each with one such call per step

constexpr const char* kUsage =
    "usage: dsv41-bench-gpu [--device N] [--json FILE] [--rows 1,2,…] [--repeats N] [--experts N] "
    "[--per-call N]\n"
    "                       [--dim D] [--inter I] [--emulated]\n";

std::uint32_t number(std::string_view text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw std::invalid_argument(fmt::format("not a number: {}", text));
  return value;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string_view flag = arguments[i];
    if (flag == "--emulated") {
      options.emulated = true;
      continue;
    }
    if (i + 1 == count) throw std::invalid_argument(fmt::format("{} needs a value, or is unknown", flag));
    const std::string_view value = arguments[++i];
    if (flag == "--device")
      options.device = static_cast<int>(number(value));
    else if (flag == "--dim")
      options.dim = number(value);
    else if (flag == "--inter")
      options.inter = number(value);
    else if (flag == "--experts")
      options.experts = number(value);
    else if (flag == "--per-call")
      options.per_call = number(value);
    else if (flag == "--repeats")
      options.repeats = number(value);
    else if (flag == "--json")
      options.json = value;
    else if (flag == "--rows") {
      options.rows.clear();
      for (std::string_view rest = value;; rest.remove_prefix(rest.find(',') + 1)) {
        options.rows.push_back(number(rest.substr(0, rest.find(','))));
        if (rest.find(',') == std::string_view::npos) break;
      }
    } else {
      throw std::invalid_argument(fmt::format("unknown option {}", flag));
    }
  }
  if (options.per_call == 0 || options.experts < options.per_call || options.repeats == 0 ||
      std::find(options.rows.begin(), options.rows.end(), 0u) != options.rows.end())
    throw std::invalid_argument(
        "rows, repeats and experts must be positive, and experts at least the experts of a call");
  return options;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// GB/s that a copy inside device memory moves, reads and writes counted.
double copy_bandwidth(cuda::Device& device, std::size_t bytes, std::uint32_t repeats) {
  using Kind = cuda::DeviceBuffer::Kind;
  const cuda::DeviceBuffer from(device, Kind::Device, bytes), to(device, Kind::Device, bytes);
  std::vector<double> times;
  for (std::uint32_t i = 0; i < repeats + 2; ++i) {
    const cuda::Event before = device.record(cuda::Queue::Compute);
    device.copy(cuda::Queue::Compute, to.data(), from.data(), bytes);
    const cuda::Event after = device.record(cuda::Queue::Compute);
    device.synchronize(after);
    if (i >= 2) times.push_back(device.elapsed_ms(before, after));
  }
  return 2.0 * static_cast<double>(bytes) / median(times) / 1e6;
}

/// One expert's bytes for all: the kernels do not look at values, and calls find every expert at another
/// address.
struct RandomExpert {
  std::vector<std::uint8_t> codes, scales;
  RandomExpert(std::size_t values, std::mt19937_64& generator) : codes(values / 2), scales(values / kBlock) {
    for (auto& code : codes) code = static_cast<std::uint8_t>(generator());
    for (auto& scale : scales) scale = static_cast<std::uint8_t>(118 + generator() % 6);
  }
};

/// Median kernel time in us, by path and rows.
using KernelTimes = std::map<std::pair<bool, std::uint32_t>, double>;

/// The same calls from the host's side, beside the kernel times that were measured before.
nlohmann::ordered_json run_exchange(const Options& options, const ExpertMatrices& matrices,
                                    const QuantizedRows& x, const KernelTimes& kernels) {
  const bench::LayerShape shape{options.dim, options.inter, options.experts, options.per_call,
                                static_cast<std::uint32_t>(x.rows)};
  bench::LayerExchange exchange(
      [&] { return options.emulated ? cuda::emulated_device() : cuda::open_device(options.device); }, shape,
      matrices);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  fmt::print(
      "\nlayer exchange: one host and one expert rank as threads, messages staged; a step has {} layers\n"
      "{:>5} {:>11} {:>10} {:>8} {:>10} {:>9} {:>8} {:>14}\n",
      kLayers, "rows", "exchange us", "p90 us", "rank us", "kernel us", "added us", "added", "ms per step");
  for (const std::uint32_t rows : options.rows) {
    const bench::LayerTimes times = exchange.time({x.codes, x.scales, rows, x.k}, options.repeats);
    const double kernel = kernels.at({rows <= GpuEngineOptions().dot_rows, rows});
    const double added = times.exchange - kernel, step_ms = times.exchange * kLayers * 1e-3;
    fmt::print("{:>5} {:>11.1f} {:>10.1f} {:>8.1f} {:>10.1f} {:>9.1f} {:>7.0f}% {:>14.2f}\n", rows,
               times.exchange, times.exchange_p90, times.rank, kernel, added, 100.0 * added / kernel,
               step_ms);
    results.push_back({{"rows", rows},
                       {"exchange_us", times.exchange},
                       {"exchange_p90_us", times.exchange_p90},
                       {"rank_us", times.rank},
                       {"kernel_us", kernel},
                       {"exchange_over_kernel_us", added},
                       {"ms_per_step", step_ms}});
  }
  return results;
}

int run(const Options& options) {
  std::unique_ptr<cuda::Device> device;
  if (options.emulated) {
    device = cuda::emulated_device();
  } else {
    const cuda::Discovery found = cuda::discover_devices();
    if (found.devices.empty()) {
      fmt::print(stderr, "dsv41-bench-gpu: {}\n", found.why_none);
      return 4;
    }
    device = cuda::open_device(options.device);
  }
  const cuda::DeviceDescription description = device->description();
  const double copy = options.emulated ? 0.0 : copy_bandwidth(*device, std::size_t{1} << 30, options.repeats);

  std::mt19937_64 generator(1);
  const RandomExpert weights(std::size_t{3} * options.dim * options.inter, generator);
  const std::size_t values = std::size_t{options.dim} * options.inter;
  const auto matrix = [&](std::size_t which, std::size_t n, std::size_t k) {
    return Fp4Matrix{weights.codes.data() + which * values / 2,
                     weights.scales.data() + which * values / kBlock, n, k};
  };
  const ExpertMatrices matrices{matrix(0, options.inter, options.dim), matrix(1, options.inter, options.dim),
                                matrix(2, options.dim, options.inter)};

  const std::uint32_t most = *std::max_element(options.rows.begin(), options.rows.end());
  cuda::DeviceExpertsOptions sizes;
  sizes.dim = options.dim;
  sizes.inter = options.inter;
  sizes.max_rows = most;
  sizes.max_routes = most * options.per_call;
  sizes.slots = options.experts;
  sizes.time_launches = !options.emulated;

  std::vector<std::uint8_t> codes(std::size_t{most} * options.dim), scales(codes.size() / kBlock, 120);
  std::normal_distribution<float> normal(0.0f, 100.0f);
  for (auto& code : codes) code = encode_e4m3(normal(generator));
  std::vector<std::uint32_t> indices(std::size_t{most} * options.per_call);
  for (std::uint32_t i = 0; i < indices.size(); ++i) indices[i] = i;
  const std::vector<float> route_weights(most, 0.25f);
  std::vector<BFloat16> outputs(indices.size() * options.dim);

  nlohmann::ordered_json report;
  report["device"] = description.name;
  report["compute_capability"] = fmt::format("{}.{}", description.major, description.minor);
  report["dim"] = options.dim;
  report["inter"] = options.inter;
  report["experts_per_call"] = options.per_call;
  report["copy_gb_per_s"] = copy;
  report["results"] = nlohmann::ordered_json::array();
  fmt::print("{} (compute capability {}.{}), {} experts of D {} I {} per call, device copy {:.0f} GB/s\n",
             description.name, description.major, description.minor, options.per_call, options.dim,
             options.inter, copy);
  fmt::print("{:>5} {:>8} {:>10} {:>8} {:>7} {:>8} {:>10}\n", "rows", "path", "kernel us", "GB/s", "of copy",
             "TOPS", "call us");

  KernelTimes kernels;
  for (const std::uint32_t dot_rows : {0u, 2u}) {
    sizes.dot_rows = dot_rows;
    cuda::DeviceExperts experts(dot_rows == 0      ? std::move(device)
                                : options.emulated ? cuda::emulated_device()
                                                   : cuda::open_device(options.device),
                                sizes, [&](cuda::ExpertKey) { return matrices; });
    std::vector<cuda::ExpertKey> keys;
    for (std::uint32_t expert = 0; expert < options.experts; ++expert) keys.push_back({0, expert});
    experts.load(keys, nullptr);
    std::uint32_t next = 0;
    for (const std::uint32_t rows : options.rows) {
      if (dot_rows != 0 && rows > dot_rows) continue;
      std::vector<double> kernel_ms, call_ms;
      for (std::uint32_t repeat = 0; repeat < options.repeats + 2; ++repeat) {
        std::vector<cuda::DeviceExpertTask> tasks;
        for (std::uint32_t i = 0; i < options.per_call; ++i, next = (next + 1) % options.experts)
          tasks.push_back({keys[next], std::span(indices).first(rows), std::span(route_weights).first(rows),
                           std::span(indices).subspan(std::size_t{i} * rows, rows)});
        const auto begin = std::chrono::steady_clock::now();
        experts.begin({codes.data(), scales.data(), rows, options.dim}, tasks, 10.0f);
        experts.finish(outputs);
        const double ms =
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
        if (repeat < 2) continue;
        call_ms.push_back(ms);
        kernel_ms.push_back(sizes.time_launches ? experts.launch_ms() : ms);
      }
      const double kernel = median(kernel_ms), call = median(call_ms);
      kernels[{dot_rows != 0, rows}] = kernel * 1e3;
      const double bytes =
          static_cast<double>(options.per_call) * 3.0 * static_cast<double>(values) * (0.5 + 1.0 / kBlock);
      const double operations = 2.0 * options.per_call * rows * 3.0 * static_cast<double>(values);
      const double bandwidth = bytes / kernel / 1e6, tops = operations / kernel / 1e9;
      const char* const path = dot_rows == 0 ? "mma" : "dot4";
      fmt::print("{:>5} {:>8} {:>10.1f} {:>8.0f} {:>6.0f}% {:>8.2f} {:>10.1f}\n", rows, path, kernel * 1e3,
                 bandwidth, copy > 0 ? 100.0 * bandwidth / copy : 0.0, tops, call * 1e3);
      report["results"].push_back({{"rows", rows},
                                   {"path", path},
                                   {"kernel_us", kernel * 1e3},
                                   {"weight_gb_per_s", bandwidth},
                                   {"fraction_of_copy", copy > 0 ? bandwidth / copy : 0.0},
                                   {"tops", tops},
                                   {"call_us", call * 1e3}});
    }
  }
  report["exchange_layers_per_step"] = kLayers;
  report["exchange"] =
      run_exchange(options, matrices, {codes.data(), scales.data(), most, options.dim}, kernels);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << report.dump(2) << "\n";
    if (!file.flush()) {
      fmt::print(stderr, "dsv41-bench-gpu: cannot write {}\n", options.json);
      return 4;
    }
  }
  fmt::print("context: an earlier Python implementation took 1.06-1.14 s per step on four sm_75 cards\n");
  return 0;
}

}  // namespace
}  // namespace dsv41

int main(int count, char** arguments) {
  try {
    return dsv41::run(dsv41::parse(count, arguments));
  } catch (const std::invalid_argument& error) {
    fmt::print(stderr, "dsv41-bench-gpu: {}\n{}", error.what(), dsv41::kUsage);
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "dsv41-bench-gpu: {}\n", error.what());
    return 4;
  }
}
