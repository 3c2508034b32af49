// One FP4 linear on a device, and the comparison of its results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kernels/compute.h"
#include "kernels/cuda/device.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41::testing {

inline void expect_equal(std::span<const BFloat16> out, std::span<const BFloat16> expected) {
  ASSERT_EQ(out.size(), expected.size());
  const std::size_t i = first_difference(out, expected);
  if (i < out.size())
    ADD_FAILURE() << "[" << i << "] has bits " << std::hex << out[i].bits << " instead of "
                  << expected[i].bits;
}

struct Fp4Case {
  std::size_t rows, n, k;
  Codes codes;
  Scales scales;
};

/// A random linear of that kind, and what the plain backend makes of it.
class RandomFp4 {
 public:
  RandomFp4(const Fp4Case& c, std::uint64_t seed) : shape_(c) {
    Inputs inputs(seed);
    codes_ = inputs.e4m3(c.rows * c.k, c.codes);
    scales_ = inputs.e8m0(c.rows * c.k / kBlock, c.scales);
    w_codes_ = inputs.e2m1(c.n * c.k, c.codes);
    w_scales_ = inputs.e8m0(c.n * c.k / kBlock, c.scales);
  }
  QuantizedRows x() const { return {codes_.data(), scales_.data(), shape_.rows, shape_.k}; }
  Fp4Matrix w() const { return {w_codes_.data(), w_scales_.data(), shape_.n, shape_.k}; }
  std::vector<BFloat16> expected() const {
    std::vector<BFloat16> out(shape_.rows * shape_.n);
    plain_ops().linear_fp4(x(), w(), {0, shape_.n}, out.data());
    return out;
  }
  std::string name() const {
    return "rows " + std::to_string(shape_.rows) + ", N " + std::to_string(shape_.n) + ", K " +
           std::to_string(shape_.k);
  }

 private:
  Fp4Case shape_;
  std::vector<std::uint8_t> codes_, scales_, w_codes_, w_scales_;
};

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

inline bool is_regular(std::span<const std::uint8_t> scales) {
  return std::all_of(scales.begin(), scales.end(), [](std::uint8_t code) {
    return code >= cuda::kRegularWeightLow && code <= cuda::kRegularWeightHigh;
  });
}

struct LinearOptions {
  cuda::Variant variant = cuda::Variant::Rows32;
  std::uint32_t dot_rows = 0;
};

inline std::vector<BFloat16> device_linear(cuda::Device& device, const QuantizedRows& x, const Fp4Matrix& w,
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

}  // namespace dsv41::testing
