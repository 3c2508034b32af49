// The CUDA kernels' own source, run on the emulator, against the plain backend: every bit is equal, whatever
// the shape, the path (dot4 or tensor-core products), the kernel variant, the number of thread blocks and the
// order of threads.
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda/emulated_device.h"
#include "tests/kernels/support/device_expert_case.h"
#include "tests/kernels/support/device_linear.h"

namespace dsv41 {
namespace {

using cuda::EmulatedOptions;
using cuda::Variant;
using cuda::emulation::Order;
using testing::Codes;
using testing::device_linear;
using testing::expect_equal;
using testing::ExpertsCase;
using testing::Inputs;
using testing::LinearOptions;
using testing::Scales;

// ---- one linear
// -------------------------------------------------------------------------------------------------

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
  const testing::Fp4Case cases[] = {
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
  for (const testing::Fp4Case& c : cases) {
    const testing::RandomFp4 linear(c, ++seed);
    SCOPED_TRACE(linear.name());
    expect_equal(device_linear(*device(), linear.x(), linear.w(), options()), linear.expected());
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

TEST(DeviceExpertsKernel, InfiniteActivationsBecomeNotANumberAsOnTheCpu) {
  ExpertsCase input(5, 64, 64, std::vector<std::size_t>{2, 3}, Codes::Uniform, Scales::Usual);
  for (auto& routes : input.routes) routes.weights[0] = 3e38f;
  expect_equal(device_experts(input, {}, 0.0f, 0), input.expected(0.0f));
  expect_equal(device_experts(input, {}, 0.0f, 2), input.expected(0.0f));
}

}  // namespace
}  // namespace dsv41
