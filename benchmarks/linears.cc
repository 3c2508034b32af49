// dsv41-bench linears: the model's products by shape, format and number of rows, beside the read loop of the
// same process. Weights are cold: consecutive calls take consecutive parts of a buffer that no cache holds.
#include <algorithm>
#include <cstdio>

#include "benchmarks/bench.h"

namespace dsv41::bench {
namespace {

enum class Format { Fp4, Fp8, Bf16, Fp8Unquantized };

struct Case {
  const char* name;
  Format format;
  std::size_t n, k;
};

constexpr Case kCases[] = {
    {"fp4 expert w1", Format::Fp4, 2304, 5120},   {"fp4 expert w2", Format::Fp4, 5120, 2304},
    {"fp8 wq_b", Format::Fp8, 32768, 1280},       {"fp8 wo_b", Format::Fp8, 5120, 8192},
    {"fp8 wq_a", Format::Fp8, 1280, 5120},        {"fp8 shared w1", Format::Fp8, 2304, 5120},
    {"bf16 head part", Format::Bf16, 8080, 5120}, {"fp8 wo_a", Format::Fp8Unquantized, 1024, 4096},
};

double bytes_of(const Case& c) {
  const double elements = static_cast<double>(c.n) * static_cast<double>(c.k);
  switch (c.format) {
    case Format::Fp4:
      return elements * (0.5 + 1.0 / 32);
    case Format::Bf16:
      return elements * 2;
    default:
      return elements * (1 + 1.0 / 1024);
  }
}

Json measure(const Options& options, const Case& c, std::size_t rows, Compute& compute, const Buffer& codes,
             const Buffer& numbers, const std::vector<std::uint8_t>& scales) {
  std::vector<std::uint8_t> x_codes(rows * c.k), x_scales(rows * c.k / kBlock);
  std::vector<BFloat16> x(rows * c.k), out(rows * c.n);
  const std::vector<std::uint8_t> pattern = gaussian_e4m3(x.size(), rows);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = to_bfloat16(decode_e4m3(pattern[i]) * 0.01f);
  const Buffer& weights = c.format == Format::Fp8 || c.format == Format::Fp8Unquantized ? codes : numbers;
  const auto weight_bytes = static_cast<std::size_t>(static_cast<double>(c.n) * static_cast<double>(c.k) *
                                                     (c.format == Format::Fp4    ? 0.5
                                                      : c.format == Format::Bf16 ? 2
                                                                                 : 1));
  const std::size_t parts = std::max<std::size_t>(1, weights.size() / weight_bytes);
  const std::span<const BFloat16> input(x);
  const auto call = [&](std::size_t i) {
    const std::uint8_t* const w = weights.data() + i % parts * weight_bytes;
    if (c.format == Format::Bf16) {
      compute.linear(input, Bf16Matrix{reinterpret_cast<const BFloat16*>(w), c.n, c.k}, out);
    } else if (c.format == Format::Fp8Unquantized) {
      compute.threads().parallel_for(c.n, kBlock, [&](Range range) {
        compute.ops().linear_fp8_unquantized(x.data(), rows, c.k, {w, scales.data(), c.n, c.k}, range,
                                             out.data() + range.begin, c.n);
      });
    } else {  // the activations are quantized anew each time: it belongs to the product
      compute.quantize_rows(input, c.k, x_codes, x_scales);
      const QuantizedRows quantized{x_codes.data(), x_scales.data(), rows, c.k};
      if (c.format == Format::Fp4)
        compute.linear(quantized, Fp4Matrix{w, scales.data(), c.n, c.k}, out);
      else
        compute.linear(quantized, Fp8Matrix{w, scales.data(), c.n, c.k}, out);
    }
  };
  // The read loop runs in between, so that both see the same machine.
  double read = 0;
  Timing best{1e300, 1e300, 0};
  for (int round = 0; round < 4; ++round) {
    read = std::max(
        read, read_rate(compute.threads(), weights.data(), std::min<std::size_t>(weights.size(), 256 << 20)));
    const Timing timing = time_calls(options.seconds / 4, call);
    best = {std::min(best.best_s, timing.best_s), std::min(best.median_s, timing.median_s),
            best.repetitions + timing.repetitions};
  }
  const double macs = static_cast<double>(rows) * static_cast<double>(c.n) * static_cast<double>(c.k);
  const double rate = bytes_of(c) / best.best_s;
  std::fprintf(stderr,
               "%-16s %5zu x %5zu rows %3zu threads %zu: %6.2f GB/s, %4.2f of reading (%.2f), %6.1f GMAC/s\n",
               c.name, c.n, c.k, rows, compute.threads().size(), rate / 1e9, rate / read, read / 1e9,
               macs / best.best_s / 1e9);
  return {{"case", c.name},
          {"n", c.n},
          {"k", c.k},
          {"rows", rows},
          {"threads", compute.threads().size()},
          {"best_us", best.best_s * 1e6},
          {"median_us", best.median_s * 1e6},
          {"calls", best.repetitions},
          {"weight_gb_per_s", rate / 1e9},
          {"read_gb_per_s", read / 1e9},
          {"fraction_of_read", rate / read},
          {"gmac_per_s", macs / best.best_s / 1e9}};
}

}  // namespace

Json run_linears(const Options& options) {
  const std::size_t bytes = options.buffer_mib << 20;
  const Buffer codes(bytes, gaussian_e4m3(1 << 20, 2));
  // Any byte is a valid FP4 pair; bytes of E4M3 numbers are finite bf16 numbers as well.
  const Buffer numbers(bytes, gaussian_e4m3(1 << 20, 3));
  std::vector<std::uint8_t> scales(1 << 20);
  const std::vector<std::uint8_t> random = random_bytes(scales.size(), 4);
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<std::uint8_t>(117 + random[i] % 4);
  const std::vector<std::size_t> all_rows =
      options.rows.empty() ? std::vector<std::size_t>{1, 2, 4, 8, 32, 128} : options.rows;
  Json results = Json::array();
  for (const std::size_t threads : thread_counts(options)) {
    Compute compute(find_backend(options.backend.c_str()), threads);
    for (const Case& c : kCases)
      for (const std::size_t rows : all_rows)
        if (selected(options, c.name))
          results.push_back(measure(options, c, rows, compute, codes, numbers, scales));
  }
  return results;
}

}  // namespace dsv41::bench
