// The CUDA kernels' own source, run on the emulator, against the plain backend: every bit is equal, whatever
// the shape, the path (dot4 or tensor-core products), the kernel variant, the number of thread blocks and the
// order of threads.
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda/emulated_device.h"
#include "tests/kernels/support/device_expert_case.h"
#include "tests/kernels/support/golden.h"

namespace dsv41 {
namespace {

using cuda::EmulatedOptions;
using cuda::Variant;
using cuda::emulation::Order;
using testing::Codes;
using testing::ExpertsCase;
using testing::GoldenFile;
using testing::Inputs;
using testing::Scales;

void expect_equal(std::span<const BFloat16> out, std::span<const BFloat16> expected) {
  ASSERT_EQ(out.size(), expected.size());
  const std::size_t i = testing::first_difference(out, expected);
  if (i < out.size())
    ADD_FAILURE() << "[" << i << "] has bits " << std::hex << out[i].bits << " instead of "
                  << expected[i].bits;
}

// ---- one linear
// -------------------------------------------------------------------------------------------------

/// Device memory that holds a copy of host bytes; padded as the kernels require.
struct Uploaded {
  cuda::DeviceBuffer host, memory;
  Uploaded(cuda::Device& device, const void* bytes, std::size_t size)
      : host(device, cuda::DeviceBuffer::Kind::Pinned, size + 16),
        memory(device, cuda::DeviceBuffer::Kind::Device, size + 16) {
    std::memcpy(host.data(), bytes, size);
    device.upload(cuda::Queue::Compute, memory.data(), host.data(), size);
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(memory.data());
  }
};

bool is_regular(std::span<const std::uint8_t> scales) {
  return std::all_of(scales.begin(), scales.end(), [](std::uint8_t code) {
    return code >= cuda::kRegularWeightLow && code <= cuda::kRegularWeightHigh;
  });
}

struct LinearOptions {
  Variant variant = Variant::Rows32;
  std::uint32_t dot_rows = 0;
};

std::vector<BFloat16> device_linear(cuda::Device& device, const QuantizedRows& x, const Fp4Matrix& w,
                                    LinearOptions options) {
  const std::size_t blocks = x.k / kBlock;
  const Uploaded codes(device, x.codes, x.rows * x.k), scales(device, x.scales, x.rows * blocks);
  const Uploaded w_codes(device, w.codes, w.n * w.k / 2), w_scales(device, w.scales, w.n * blocks);
  const std::uint32_t zeros[2] = {};
  const Uploaded counters(device, zeros, sizeof zeros);
  using Kind = cuda::DeviceBuffer::Kind;
  const cuda::DeviceBuffer digits(device, Kind::Device, x.rows * blocks * 64),
      top(device, Kind::Device, x.rows * blocks * 32),
      block_scales(device, Kind::Device, x.rows * blocks * sizeof(cuda::BlockScale)),
      result(device, Kind::Device, x.rows * w.n * sizeof(BFloat16)),
      back(device, Kind::Pinned, result.size());
  device.launch(
      cuda::LinearLaunch{
          .k = static_cast<std::uint32_t>(x.k),
          .rows = static_cast<std::uint32_t>(x.rows),
          .rows_per_tile = cuda::rows_per_tile(options.variant),
          .dot_rows = options.dot_rows,
          .codes = codes.as<std::uint8_t>(),
          .scales = scales.as<std::uint8_t>(),
          .weight = {w_codes.as<std::uint8_t>(), w_scales.as<std::uint8_t>(), static_cast<std::uint32_t>(w.n),
                     is_regular({w.scales, w.n * blocks})},
          .x = {reinterpret_cast<std::uint8_t*>(digits.data()), reinterpret_cast<std::uint8_t*>(top.data()),
                reinterpret_cast<cuda::BlockScale*>(block_scales.data())},
          .outputs = reinterpret_cast<BFloat16*>(result.data()),
          .ticket = counters.as<std::uint32_t>(),
          .expanded = counters.as<std::uint32_t>() + 1,
      },
      options.variant);
  device.download(cuda::Queue::Compute, back.data(), result.data(), result.size());
  device.synchronize(device.record(cuda::Queue::Compute));
  std::vector<BFloat16> out(x.rows * w.n);
  std::memcpy(out.data(), back.data(), result.size());
  return out;
}

struct Path {
  const char* name;
  Variant variant;
  std::uint32_t dot_rows;
  Order order;
  unsigned thread_blocks;
};
constexpr Path kPaths[] = {
    {"dot4", Variant::Rows8, 2, Order::Ascending, 1},
    {"dot4_deep", Variant::Rows8Deep, 2, Order::Descending, 2},
    {"products_8", Variant::Rows8, 0, Order::Ascending, 2},
    {"products_8_deep", Variant::Rows8Deep, 0, Order::Shuffled, 3},
    {"products_16", Variant::Rows16, 0, Order::Shuffled, 2},
    {"products_32", Variant::Rows32, 0, Order::Descending, 2},
};

class DeviceLinear : public ::testing::TestWithParam<Path> {
 protected:
  std::unique_ptr<cuda::Device> device() const {
    return cuda::emulated_device({.thread_blocks = GetParam().thread_blocks, .order = GetParam().order});
  }
  LinearOptions options() const { return {GetParam().variant, GetParam().dot_rows}; }
};
INSTANTIATE_TEST_SUITE_P(Paths, DeviceLinear, ::testing::ValuesIn(kPaths),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(DeviceLinear, EqualsPlain) {
  struct Case {
    std::size_t rows, n, k;
    Codes codes;
    Scales scales;
  };
  const Case cases[] = {
      {1, 1, 32, Codes::Uniform, Scales::Usual},
      {1, 33, 160, Codes::Gaussian, Scales::Usual},
      {2, 64, 288, Codes::MaximaBesideSubnormals, Scales::Usual},
      {3, 65, 64, Codes::Uniform, Scales::Extreme},
      {2, 31, 96, Codes::AllMaximal, Scales::Extreme},
      {5, 97, 128, Codes::MaximaBesideSubnormals, Scales::Extreme},
      {9, 32, 192, Codes::AllZero, Scales::Usual},
      {17, 40, 224, Codes::Uniform, Scales::Usual},
      {33, 130, 96, Codes::Gaussian, Scales::Usual},
      {70, 7, 32, Codes::AllMaximal, Scales::Usual},
  };
  std::uint64_t seed = 1;
  for (const Case& c : cases) {
    Inputs inputs(++seed);
    const auto codes = inputs.e4m3(c.rows * c.k, c.codes),
               scales = inputs.e8m0(c.rows * c.k / kBlock, c.scales);
    const auto w_codes = inputs.e2m1(c.n * c.k, c.codes),
               w_scales = inputs.e8m0(c.n * c.k / kBlock, c.scales);
    const QuantizedRows x{codes.data(), scales.data(), c.rows, c.k};
    const Fp4Matrix w{w_codes.data(), w_scales.data(), c.n, c.k};
    std::vector<BFloat16> expected(c.rows * c.n);
    plain_ops().linear_fp4(x, w, {0, c.n}, expected.data());
    SCOPED_TRACE("rows " + std::to_string(c.rows) + ", N " + std::to_string(c.n) + ", K " +
                 std::to_string(c.k));
    expect_equal(device_linear(*device(), x, w, options()), expected);
  }
}

TEST_P(DeviceLinear, NotANumberStaysInItsRowsAndFeatures) {
  constexpr std::size_t kRows = 5, kN = 40, kK = 96;
  Inputs inputs(77);
  auto codes = inputs.e4m3(kRows * kK, Codes::Uniform),
       scales = inputs.e8m0(kRows * kK / kBlock, Scales::Usual);
  const auto w_codes = inputs.e2m1(kN * kK, Codes::Uniform);
  auto w_scales = inputs.e8m0(kN * kK / kBlock, Scales::Usual);
  codes[1 * kK + 40] = 0x7F;
  codes[2 * kK + 3] = 0xFF;
  scales[3 * kK / kBlock + 2] = 255;
  w_scales[9 * kK / kBlock] = 255;
  const QuantizedRows x{codes.data(), scales.data(), kRows, kK};
  const Fp4Matrix w{w_codes.data(), w_scales.data(), kN, kK};
  std::vector<BFloat16> expected(kRows * kN);
  plain_ops().linear_fp4(x, w, {0, kN}, expected.data());
  const std::vector<BFloat16> out = device_linear(*device(), x, w, options());
  expect_equal(out, expected);
  EXPECT_TRUE(testing::is_nan(out[1 * kN]));
  EXPECT_FALSE(testing::is_nan(out[0]));
  EXPECT_TRUE(testing::is_nan(out[9]));
}

TEST_P(DeviceLinear, EqualsGolden) {
  const GoldenFile golden("linear");
  for (const std::string number : {"0", "1", "2", "3"}) {
    const auto x = golden.get<BFloat16>(number + ".x"), expected = golden.get<BFloat16>(number + ".fp4.y");
    const auto w_codes = golden.get<std::uint8_t>(number + ".fp4.weight"),
               w_scales = golden.get<std::uint8_t>(number + ".fp4.scale");
    const std::size_t rows = golden[number + ".x"].shape[0], k = golden[number + ".x"].shape[1];
    std::vector<std::uint8_t> codes(x.size()), scales(x.size() / kBlock);
    plain_ops().quantize_rows(x.data(), rows, k, codes.data(), scales.data());
    SCOPED_TRACE("case " + number);
    expect_equal(device_linear(*device(), {codes.data(), scales.data(), rows, k},
                               {w_codes.data(), w_scales.data(), expected.size() / rows, k}, options()),
                 expected);
  }
}

// ---- whole experts
// ----------------------------------------------------------------------------------------------

std::vector<BFloat16> device_experts(const ExpertsCase& c, const EmulatedOptions& emulated, float limit,
                                     std::uint32_t dot_rows) {
  cuda::DeviceExpertsOptions options = c.options();
  options.dot_rows = dot_rows;
  cuda::DeviceExperts experts(cuda::emulated_device(emulated), options,
                              [&](cuda::ExpertKey key) { return c.experts[key.expert].matrices(); });
  experts.begin(c.x(), c.tasks(), limit);
  std::vector<BFloat16> out(c.route_count * c.dim);
  experts.finish(out);
  return out;
}

TEST(DeviceExpertsKernel, EqualsPlain) {
  struct Case {
    std::size_t dim, inter;
    std::vector<std::size_t> rows;  // of each expert
    Codes codes;
    Scales scales;
    float limit;
  };
  const Case cases[] = {
      {32, 32, {1}, Codes::Gaussian, Scales::Usual, 10},
      {96, 64, {1, 1, 1}, Codes::Gaussian, Scales::Usual, 10},
      {128, 96, {2, 0, 1, 3}, Codes::Uniform, Scales::Usual, 10},
      {160, 32, {8, 5}, Codes::MaximaBesideSubnormals, Scales::Usual, 0},
      {64, 160, {0, 9, 0}, Codes::Gaussian, Scales::Usual, 10},
      {96, 96, {40, 1, 17}, Codes::Uniform, Scales::Usual, 10},
      {64, 64, {3, 2}, Codes::AllMaximal, Scales::Usual, 10},
      {64, 32, {2, 1}, Codes::AllZero, Scales::Usual, 10},
      {64, 64, {4, 1, 2}, Codes::Uniform, Scales::Extreme, 10},
      {64, 64, {4, 33}, Codes::MaximaBesideSubnormals, Scales::Extreme, 0},
  };
  const EmulatedOptions devices[] = {
      {.thread_blocks = 1, .order = Order::Ascending},
      {.thread_blocks = 3, .order = Order::Shuffled},
      {.thread_blocks = 2, .order = Order::Descending, .tensor_copies = false},
  };
  std::uint64_t seed = 100;
  for (const Case& c : cases) {
    const ExpertsCase input(++seed, c.dim, c.inter, c.rows, c.codes, c.scales);
    const std::vector<BFloat16> expected = input.expected(c.limit);
    for (const EmulatedOptions& emulated : devices)
      for (const std::uint32_t dot_rows : {0u, 2u}) {
        SCOPED_TRACE("D " + std::to_string(c.dim) + ", I " + std::to_string(c.inter) + ", experts " +
                     std::to_string(c.rows.size()) + ", dot4 rows " + std::to_string(dot_rows) + ", blocks " +
                     std::to_string(emulated.thread_blocks));
        expect_equal(device_experts(input, emulated, c.limit, dot_rows), expected);
      }
  }
}

TEST(DeviceExpertsKernel, EqualsGolden) {
  const GoldenFile golden("expert");
  const auto x = golden.get<BFloat16>("x"), expected = golden.get<BFloat16>("fp4.y");
  const auto weights = golden.get<float>("weights");
  const std::size_t rows = golden["x"].shape[0], dim = golden["x"].shape[1],
                    inter = golden["fp4.w1.weight"].shape[0];
  std::vector<std::uint8_t> codes(x.size()), scales(x.size() / kBlock);
  plain_ops().quantize_rows(x.data(), rows, dim, codes.data(), scales.data());
  std::vector<std::vector<std::uint8_t>> parts;
  for (const char* name : {"w1", "w3", "w2"})
    for (const char* kind : {"weight", "scale"})
      parts.push_back(golden.get<std::uint8_t>(std::string("fp4.") + name + "." + kind));
  const ExpertMatrices matrices{{parts[0].data(), parts[1].data(), inter, dim},
                                {parts[2].data(), parts[3].data(), inter, dim},
                                {parts[4].data(), parts[5].data(), dim, inter}};
  std::vector<std::uint32_t> numbers(rows);
  for (std::uint32_t i = 0; i < rows; ++i) numbers[i] = i;

  for (const bool tensor_copies : {true, false}) {
    cuda::DeviceExperts experts(cuda::emulated_device({.tensor_copies = tensor_copies}),
                                {.dim = static_cast<std::uint32_t>(dim),
                                 .inter = static_cast<std::uint32_t>(inter),
                                 .max_rows = static_cast<std::uint32_t>(rows),
                                 .max_routes = static_cast<std::uint32_t>(rows),
                                 .slots = 1},
                                [&](cuda::ExpertKey) { return matrices; });
    const cuda::DeviceExpertTask task{{0, 0}, numbers, weights, numbers};
    std::vector<BFloat16> out(x.size());
    experts.begin({codes.data(), scales.data(), rows, dim}, {&task, 1}, 10.0f);
    experts.finish(out);
    expect_equal(out, expected);
    // Row by row: the dot4 path.
    for (std::uint32_t i = 0; i < rows; ++i) {
      const cuda::DeviceExpertTask single{{0, 0}, {&numbers[i], 1}, {&weights[i], 1}, {&numbers[0], 1}};
      experts.begin({codes.data(), scales.data(), rows, dim}, {&single, 1}, 10.0f);
      experts.finish(std::span(out).first(dim));
      expect_equal(std::span(out).first(dim), std::span(expected).subspan(i * dim, dim));
    }
  }
}

TEST(DeviceExpertsKernel, InfiniteActivationsBecomeNotANumberAsOnTheCpu) {
  ExpertsCase input(5, 64, 64, std::vector<std::size_t>{2, 3}, Codes::Uniform, Scales::Usual);
  for (auto& routes : input.routes) routes.weights[0] = 3e38f;
  expect_equal(device_experts(input, {}, 0.0f, 0), input.expected(0.0f));
  expect_equal(device_experts(input, {}, 0.0f, 2), input.expected(0.0f));
}

}  // namespace
}  // namespace dsv41
