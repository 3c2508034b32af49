// Linear layers of every backend against the plain one, bit for bit, and of the plain one against integer
// arithmetic written here (docs/numerics.md 1 and 2).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/kernels/support/inputs.h"

namespace dsv41 {
namespace {

using testing::Codes;
using testing::first_difference;
using testing::Inputs;
using testing::Scales;

std::vector<const Ops*> usable_backends() {
  std::vector<const Ops*> result;
  for (std::size_t i = 0; i < backend_count(); ++i)
    if (backend(i).usable) result.push_back(backend(i).ops);
  return result;
}

enum class Format { Fp8, Fp4 };

struct LinearCase {
  Format format;
  std::size_t rows, n, k;
  Codes activations = Codes::Gaussian, weights = Codes::Gaussian;
  Scales scales = Scales::Usual;
};

void PrintTo(const LinearCase& c, std::ostream* out) {
  *out << (c.format == Format::Fp8 ? "fp8 " : "fp4 ") << c.rows << "x" << c.n << "x" << c.k << " codes "
       << static_cast<int>(c.activations) << "/" << static_cast<int>(c.weights) << " scales "
       << static_cast<int>(c.scales);
}

/// E4M3 in units of 2^-9.
std::int64_t e4m3_units(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const std::int64_t magnitude = exponent == 0 ? mantissa : std::int64_t{8 + mantissa} << (exponent - 1);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// E2M1 in halves.
std::int64_t e2m1_units(std::uint8_t code) {
  static constexpr std::int64_t kHalves[] = {0, 1, 2, 3, 4, 6, 8, 12};
  return (code & 8) != 0 ? -kHalves[code & 7] : kHalves[code & 7];
}

struct BlockLinear {
  explicit BlockLinear(const LinearCase& linear_case) : c(linear_case) {
    Inputs inputs(c.rows * 1000003 + c.n * 1009 + c.k + static_cast<std::size_t>(c.weights));
    x_codes = inputs.e4m3(c.rows * c.k, c.activations);
    x_scales = inputs.e8m0(c.rows * c.k / kBlock, c.scales);
    const bool fp8 = c.format == Format::Fp8;
    w_codes = fp8 ? inputs.e4m3(c.n * c.k, c.weights) : inputs.e2m1(c.n * c.k, c.weights);
    w_scales = inputs.e8m0((fp8 ? ceil_div(c.n, kBlock) : c.n) * c.k / kBlock, c.scales);
  }

  std::vector<BFloat16> run(const Ops& ops, Range range) const {
    std::vector<BFloat16> out(c.rows * c.n, BFloat16{0x5555});
    const QuantizedRows x{x_codes.data(), x_scales.data(), c.rows, c.k};
    if (c.format == Format::Fp8)
      ops.linear_fp8(x, {w_codes.data(), w_scales.data(), c.n, c.k}, range, out.data());
    else
      ops.linear_fp4(x, {w_codes.data(), w_scales.data(), c.n, c.k}, range, out.data());
    return out;
  }
  std::vector<BFloat16> run(const Ops& ops) const { return run(ops, {0, c.n}); }

  /// One output by the contract, with exact integer dots.
  BFloat16 expected(std::size_t row, std::size_t feature) const {
    const std::size_t blocks = c.k / kBlock;
    float sum = 0.0f;
    for (std::size_t block = 0; block < blocks; ++block) {
      std::int64_t dot = 0;
      for (std::size_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        const std::size_t at = feature * c.k + i;
        const std::int64_t weight =
            c.format == Format::Fp8 ? e4m3_units(w_codes[at])
                                    : e2m1_units(static_cast<std::uint8_t>(w_codes[at / 2] >> (at % 2 * 4)));
        dot += e4m3_units(x_codes[row * c.k + i]) * weight;
      }
      const float rounded = std::ldexp(static_cast<float>(dot), c.format == Format::Fp8 ? -18 : -10);
      const std::size_t scale_row = c.format == Format::Fp8 ? feature / kBlock : feature;
      const float x_scale = std::ldexp(1.0f, x_scales[row * blocks + block] - 127);
      const float w_scale = std::ldexp(1.0f, w_scales[scale_row * blocks + block] - 127);
      const float scale = x_scale * w_scale;
      const float term = rounded * scale;
      sum = sum + term;
    }
    return to_bfloat16(sum);
  }

  LinearCase c;
  std::vector<std::uint8_t> x_codes, x_scales, w_codes, w_scales;
};

/// The plain backend against integers, every other backend against the plain one.
void check(const BlockLinear& linear) {
  const std::vector<BFloat16> plain = linear.run(plain_ops());
  const std::size_t n = linear.c.n, total = plain.size();
  const std::size_t step =
      std::max<std::size_t>(1, total * linear.c.k / 2'000'000);  // all of them where that is quick
  for (std::size_t i = 0; i < total; i += step) {
    const BFloat16 expected = linear.expected(i / n, i % n);
    if (testing::is_nan(expected) && testing::is_nan(plain[i])) continue;
    ASSERT_EQ(plain[i].bits, expected.bits) << "row " << i / n << " feature " << i % n;
  }
  for (const Ops* ops : usable_backends()) {
    const std::vector<BFloat16> out = linear.run(*ops);
    const std::size_t i = first_difference<BFloat16>(out, plain);
    ASSERT_EQ(i, total) << ops->name << ": row " << i / n << " feature " << i % n << " is " << out[i].bits
                        << " instead of " << plain[i].bits;
  }
}

class BlockLinears : public ::testing::TestWithParam<LinearCase> {};

TEST_P(BlockLinears, AreExact) {
  check(BlockLinear(GetParam()));
}

/// Ranges that begin and end anywhere write what the whole call writes, and nothing else.
TEST_P(BlockLinears, RangesAreParts) {
  const BlockLinear linear(GetParam());
  const std::size_t n = linear.c.n;
  for (const Ops* ops : usable_backends()) {
    const std::vector<BFloat16> whole = linear.run(*ops);
    for (const Range range :
         {Range{0, n / 3}, Range{n / 3, n - n / 4}, Range{n - 1, n}, Range{n / 2, n / 2}}) {
      std::vector<BFloat16> expected(whole.size(), BFloat16{0x5555});
      for (std::size_t row = 0; row < linear.c.rows; ++row)
        for (std::size_t j = range.begin; j < range.end; ++j) expected[row * n + j] = whole[row * n + j];
      const std::vector<BFloat16> out = linear.run(*ops, range);
      ASSERT_EQ(first_difference<BFloat16>(out, expected), out.size())
          << ops->name << " range " << range.begin << ".." << range.end;
    }
  }
}

/// A row's result does not depend on the rows beside it.
TEST_P(BlockLinears, RowsAreIndependent) {
  const BlockLinear linear(GetParam());
  for (const Ops* ops : usable_backends()) {
    const std::vector<BFloat16> whole = linear.run(*ops);
    for (const std::size_t row : {std::size_t{0}, linear.c.rows / 2, linear.c.rows - 1}) {
      BlockLinear alone = linear;
      const std::size_t k = linear.c.k, n = linear.c.n;
      alone.c.rows = 1;
      alone.x_codes.assign(linear.x_codes.begin() + static_cast<std::ptrdiff_t>(row * k),
                           linear.x_codes.begin() + static_cast<std::ptrdiff_t>((row + 1) * k));
      alone.x_scales.assign(linear.x_scales.begin() + static_cast<std::ptrdiff_t>(row * k / kBlock),
                            linear.x_scales.begin() + static_cast<std::ptrdiff_t>((row + 1) * k / kBlock));
      const std::vector<BFloat16> out = alone.run(*ops);
      ASSERT_EQ(first_difference<BFloat16>(out, std::span(whole).subspan(row * n, n)), n)
          << ops->name << " row " << row;
    }
  }
}

/// What a product prepared of named activations serves them again, and no others: not those that come to lie
/// in the same memory, nor nameless ones.
TEST(NamedActivations, AreKnownByNameOnly) {
  for (const Format format : {Format::Fp8, Format::Fp4}) {
    for (const std::size_t rows : {1, 2, 8, 20}) {
      const BlockLinear first({format, rows, 40, 256}), other({format, rows, 41, 256}),
          shorter({format, rows, 40, 96});
      for (const Ops* ops : usable_backends()) {
        std::vector<std::uint8_t> codes = first.x_codes, scales = first.x_scales;
        const auto expect = [&](const BlockLinear& linear, std::uint64_t name) {
          std::copy(linear.x_codes.begin(), linear.x_codes.end(), codes.begin());
          std::copy(linear.x_scales.begin(), linear.x_scales.end(), scales.begin());
          const QuantizedRows x{codes.data(), scales.data(), rows, linear.c.k, name};
          std::vector<BFloat16> out(rows * linear.c.n);
          for (const Range range : {Range{0, 20}, Range{20, linear.c.n}}) {
            if (format == Format::Fp8)
              ops->linear_fp8(x, {linear.w_codes.data(), linear.w_scales.data(), linear.c.n, linear.c.k},
                              range, out.data());
            else
              ops->linear_fp4(x, {linear.w_codes.data(), linear.w_scales.data(), linear.c.n, linear.c.k},
                              range, out.data());
          }
          ASSERT_EQ(first_difference<BFloat16>(out, linear.run(plain_ops())), out.size())
              << ops->name << ", " << rows << " rows, k " << linear.c.k << ", name " << name;
        };
        const std::uint64_t name = (std::uint64_t{1} << 63) + rows * 100 + static_cast<std::uint64_t>(format);
        ASSERT_NO_FATAL_FAILURE(expect(first, name));
        ASSERT_NO_FATAL_FAILURE(expect(other, name + 10));
        ASSERT_NO_FATAL_FAILURE(expect(first, 0));
        ASSERT_NO_FATAL_FAILURE(expect(other, 0));
        ASSERT_NO_FATAL_FAILURE(expect(shorter, name + 20));
        ASSERT_NO_FATAL_FAILURE(expect(first, name));
      }
    }
  }
}

// rows, n, k: one block of K, odd numbers of features, every kind of row count, the released widths.
std::vector<LinearCase> shapes() {
  std::vector<LinearCase> cases;
  for (const Format format : {Format::Fp8, Format::Fp4})
    for (const auto& [rows, n, k] : std::vector<std::array<std::size_t, 3>>{
             {1, 1, 32},    {1, 33, 32},  {1, 64, 64},   {1, 100, 160}, {1, 17, 5120}, {1, 49, 2304},
             {2, 31, 96},   {3, 65, 128}, {4, 40, 1280}, {5, 33, 320},  {6, 16, 192},  {7, 19, 224},
             {8, 64, 512},  {9, 48, 256}, {12, 21, 416}, {13, 27, 352}, {16, 35, 96},  {17, 70, 288},
             {31, 33, 160}, {33, 18, 64}, {64, 36, 128}, {128, 10, 96}, {512, 37, 64}})
      cases.push_back({format, rows, n, k});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, BlockLinears, ::testing::ValuesIn(shapes()),
                         [](const auto& test) { return "Case" + std::to_string(test.index); });

class AdversarialCodes : public ::testing::TestWithParam<LinearCase> {};

TEST_P(AdversarialCodes, AreExact) {
  static constexpr Codes kCodes[] = {Codes::Gaussian, Codes::Uniform, Codes::MaximaBesideSubnormals,
                                     Codes::AllMaximal, Codes::AllZero};
  for (const Codes activations : kCodes) {
    for (const Codes weights : kCodes) {
      for (const Scales scales : {Scales::Usual, Scales::Extreme}) {
        LinearCase linear_case = GetParam();
        linear_case.activations = activations;
        linear_case.weights = weights;
        linear_case.scales = scales;
        SCOPED_TRACE(::testing::PrintToString(linear_case));
        ASSERT_NO_FATAL_FAILURE(check(BlockLinear(linear_case)));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AdversarialCodes,
    ::testing::Values(LinearCase{Format::Fp8, 1, 37, 160}, LinearCase{Format::Fp8, 6, 64, 288},
                      LinearCase{Format::Fp8, 40, 33, 96}, LinearCase{Format::Fp4, 1, 37, 160},
                      LinearCase{Format::Fp4, 6, 64, 288}, LinearCase{Format::Fp4, 40, 33, 96},
                      // two rows of weights are a whole number of groups, three are not
                      LinearCase{Format::Fp8, 1, 37, 256}, LinearCase{Format::Fp8, 3, 19, 768},
                      LinearCase{Format::Fp4, 1, 37, 256}, LinearCase{Format::Fp4, 3, 19, 768},
                      // the last group of a row has an odd number of blocks
                      LinearCase{Format::Fp8, 2, 35, 416}, LinearCase{Format::Fp8, 16, 21, 352},
                      LinearCase{Format::Fp4, 2, 35, 416}, LinearCase{Format::Fp4, 4, 21, 352}),
    [](const auto& test) { return "Case" + std::to_string(test.index); });

/// NaN in an activation or a weight, by code or by scale, spreads as in the definition and no further.
TEST(BlockLinears, NansSpread) {
  const auto spoil = [](BlockLinear linear, std::vector<std::uint8_t> BlockLinear::*values, bool last,
                        std::uint8_t code) {
    std::vector<std::uint8_t>& of_linear = linear.*values;
    of_linear[last ? of_linear.size() - 1 : of_linear.size() / 3] = code;
    const std::vector<BFloat16> plain = linear.run(plain_ops());
    EXPECT_TRUE(
        std::any_of(plain.begin(), plain.end(), [](BFloat16 value) { return testing::is_nan(value); }));
    for (const Ops* ops : usable_backends())
      EXPECT_EQ(first_difference<BFloat16>(linear.run(*ops), plain), plain.size())
          << ops->name << ": " << ::testing::PrintToString(linear.c);
  };
  for (const Format format : {Format::Fp8, Format::Fp4}) {
    for (const std::size_t rows : {1, 3, 20}) {
      const BlockLinear numbers({format, rows, 43, 416});
      for (const bool last : {false, true}) {
        for (const std::uint8_t nan : {0x7F, 0xFF}) {
          spoil(numbers, &BlockLinear::x_codes, last, nan);
          if (format == Format::Fp8) spoil(numbers, &BlockLinear::w_codes, last, nan);
        }
        spoil(numbers, &BlockLinear::x_scales, last, 255);
        spoil(numbers, &BlockLinear::w_scales, last, 255);
      }
    }
  }
}

// ---- bf16 and fp32 linears
// ----------------------------------------------------------------------------------------

/// numerics.md 2, written as it is said.
double wide_dot(const BFloat16* x, const BFloat16* w, std::size_t k) {
  double lanes[16] = {};
  for (std::size_t i = 0; i < k; ++i)
    lanes[i % 16] += static_cast<double>(to_float(x[i])) * static_cast<double>(to_float(w[i]));
  for (const std::size_t half : {8, 4, 2, 1})
    for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

struct WideCase {
  std::size_t rows, n, k;
  double size = 1.0;  // of the activations
};

void PrintTo(const WideCase& c, std::ostream* out) {
  *out << c.rows << "x" << c.n << "x" << c.k << " * " << c.size;
}

class WideLinears : public ::testing::TestWithParam<WideCase> {};

TEST_P(WideLinears, Bf16) {
  const auto [rows, n, k, size] = GetParam();
  Inputs inputs(rows + n + k);
  const std::size_t stride = k + 3;
  const auto x = inputs.bfloat16(rows * stride, size);
  const auto weights = inputs.bfloat16(n * k);
  const Bf16Matrix w{weights.data(), n, k};
  std::vector<BFloat16> expected(rows * n);
  for (std::size_t i = 0; i < expected.size(); ++i)
    expected[i] = to_bfloat16(wide_dot(x.data() + i / n * stride, weights.data() + i % n * k, k));
  for (const Ops* ops : usable_backends()) {
    std::vector<BFloat16> out(rows * n);
    ops->linear_bf16(x.data(), rows, stride, w, {0, n / 2}, out.data());
    ops->linear_bf16(x.data(), rows, stride, w, {n / 2, n}, out.data());
    ASSERT_EQ(first_difference<BFloat16>(out, expected), out.size()) << ops->name;
  }
}

TEST_P(WideLinears, Fp32) {
  const auto [rows, n, k, size] = GetParam();
  Inputs inputs(rows + n + k);
  const auto x = inputs.bfloat16(rows * k, size);
  const auto weights = inputs.bfloat16(n * k);
  const Bf16Matrix w{weights.data(), n, k};
  std::vector<float> expected(rows * n);
  for (std::size_t i = 0; i < expected.size(); ++i)
    expected[i] = static_cast<float>(wide_dot(x.data() + i / n * k, weights.data() + i % n * k, k));
  for (const Ops* ops : usable_backends()) {
    std::vector<float> out(rows * n);
    ops->linear_wide(x.data(), rows, w, {0, n / 3}, out.data());
    ops->linear_wide(x.data(), rows, w, {n / 3, n}, out.data());
    ASSERT_EQ(first_difference<float>(out, expected), out.size()) << ops->name;
  }
}

TEST_P(WideLinears, Fp8WeightsWithUnquantizedActivations) {
  const auto [rows, n, any_k, size] = GetParam();
  const std::size_t k = ceil_div(any_k, kBlock) * kBlock, stride = 2 * k, out_stride = n + 5;
  Inputs inputs(rows + n + k);
  const auto x = inputs.bfloat16(rows * stride, size);
  const auto codes = inputs.e4m3(n * k, Codes::Uniform);
  for (const Scales scale_kind : {Scales::Usual, Scales::Extreme}) {
    const auto scales = inputs.e8m0(ceil_div(n, kBlock) * (k / kBlock), scale_kind);
    const Fp8Matrix w{codes.data(), scales.data(), n, k};
    std::vector<BFloat16> dequantized(n * k);
    for (std::size_t i = 0; i < dequantized.size(); ++i) {
      const int scale = scales[i / k / kBlock * (k / kBlock) + i % k / kBlock];
      dequantized[i] = to_bfloat16(std::ldexp(static_cast<float>(e4m3_units(codes[i])), scale - 127 - 9));
    }
    const std::size_t begin = n / 3;
    std::vector<BFloat16> expected(rows * out_stride, BFloat16{0x5555});
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t j = begin; j < n; ++j)
        expected[row * out_stride + j - begin] =
            to_bfloat16(wide_dot(x.data() + row * stride, dequantized.data() + j * k, k));
    for (const Ops* ops : usable_backends()) {
      std::vector<BFloat16> out(expected.size(), BFloat16{0x5555});
      ops->linear_fp8_unquantized(x.data(), rows, stride, w, {begin, n}, out.data(), out_stride);
      ASSERT_EQ(first_difference<BFloat16>(out, expected), out.size()) << ops->name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, WideLinears,
    ::testing::Values(WideCase{1, 1, 1}, WideCase{1, 7, 15}, WideCase{1, 33, 16}, WideCase{1, 24, 128},
                      WideCase{1, 65, 5120}, WideCase{2, 64, 1280}, WideCase{3, 33, 17},
                      WideCase{4, 16, 64, 1e30}, WideCase{5, 20, 100, 1e-30}, WideCase{8, 31, 256},
                      WideCase{17, 9, 96}, WideCase{33, 12, 320}, WideCase{128, 5, 64}, WideCase{512, 3, 32},
                      // rows in groups of every size, features that fill no group
                      WideCase{2, 75, 79, 1e30}, WideCase{3, 100, 4096}, WideCase{4, 70, 352},
                      WideCase{5, 67, 47}, WideCase{6, 1, 224, 1e-30}, WideCase{7, 38, 33},
                      WideCase{9, 34, 1}, WideCase{11, 97, 160}, WideCase{16, 35, 95}),
    [](const auto& test) { return "Case" + std::to_string(test.index); });

/// Infinities, NaN, subnormals and zeros of both signs, in one row or one feature at a time, and scales that
/// change from block to block, some of them so far apart that rounding to BF16 shows.
TEST(WideLinearEdges, SpecialValues) {
  constexpr std::uint16_t kValues[] = {0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7F7F,
                                       0x0001, 0x8001, 0x0000, 0x8000};
  const std::size_t n = 70;
  for (const std::size_t rows : {1, 2, 3, 4, 5, 7, 18})
    for (const std::size_t k : {96, 128}) {
      SCOPED_TRACE(std::to_string(rows) + " rows, k " + std::to_string(k));
      Inputs inputs(rows + k);
      auto x = inputs.bfloat16(rows * k), weights = inputs.bfloat16(n * k);
      for (std::size_t i = 0; i < std::size(kValues); ++i) {
        x[inputs.below(rows) * k + inputs.below(k)].bits = kValues[i];
        weights[7 * i * k + inputs.below(k)].bits = kValues[i];
      }
      if (rows > 2) std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(k), k, BFloat16{0x8000});
      auto codes = inputs.e4m3(n * k, Codes::Uniform), scales = inputs.e8m0(3 * (k / kBlock), Scales::Usual);
      const auto compare = [&](const char* what) {
        std::vector<BFloat16> expected(rows * n), expected_fp8(rows * n);
        plain_ops().linear_bf16(x.data(), rows, k, {weights.data(), n, k}, {0, n}, expected.data());
        plain_ops().linear_fp8_unquantized(x.data(), rows, k, {codes.data(), scales.data(), n, k}, {0, n},
                                           expected_fp8.data(), n);
        for (const Ops* ops : usable_backends()) {
          std::vector<BFloat16> out(rows * n), out_fp8(rows * n);
          ops->linear_bf16(x.data(), rows, k, {weights.data(), n, k}, {0, n}, out.data());
          ops->linear_fp8_unquantized(x.data(), rows, k, {codes.data(), scales.data(), n, k}, {0, n},
                                      out_fp8.data(), n);
          ASSERT_EQ(first_difference<BFloat16>(out, expected), out.size()) << ops->name << ", " << what;
          ASSERT_EQ(first_difference<BFloat16>(out_fp8, expected_fp8), out.size())
              << ops->name << ", " << what;
        }
      };
      compare("values");
      scales[k / kBlock + 1] = 3;
      compare("a scale that is too small, between others");
      codes[(n - 1) * k + k - 1] = 0xFF;
      codes[33 * k] = 0x7F;
      compare("codes that are NaN");
    }
}

TEST(Backends, AreFoundByName) {
  EXPECT_EQ(&find_backend("plain"), &plain_ops());
  EXPECT_STREQ(backend(backend_count() - 1).ops->name, "plain");
  EXPECT_NO_THROW(find_backend("auto"));
  try {
    find_backend("abacus");
    FAIL() << "an unknown backend was found";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(std::string(error.what()).substr(0, 31).c_str(), "no backend is called 'abacus'; ");
  }
}

}  // namespace
}  // namespace dsv41
