// The thread pool and Compute: every element once, exceptions once, results free of the number of threads.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/compute.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Codes;
using testing::first_difference;
using testing::Inputs;
using testing::Scales;

class Threads : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Threads, CoverEveryElementOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.size(), std::max<std::size_t>(GetParam(), 1));
  for (const std::size_t count : {0, 1, 5, 32, 33, 1000}) {
    for (const std::size_t grain : {0, 1, 7, 32}) {
      std::vector<int> visits(count, 0);  // ranges are disjoint: no two threads touch the same element
      pool.parallel_for(count, grain, [&](Range range) {
        EXPECT_LT(range.begin, range.end);
        EXPECT_LE(range.end, count);
        if (range.end != count) {
          EXPECT_EQ(range.size() % std::max<std::size_t>(grain, 1), 0u);
        }
        for (std::size_t i = range.begin; i < range.end; ++i) ++visits[i];
      });
      EXPECT_EQ(visits, std::vector<int>(count, 1)) << count << " by " << grain;
    }
  }
}

TEST(ThreadPinning, OneCpuForEachThreadWhereThereAreAsMany) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  const auto cpus = static_cast<std::size_t>(CPU_COUNT(&all));
  if (cpus < 2 || cpus > 64) GTEST_SKIP() << cpus << " CPUs";
  const auto caller = std::this_thread::get_id();
  for (const std::size_t threads : {cpus, cpus + 1}) {
    ThreadPool pool(threads);
    std::atomic<int> most{0}, fewest{1 << 30}, seen{0};
    for (int attempt = 0; attempt < 1000 && seen == 0; ++attempt)
      pool.parallel_for(1000, 1, [&](Range) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (std::this_thread::get_id() == caller) return;
        cpu_set_t own;
        sched_getaffinity(0, sizeof own, &own);
        most = std::max(most.load(), CPU_COUNT(&own)), fewest = std::min(fewest.load(), CPU_COUNT(&own));
        ++seen;
      });
    ASSERT_GT(seen, 0);
    if (threads == cpus)
      EXPECT_EQ(most, 1);
    else
      EXPECT_EQ(fewest, static_cast<int>(cpus));
  }
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&all, &after));
}

TEST_P(Threads, RunLoopsBackToBack) {
  ThreadPool pool(GetParam());
  std::vector<std::uint64_t> values(64, 0);
  for (int loop = 0; loop < 3000; ++loop)
    pool.parallel_for(values.size(), 1, [&](Range range) {
      for (std::size_t i = range.begin; i < range.end; ++i) values[i] += i;
    });
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], i * 3000);
}

TEST_P(Threads, WakeAfterSleeping) {
  ThreadPool pool(GetParam());
  for (int pause = 0; pause < 5; ++pause) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(pause));  // long enough for the others to fall asleep
    std::atomic<std::size_t> sum{0};
    pool.parallel_for(1000, 1, [&](Range range) { sum += range.size(); });
    EXPECT_EQ(sum, 1000u);
  }
}

TEST_P(Threads, RethrowOnceAndGoOn) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(pool.parallel_for(200, 1, [](Range) { throw std::runtime_error("every range fails"); }),
                 std::runtime_error);
    std::atomic<std::size_t> sum{0};
    EXPECT_NO_THROW(pool.parallel_for(200, 1, [&](Range range) { sum += range.size(); }));
    EXPECT_EQ(sum, 200u);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Threads, ::testing::Values(0, 1, 2, 3, 8));

