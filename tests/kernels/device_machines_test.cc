// The same tests on every machine there is: emulated devices of both generations, and a GPU where one is
// visible (skipped elsewhere). Every bit equals the plain backend's and the golden files'; the GPU also gets
// shapes for which the emulator is too slow.
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda/device_experts.h"
#include "kernels/cuda/emulated_device.h"
#include "tests/kernels/support/device_expert_case.h"
#include "tests/kernels/support/device_linear.h"
#include "tests/kernels/support/golden.h"

namespace dsv41 {
namespace {

using testing::Codes;
using testing::device_linear;
using testing::expect_equal;
using testing::ExpertsCase;
using testing::GoldenFile;
using testing::Inputs;
using testing::Scales;

enum class Machine { Emulated, EmulatedTuring, Gpu };

class DeviceMachine : public ::testing::TestWithParam<Machine> {
 protected:
  void SetUp() override {
    const cuda::Discovery found = cuda::discover_devices();
    if (on_gpu() && found.devices.empty()) GTEST_SKIP() << found.why_none;
  }
  static bool on_gpu() { return GetParam() == Machine::Gpu; }
  static std::unique_ptr<cuda::Device> open() {
    if (on_gpu()) return cuda::open_device(cuda::discover_devices().devices.front().index);
    return cuda::emulated_device({.tensor_copies = GetParam() == Machine::Emulated});
  }
};
INSTANTIATE_TEST_SUITE_P(Machines, DeviceMachine,
                         ::testing::Values(Machine::Emulated, Machine::EmulatedTuring, Machine::Gpu),
                         [](const auto& test) {
                           return std::string(test.param == Machine::Emulated         ? "Emulated"
                                              : test.param == Machine::EmulatedTuring ? "EmulatedTuring"
                                                                                      : "Gpu");
                         });

/// Both kernel variants of the device, with and without the dot4 path.
std::vector<testing::LinearOptions> linear_paths(const cuda::Device& device) {
  std::vector<testing::LinearOptions> paths;
  for (const std::uint32_t rows : {8u, 32u})
    for (const std::uint32_t dot_rows : {0u, 2u}) paths.push_back({device.variant_for(rows), dot_rows});
  return paths;
}

TEST_P(DeviceMachine, LinearsEqualPlain) {
  std::vector<testing::Fp4Case> cases = {
      {1, 33, 160, Codes::Uniform, Scales::Usual},
      {2, 65, 96, Codes::MaximaBesideSubnormals, Scales::Extreme},
      {5, 97, 128, Codes::AllMaximal, Scales::Usual},
      {37, 40, 64, Codes::Gaussian, Scales::Extreme},
  };
  if (on_gpu())
    cases.insert(cases.end(), {{1, 2304, 5120, Codes::Uniform, Scales::Usual},
                               {70, 5120, 2304, Codes::MaximaBesideSubnormals, Scales::Usual},
                               {300, 130, 5120, Codes::Uniform, Scales::Extreme}});
  const auto device = open();
  std::uint64_t seed = 500;
  for (const testing::Fp4Case& c : cases) {
    const testing::RandomFp4 linear(c, ++seed);
    const std::vector<BFloat16> expected = linear.expected();
    for (const testing::LinearOptions& path : linear_paths(*device)) {
      SCOPED_TRACE(linear.name() + ", dot4 rows " + std::to_string(path.dot_rows));
      expect_equal(device_linear(*device, linear.x(), linear.w(), path), expected);
    }
  }
}

TEST_P(DeviceMachine, LinearsEqualGolden) {
  const GoldenFile golden("linear");
  const auto device = open();
  for (const std::string number : {"0", "1", "2", "3"}) {
    const auto x = golden.get<BFloat16>(number + ".x"), expected = golden.get<BFloat16>(number + ".fp4.y");
    const auto w_codes = golden.get<std::uint8_t>(number + ".fp4.weight"),
               w_scales = golden.get<std::uint8_t>(number + ".fp4.scale");
    const std::size_t rows = golden[number + ".x"].shape[0], k = golden[number + ".x"].shape[1];
    std::vector<std::uint8_t> codes(x.size()), scales(x.size() / kBlock);
    plain_ops().quantize_rows(x.data(), rows, k, codes.data(), scales.data());
    SCOPED_TRACE("case " + number);
    for (const testing::LinearOptions& path : linear_paths(*device))
      expect_equal(device_linear(*device, {codes.data(), scales.data(), rows, k},
                                 {w_codes.data(), w_scales.data(), expected.size() / rows, k}, path),
                   expected);
  }
}

/// A call whose rows come and go in buffers on the device.
std::vector<BFloat16> call_in_place(cuda::DeviceExperts& experts, const ExpertsCase& call, float limit) {
  using Kind = cuda::DeviceBuffer::Kind;
  cuda::Device& device = experts.device();
  const testing::Uploaded codes(device, call.codes.data(), call.codes.size()),
      scales(device, call.scales.data(), call.scales.size());
  const std::size_t values = call.route_count * call.dim;
  const cuda::DeviceBuffer rows(device, Kind::Device, values * sizeof(BFloat16)),
      back(device, Kind::Pinned, rows.size());
  experts.begin_in_place({codes.as<std::uint8_t>(), scales.as<std::uint8_t>(), call.rows, call.dim},
                         call.tasks(), limit, reinterpret_cast<BFloat16*>(rows.data()));
  experts.finish({});
  device.download(cuda::Queue::Compute, back.data(), rows.data(), rows.size());
  device.synchronize(device.record(cuda::Queue::Compute));
  const auto* const first = reinterpret_cast<const BFloat16*>(back.data());
  return {first, first + values};
}

std::vector<BFloat16> call_staged(cuda::DeviceExperts& experts, const ExpertsCase& call, float limit) {
  std::vector<BFloat16> out(call.route_count * call.dim);
  experts.begin(call.x(), call.tasks(), limit);
  experts.finish(out);
  return out;
}

TEST_P(DeviceMachine, ExpertsEqualPlain) {
  struct Case {
    std::size_t dim, inter;
    std::vector<std::size_t> rows;  // of each expert
    Codes codes;
    Scales scales;
    float limit;
  };
  std::vector<Case> cases = {
      {96, 64, {1, 1, 1}, Codes::Gaussian, Scales::Usual, 10},
      {160, 32, {8, 5}, Codes::MaximaBesideSubnormals, Scales::Usual, 0},
      {64, 96, {4, 33}, Codes::Uniform, Scales::Extreme, 10},
  };
  if (on_gpu())
    cases.insert(cases.end(), {{5120, 2304, {1, 1, 2}, Codes::Gaussian, Scales::Usual, 10},
                               {1024, 512, {100, 1, 33, 0, 8}, Codes::Uniform, Scales::Usual, 10},
                               {2048, 1056, {9, 70}, Codes::MaximaBesideSubnormals, Scales::Extreme, 10}});
  std::uint64_t seed = 600;
  for (const Case& c : cases) {
    const ExpertsCase call(++seed, c.dim, c.inter, c.rows, c.codes, c.scales);
    const std::vector<BFloat16> expected = call.expected(c.limit);
    for (const std::uint32_t dot_rows : {0u, 2u})
      for (const std::uint32_t slots : {1u, 8u})  // read and uploaded in every call, or resident
        for (const bool in_place : {false, true}) {
          SCOPED_TRACE("D " + std::to_string(c.dim) + ", I " + std::to_string(c.inter) + ", dot4 rows " +
                       std::to_string(dot_rows) + ", slots " + std::to_string(slots) +
                       (in_place ? ", in place" : ""));
          cuda::DeviceExpertsOptions options = call.options();
          options.dot_rows = dot_rows;
          options.slots = slots;
          options.in_place = in_place;
          cuda::DeviceExperts experts(
              open(), options, [&](cuda::ExpertKey key) { return call.experts[key.expert].matrices(); });
          for (int round = 0; round < (on_gpu() ? 20 : 2); ++round)
            expect_equal(
                in_place ? call_in_place(experts, call, c.limit) : call_staged(experts, call, c.limit),
                expected);
        }
  }
}

TEST_P(DeviceMachine, ExpertsEqualGolden) {
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

  cuda::DeviceExperts experts(open(),
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

TEST_P(DeviceMachine, MemoryThatIsNotThereIsAnErrorTheDeviceSurvives) {
  const auto device = open();
  try {
    device->allocate(std::size_t{1} << 46);
    FAIL() << "64 TiB";
  } catch (const cuda::DeviceError& error) {
    EXPECT_EQ(error.fault(), cuda::DeviceFault::OutOfMemory) << error.what();
  }
  const std::uint32_t sent = 0x12345678;
  const testing::Uploaded there(*device, &sent, sizeof sent);
  const cuda::DeviceBuffer back(*device, cuda::DeviceBuffer::Kind::Pinned, sizeof sent);
  device->download(cuda::Queue::Compute, back.data(), there.memory.data(), sizeof sent);
  device->synchronize(device->record(cuda::Queue::Compute));
  EXPECT_EQ(std::memcmp(back.data(), &sent, sizeof sent), 0);
}

}  // namespace
}  // namespace dsv41
