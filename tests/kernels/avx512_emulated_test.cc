// The AVX-512 linears on any x86-64 machine: their source compiled against emulated instructions, compared
// with the plain backend bit for bit. On a CPU with AVX-512 the backend tests run them natively as well.
#if defined(__x86_64__)
#include <gtest/gtest.h>

#include <vector>

#include "tests/kernels/support/avx512_emulated.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Codes;
using testing::Inputs;
using testing::Scales;

struct Shape {
  std::size_t rows, n, k;
};
constexpr Shape kShapes[] = {{1, 1, 32},   {1, 19, 160}, {1, 33, 1312}, {2, 7, 96},  {5, 40, 544},
                             {9, 33, 288}, {3, 20, 800}, {1, 19, 256},  {3, 21, 768}};
constexpr Codes kCodes[] = {Codes::Gaussian, Codes::Uniform, Codes::MaximaBesideSubnormals, Codes::AllMaximal,
                            Codes::AllZero};

template <class Matrix>
using Linear = void (*)(const QuantizedRows&, const Matrix&, Range, BFloat16*);

template <class Matrix>
void expect_equal(const Shape& shape, const std::vector<std::uint8_t>& codes,
                  const std::vector<std::uint8_t>& scales, Codes activations, Scales kind,
                  Linear<Matrix> linear, Linear<Matrix> plain) {
  Inputs inputs(shape.k);
  const auto x_codes = inputs.e4m3(shape.rows * shape.k, activations);
  const auto x_scales = inputs.e8m0(shape.rows * shape.k / kBlock, kind);
  const QuantizedRows x{x_codes.data(), x_scales.data(), shape.rows, shape.k};
  const Matrix w{codes.data(), scales.data(), shape.n, shape.k};
  for (const Range range : {Range{0, shape.n}, Range{shape.n / 3, shape.n - shape.n / 4}}) {
    std::vector<BFloat16> out(shape.rows * shape.n), expected(out.size());
    linear(x, w, range, out.data());
    plain(x, w, range, expected.data());
    ASSERT_EQ(testing::first_difference<BFloat16>(out, expected), out.size())
        << shape.rows << " x " << shape.n << " x " << shape.k << " activations "
        << static_cast<int>(activations);
  }
}

TEST(EmulatedAvx512, Fp4) {
  for (const Shape& shape : kShapes) {
    for (const Codes activations : kCodes) {
      for (const Scales kind : {Scales::Usual, Scales::Extreme}) {
        Inputs inputs(shape.n);
        const auto codes = inputs.e2m1(shape.n * shape.k, activations);
        auto scales = inputs.e8m0(shape.n * shape.k / kBlock, kind);
        for (const bool nan : {false, true}) {
          if (nan) scales.back() = 255;
          for (const Linear<Fp4Matrix> linear :
               {avx512_emulated::linear_fp4, avx512_vbmi_emulated::linear_fp4})
            ASSERT_NO_FATAL_FAILURE(expect_equal<Fp4Matrix>(shape, codes, scales, activations, kind, linear,
                                                            plain_ops().linear_fp4));
        }
      }
    }
  }
}

TEST(EmulatedAvx512, Fp8) {
  for (const Shape& shape : kShapes) {
    for (const Codes activations : kCodes) {
      for (const Codes weights : kCodes) {
        for (const Scales kind : {Scales::Usual, Scales::Extreme}) {
          Inputs inputs(shape.n);
          auto codes = inputs.e4m3(shape.n * shape.k, weights);
          const auto scales = inputs.e8m0(ceil_div(shape.n, kBlock) * shape.k / kBlock, kind);
          for (const bool nan : {false, true}) {
            if (nan) codes[codes.size() / 2] = 0x7F;
            for (const Linear<Fp8Matrix> linear :
                 {avx512_emulated::linear_fp8, avx512_vbmi_emulated::linear_fp8})
              ASSERT_NO_FATAL_FAILURE(expect_equal<Fp8Matrix>(shape, codes, scales, activations, kind, linear,
                                                              plain_ops().linear_fp8));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dsv41
#endif