TEST(Threads, OneThreadRunsInline) {
  ThreadPool pool(1);
  int calls = 0;
  pool.parallel_for(100, 1, [&](Range range) {
    EXPECT_EQ(range.size(), 100u);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

// ---- Compute
// ----------------------------------------------------------------------------------------------------------

/// Three experts of odd sizes and the activations of a few rows.
struct Experts {
  static constexpr std::size_t kRows = 9, kDim = 96, kInner = 160, kExperts = 3;
  explicit Experts(std::uint64_t seed) {
    Inputs inputs(seed);
    x_codes = inputs.e4m3(kRows * kDim, Codes::Gaussian);
    x_scales = inputs.e8m0(kRows * kDim / kBlock, Scales::Usual);
    for (std::size_t e = 0; e < kExperts; ++e) {
      for (int matrix = 0; matrix < 3; ++matrix) {
        codes.push_back(inputs.e2m1(kInner * kDim, Codes::Gaussian));
        scales.push_back(inputs.e8m0(kInner * kDim / kBlock, Scales::Usual));
      }
    }
  }
  QuantizedRows x() const { return {x_codes.data(), x_scales.data(), kRows, kDim}; }
  ExpertMatrices weights(std::size_t e) const {
    const auto matrix = [&](std::size_t i, std::size_t n, std::size_t k) {
      return Fp4Matrix{codes[3 * e + i].data(), scales[3 * e + i].data(), n, k};
    };
    return {matrix(0, kInner, kDim), matrix(1, kInner, kDim), matrix(2, kDim, kInner)};
  }
  std::vector<std::uint8_t> x_codes, x_scales;
  std::vector<std::vector<std::uint8_t>> codes, scales;
};

/// One route by the operations themselves.
std::vector<BFloat16> one_route(const Ops& ops, const Experts& experts, std::size_t row, std::size_t expert,
                                float weight, float limit) {
  const ExpertMatrices w = experts.weights(expert);
  const QuantizedRows x{experts.x_codes.data() + row * Experts::kDim,
                        experts.x_scales.data() + row * Experts::kDim / kBlock, 1, Experts::kDim};
  std::vector<BFloat16> gate(w.w1.n), up(w.w3.n), hidden(w.w1.n), out(w.w2.n);
  ops.linear_fp4(x, w.w1, {0, w.w1.n}, gate.data());
  ops.linear_fp4(x, w.w3, {0, w.w3.n}, up.data());
  ops.swiglu(gate.data(), up.data(), weight, limit, hidden.size(), hidden.data());
  std::vector<std::uint8_t> codes(hidden.size()), scales(hidden.size() / kBlock);
  ops.quantize_rows(hidden.data(), 1, hidden.size(), codes.data(), scales.data());
  ops.linear_fp4({codes.data(), scales.data(), 1, hidden.size()}, w.w2, {0, w.w2.n}, out.data());
  return out;
}

class ComputeOnThreads : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ComputeOnThreads, ExpertsFollowTheirRoutes) {
  const Experts experts(3);
  // Rows in place and scattered, outputs in place and scattered, an expert without rows, an expert listed
  // twice.
  struct Routes {
    std::size_t expert;
    std::vector<std::uint32_t> rows;
    std::vector<float> weights;
    std::vector<std::uint32_t> outputs;
  };
  const std::vector<Routes> routes{{0, {0, 3, 8}, {0.5f, 1.0f, 0.25f}, {0, 4, 2}},
                                   {1, {}, {}, {}},
                                   {2, {2, 3, 4, 5}, {1.5f, 0.1f, 0.7f, 0.9f}, {5, 6, 7, 8}},
                                   {1, {7}, {0.3f}, {1}},
                                   {1, {6, 6}, {0.3f, 0.6f}, {9, 3}}};
  std::vector<BFloat16> expected(10 * Experts::kDim);
  std::vector<ExpertTask> tasks;
  for (const Routes& r : routes) {
    tasks.push_back({experts.weights(r.expert), r.rows, r.weights, r.outputs});
    for (std::size_t i = 0; i < r.rows.size(); ++i) {
      const auto out = one_route(plain_ops(), experts, r.rows[i], r.expert, r.weights[i], 10.0f);
      std::copy(out.begin(), out.end(), &expected[r.outputs[i] * Experts::kDim]);
    }
  }
  for (std::size_t b = 0; b < backend_count(); ++b) {
    if (!backend(b).usable) continue;
    Compute compute(*backend(b).ops, GetParam());
    for (int repetition = 0; repetition < 3; ++repetition) {  // again with used buffers
      std::vector<BFloat16> outputs(expected.size());
      compute.experts(experts.x(), tasks, 10.0f, outputs);
      ASSERT_EQ(first_difference<BFloat16>(outputs, expected), outputs.size()) << backend(b).ops->name;
      compute.experts(experts.x(), {}, 10.0f, outputs);  // nothing to do is allowed
    }
  }
}

TEST_P(ComputeOnThreads, OperationsEqualOneCall) {
  Inputs inputs(4);
  const std::size_t rows = 13, n = 101, k = 160;
  const auto x = inputs.bfloat16(rows * k), weight = inputs.bfloat16(k), matrix = inputs.bfloat16(n * k);
  const auto w8 = inputs.e4m3(n * k, Codes::Gaussian), w4 = inputs.e2m1(n * k, Codes::Gaussian);
  const auto s8 = inputs.e8m0(ceil_div(n, kBlock) * k / kBlock, Scales::Usual);
  const auto s4 = inputs.e8m0(n * k / kBlock, Scales::Usual);
  const Fp8Matrix fp8{w8.data(), s8.data(), n, k};
  const Fp4Matrix fp4{w4.data(), s4.data(), n, k};
  const Bf16Matrix bf16{matrix.data(), n, k};
  const Ops& plain = plain_ops();
  Compute compute(plain, GetParam());

  std::vector<std::uint8_t> codes(x.size()), scales(x.size() / kBlock), codes_once = codes,
                                                                        scales_once = scales;
  compute.quantize_rows(x, k, codes, scales);
  plain.quantize_rows(x.data(), rows, k, codes_once.data(), scales_once.data());
  EXPECT_EQ(codes, codes_once);
  EXPECT_EQ(scales, scales_once);

  const QuantizedRows quantized{codes.data(), scales.data(), rows, k};
  std::vector<BFloat16> out(rows * n), once(rows * n);
  compute.linear(quantized, fp8, out);
  plain.linear_fp8(quantized, fp8, {0, n}, once.data());
  EXPECT_EQ(out, once);
  compute.linear(quantized, fp4, out);
  plain.linear_fp4(quantized, fp4, {0, n}, once.data());
  EXPECT_EQ(out, once);
  compute.linear(x, bf16, out);
  plain.linear_bf16(x.data(), rows, k, bf16, {0, n}, once.data());
  EXPECT_EQ(out, once);

  std::vector<float> wide(rows * n), wide_once(rows * n);
  compute.linear_wide(x, bf16, wide);
  plain.linear_wide(x.data(), rows, bf16, {0, n}, wide_once.data());
  EXPECT_EQ(wide, wide_once);

  std::vector<BFloat16> normed(x.size()), normed_once(x.size());
  compute.rms_norm(x, weight, 1e-20f, normed);
  plain.rms_norm(x.data(), weight.data(), 1e-20f, rows, k, normed_once.data());
  EXPECT_EQ(normed, normed_once);
}

INSTANTIATE_TEST_SUITE_P(Threads, ComputeOnThreads, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace dsv41
