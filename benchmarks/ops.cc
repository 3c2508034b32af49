// dsv41-bench ops: operations that are not linear layers, at the released shapes, on one thread.
#include <cmath>
#include <cstdio>
#include <functional>

#include "benchmarks/bench.h"

namespace dsv41::bench {
namespace {

std::vector<BFloat16> activations(std::size_t count, std::uint64_t seed) {
  std::vector<BFloat16> values(count);
  const std::vector<std::uint8_t> codes = gaussian_e4m3(count, seed);
  for (std::size_t i = 0; i < count; ++i) values[i] = to_bfloat16(decode_e4m3(codes[i]) * 0.01f);
  return values;
}

}  // namespace

Json run_ops(const Options& options) {
  const Ops& ops = find_backend(options.backend.c_str());
  Json results = Json::array();
  const auto measure = [&](const std::string& name, double units, const char* unit,
                           const std::function<void()>& call) {
    if (!selected(options, name)) return;
    const Timing timing = time_calls(options.seconds, [&](std::size_t) { call(); });
    std::fprintf(stderr, "%-40s %10.1f us, %9.2f M%s/s\n", name.c_str(), timing.best_s * 1e6,
                 units / timing.best_s / 1e6, unit);
    results.push_back({{"operation", name},
                       {"best_us", timing.best_s * 1e6},
                       {"median_us", timing.median_s * 1e6},
                       {"calls", timing.repetitions},
                       {"unit", unit},
                       {"units_per_s", units / timing.best_s}});
  };

  constexpr std::size_t kDim = 5120, kHeads = 64, kHeadDim = 512, kCopies = 4, kInner = 2304;
  const std::vector<BFloat16> x = activations(kCopies * kDim, 1), y = activations(kCopies * kDim, 2);
  std::vector<BFloat16> out(kCopies * kDim);
  std::vector<std::uint8_t> codes(kCopies * kDim), scales(kCopies * kDim / 16);
  measure("quantize_rows 5120", kDim, "value",
          [&] { ops.quantize_rows(x.data(), 1, kDim, codes.data(), scales.data()); });
  measure("rms_norm 5120", kDim, "value",
          [&] { ops.rms_norm(x.data(), y.data(), 1e-20f, 1, kDim, out.data()); });
  measure("swiglu 2304", kInner, "value",
          [&] { ops.swiglu(x.data(), y.data(), 0.3f, 10.0f, kInner, out.data()); });
  const float mixes[kCopies * kCopies] = {0.3f, 0.2f, 0.1f, 0.4f, 0.3f, 0.2f, 0.1f, 0.4f,
                                          0.3f, 0.2f, 0.1f, 0.4f, 0.3f, 0.2f, 0.1f, 0.4f};
  measure("collapse 4 x 5120", kDim, "value",
          [&] { ops.collapse(x.data(), mixes, kCopies, kDim, out.data()); });
  measure("expand 4 x 5120", kDim, "value",
          [&] { ops.expand(y.data(), x.data(), mixes, mixes, kCopies, kDim, out.data()); });
  measure("sum_experts 6 x 5120", kDim, "value",
          [&] { ops.sum_experts(x.data(), 3, y.data(), kDim, out.data()); });

  const std::vector<float> projections(24 * kCopies * kDim, 0.01f);
  for (const std::size_t rows : {1, 4}) {
    const std::vector<BFloat16> streams = activations(rows * kCopies * kDim, 3);
    std::vector<double> mixed(rows * 24);
    const std::string name =
        "mix_projections 24 x 20480" + (rows > 1 ? ", rows " + std::to_string(rows) : "");
    measure(name, static_cast<double>(projections.size() * sizeof(float)), "byte", [&] {
      ops.mix_projections(streams.data(), rows, {projections.data(), 24, kCopies * kDim}, 1e-6f, {0, 24},
                          mixed.data());
    });
  }

  std::vector<float> decoded(kHeadDim);
  const std::vector<std::uint8_t> packed = random_bytes(kHeadDim / 2, 5), window = gaussian_e4m3(kHeadDim, 6);
  const std::vector<std::uint8_t> group_scales(kHeadDim / 16, 0x30), window_scales(kHeadDim / 32, 120);
  measure("dequantize_window 512", kHeadDim, "value",
          [&] { ops.dequantize_window(window.data(), window_scales.data(), kHeadDim, decoded.data()); });
  measure("dequantize_group 512", kHeadDim, "value",
          [&] { ops.dequantize_group(packed.data(), group_scales.data(), kHeadDim, decoded.data()); });

  const std::vector<BFloat16> queries = activations(kHeads * kHeadDim, 7);
  std::vector<BFloat16> attended(queries.size());
  const std::vector<float> sink(kHeads, 0.1f);
  for (const std::size_t slots : {128, 640}) {
    std::vector<float> values(slots * kHeadDim);
    const std::vector<BFloat16> keys = activations(values.size(), 8);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = to_float(keys[i]);
    std::vector<const float*> kv(slots);
    for (std::size_t s = 0; s < slots; ++s) kv[s] = values.data() + s * kHeadDim;
    measure("attention 64 heads x " + std::to_string(slots) + " slots",
            static_cast<double>(2 * kHeads * slots * kHeadDim), "MAC", [&] {
              ops.attention(queries.data(), kv.data(), slots, sink.data(), 0.04419417382415922f, kHeads,
                            kHeadDim, attended.data());
            });
  }

  constexpr std::size_t kKeys = 65536, kIndexHeads = 32, kIndexDim = 128;
  const std::vector<std::uint8_t> key_codes = random_bytes(kKeys * kIndexDim / 2, 9);
  const std::vector<std::uint8_t> query_codes = random_bytes(kIndexHeads * kIndexDim / 2, 10);
  const std::vector<std::uint8_t> key_scales(kKeys * kIndexDim / 32, 126),
      query_scales(kIndexHeads * kIndexDim / 32, 125);
  const std::vector<BFloat16> head_weights = activations(kIndexHeads, 11);
  std::vector<BFloat16> scores(kKeys);
  measure("index_scores 65536 keys", kKeys, "key", [&] {
    ops.index_scores({query_codes.data(), query_scales.data(), head_weights.data(), kIndexHeads, kIndexDim},
                     key_codes.data(), key_scales.data(), kKeys, scores.data());
  });
  return results;
}

}  // namespace dsv41::bench
