// FP8 products at the bounds within which fast backends may round in fp32: large terms that cancel exactly
// beside a small one that must not be lost, and scales at the ends of the format.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/kernels/support/avx512_emulated.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Inputs;

constexpr std::size_t kFeatures = 70;
constexpr std::uint8_t kMaximum = 0x7E, kNegative = 0x80;

struct Product {
  std::size_t rows, k;
  std::vector<std::uint8_t> x, w, x_scales, w_scales;

  std::vector<BFloat16> run(decltype(Ops::linear_fp8) linear_fp8) const {
    std::vector<BFloat16> out(rows * kFeatures);
    linear_fp8({x.data(), x_scales.data(), rows, k}, {w.data(), w_scales.data(), kFeatures, k},
               {0, kFeatures}, out.data());
    return out;
  }
};

void expect_as_plain(const Product& product) {
  const std::vector<BFloat16> expected = product.run(plain_ops().linear_fp8);
  const auto check = [&](const char* name, decltype(Ops::linear_fp8) linear_fp8) {
    const std::size_t at = testing::first_difference<BFloat16>(product.run(linear_fp8), expected);
    EXPECT_EQ(at, expected.size()) << name << ", " << product.rows << " rows: row " << at / kFeatures
                                   << " feature " << at % kFeatures;
  };
  for (std::size_t i = 0; i < backend_count(); ++i)
    if (backend(i).usable) check(backend(i).ops->name, backend(i).ops->linear_fp8);
#if defined(__x86_64__)
  check("emulated avx512", avx512_emulated::linear_fp8);
  check("emulated avx512vbmi", avx512_vbmi_emulated::linear_fp8);
#endif
}

/// Codes of a block's activations and weights without its last element; the products add up to zero.
struct Cancelling {
  std::array<std::uint8_t, kBlock - 1> x{}, w{};
};

/// The same weight with either sign: what AVX-512 leaves of both below 2^-6 is positive.
Cancelling remainders_of_both_signs(Inputs& inputs) {
  Cancelling block;
  for (std::size_t i = 0; i + 1 < block.x.size(); i += 2) {
    const auto small = static_cast<std::uint8_t>(inputs.below(4));
    block.x[i] = block.x[i + 1] = kMaximum;
    block.w[i] = kNegative | small, block.w[i + 1] = small;
  }
  return block;
}
/// Small weights of one sign against a large one, which has no remainder.
Cancelling remainders_of_one_sign(Inputs& inputs) {
  constexpr std::uint8_t kFour = 0x04, kNinetySix = 0x24;  // times 2^-9
  const auto sign = static_cast<std::uint8_t>(inputs.below(2) * kNegative);
  Cancelling block;
  block.x.fill(kMaximum);
  std::fill_n(block.w.begin(), 24, sign | kFour);
  block.w[24] = sign ^ kNegative ^ kNinetySix;
  return block;
}
/// A small activation is, beside the largest, a rest as a whole; as a weight it is a multiple of 2^-6.
Cancelling rests(Inputs& inputs) {
  Cancelling block;
  for (std::size_t i = 0; i + 1 < block.x.size(); i += 2) {
    const auto small = static_cast<std::uint8_t>(8 << inputs.below(2));
    block.x[i] = kMaximum, block.x[i + 1] = small;
    block.w[i] = kNegative | small, block.w[i + 1] = kMaximum;
  }
  return block;
}

class Fp8Cancellation : public ::testing::TestWithParam<Cancelling (*)(Inputs&)> {};

TEST_P(Fp8Cancellation, LeavesTheSmallTerm) {
  for (const std::size_t rows : {1, 2, 4, 7, 8, 9, 17}) {
    for (const std::size_t blocks : {1, 3, 16}) {
      Inputs inputs(rows + blocks);
      Product product{rows, blocks * kBlock, {}, {}, {}, {}};
      product.x_scales.assign(rows * blocks, 127);
      product.w_scales.assign(ceil_div(kFeatures, kBlock) * blocks, 127);
      product.x.assign(rows * product.k, 0);
      product.w.assign(kFeatures * product.k, 0);
      // All rows have the same block, which cancels; the small term is each row's own.
      for (std::size_t b = 0; b < blocks; ++b) {
        const Cancelling block = GetParam()(inputs);
        for (std::size_t i = 0; i < block.x.size(); ++i) {
          const std::size_t at = b * kBlock + i;
          for (std::size_t row = 0; row < rows; ++row) product.x[row * product.k + at] = block.x[i];
          for (std::size_t f = 0; f < kFeatures; ++f) product.w[f * product.k + at] = block.w[i];
        }
        const std::size_t last = (b + 1) * kBlock - 1;
        for (std::size_t row = 0; row < rows; ++row)
          product.x[row * product.k + last] = static_cast<std::uint8_t>(1 + inputs.below(3));
        for (std::size_t f = 0; f < kFeatures; ++f)
          product.w[f * product.k + last] =
              static_cast<std::uint8_t>(inputs.below(2) * kNegative + 1 + inputs.below(6));
      }
      expect_as_plain(product);
    }
  }
}
std::string name_of(std::size_t index) {
  return std::array{"RemaindersOfBothSigns", "RemaindersOfOneSign", "Rests"}[index];
}
INSTANTIATE_TEST_SUITE_P(Of, Fp8Cancellation,
                         ::testing::Values(remainders_of_both_signs, remainders_of_one_sign, rests),
                         [](const auto& test) { return name_of(test.index); });

TEST(Fp8Scales, OfEverySize) {
  for (const std::size_t rows : {1, 2, 4, 7, 8, 9, 17}) {
    for (const int sum :
         {8, 100, 108, 120, 130, 150, 254, 330, 335, 350, 370, 380, 508}) {  // of the exponents
      Inputs inputs(rows + static_cast<std::size_t>(sum));
      Product product{rows,
                      3 * kBlock,
                      inputs.e4m3(rows * 3 * kBlock, testing::Codes::Gaussian),
                      inputs.e4m3(kFeatures * 3 * kBlock, testing::Codes::Gaussian),
                      {},
                      {}};
      product.x_scales.assign(rows * 3, static_cast<std::uint8_t>(sum / 2));
      product.w_scales.assign(ceil_div(kFeatures, kBlock) * 3, static_cast<std::uint8_t>(sum - sum / 2));
      expect_as_plain(product);
    }
  }
}

}  // namespace
}  // namespace dsv41
