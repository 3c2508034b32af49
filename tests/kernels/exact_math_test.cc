// The transcendental functions against extended precision (docs/numerics.md 7): below one unit in the last
// place.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <string>

#include "kernels/exact_math.h"
#include "kernels/rope.h"

namespace dsv41 {
namespace {

// x87 long double carries 11 bits more than fp64, enough to measure fractions of an ulp.
static_assert(std::numeric_limits<long double>::digits >= 64);

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kSamples = 200'000;

/// |value - exact| in units in the last place of the exact result.
double error_in_ulp(double value, long double exact) {
  if (value == static_cast<double>(exact))
    return std::fabs(static_cast<double>(exact)) == kInfinity ? 0.0 : 0.5;
  const auto magnitude = std::fabs(static_cast<double>(exact));
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const long double ulp = std::ldexp(1.0L, std::max(exponent, -1021) - 53);
  return static_cast<double>(std::fabs(static_cast<long double>(value) - exact) / ulp);
}

struct Function {
  const char* name;
  double (*value)(double);
  long double (*exact)(long double);
  double low, high;
  bool fp32_arguments = false;
};

void PrintTo(const Function& function, std::ostream* out) { *out << function.name; }

class ExactMath : public ::testing::TestWithParam<Function> {};

TEST_P(ExactMath, ErrsByLessThanOneUlp) {
  const Function& f = GetParam();
  std::mt19937_64 engine(1);
  std::uniform_real_distribution<double> uniform(f.low, f.high), exponent(-40.0, 0.0);
  double worst = 0.0, worst_at = 0.0;
  for (int i = 0; i < kSamples; ++i) {
    double x = uniform(engine);
    if (i % 2 != 0) x *= std::exp2(exponent(engine));  // as many arguments near zero
    if (f.fp32_arguments) x = static_cast<float>(x);
    const double error = error_in_ulp(f.value(x), f.exact(x));
    if (error > worst) worst = error, worst_at = x;
  }
  EXPECT_LT(worst, 1.0) << f.name << "(" << std::hexfloat << worst_at << ")";
}

INSTANTIATE_TEST_SUITE_P(Functions, ExactMath,
                         ::testing::Values(Function{"exp", exact::exp, std::exp, -745.0, 709.7},
                                           Function{"exp_near_zero", exact::exp, std::exp, -2.0, 2.0},
                                           Function{"log1p", exact::log1p, std::log1p, -0.999, 5e8},
                                           Function{"log1p_small", exact::log1p, std::log1p, -0.9, 2.0},
                                           Function{"sin", exact::sin, std::sin, -10.0, 10.0},
                                           Function{"cos", exact::cos, std::cos, -10.0, 10.0},
                                           Function{"sin_angles", exact::sin, std::sin, 0.0, 0x1p20, true},
                                           Function{"cos_angles", exact::cos, std::cos, 0.0, 0x1p20, true},
                                           Function{"sin_large", exact::sin, std::sin, 0.0, 0x1p32, true},
                                           Function{"cos_large", exact::cos, std::cos, 0.0, 0x1p32, true}),
                         [](const auto& test) { return std::string(test.param.name); });

/// fp32 angles closest to a multiple of pi/2 are where a reduction loses its digits.
TEST(ExactMath, SurvivesCancellation) {
  for (std::uint32_t turn = 1; turn < 2'000'000; turn += 7) {
    const auto x = static_cast<double>(static_cast<float>(turn * 1.5707963267948966));
    ASSERT_LT(error_in_ulp(exact::sin(x), std::sin(static_cast<long double>(x))), 1.0) << x;
    ASSERT_LT(error_in_ulp(exact::cos(x), std::cos(static_cast<long double>(x))), 1.0) << x;
  }
}

TEST(ExactMath, PowErrsByLessThanOneUlp) {
  std::mt19937_64 engine(2);
  std::uniform_real_distribution<double> exponent(-2.0, 2.0), wide(-60.0, 60.0);
  for (int i = 0; i < kSamples / 4; ++i) {
    const double base = i % 2 == 0 ? (i % 4 == 0 ? 10000.0 : 160000.0) : std::exp2(wide(engine) / 6.0);
    const double power = i % 2 == 0 ? exponent(engine) : wide(engine);
    const long double reference = std::pow(static_cast<long double>(base), static_cast<long double>(power));
    ASSERT_LT(error_in_ulp(exact::pow(base, power), reference), 1.0) << base << "^" << power;
  }
}

TEST(ExactMath, HandlesTheEdges) {
  EXPECT_EQ(exact::exp(0.0), 1.0);
  EXPECT_EQ(exact::exp(-0.0), 1.0);
  EXPECT_EQ(exact::exp(710.0), kInfinity);
  EXPECT_EQ(exact::exp(kInfinity), kInfinity);
  EXPECT_EQ(exact::exp(-746.0), 0.0);
  EXPECT_EQ(exact::exp(-kInfinity), 0.0);
  EXPECT_EQ(exact::exp(-745.0), std::numeric_limits<double>::denorm_min());
  EXPECT_TRUE(std::isnan(exact::exp(std::nan(""))));
  EXPECT_EQ(exact::log1p(0.0), 0.0);
  EXPECT_EQ(exact::log1p(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(exact::log1p(std::nan(""))));
  EXPECT_EQ(exact::log1p(1e-300), 1e-300);
  EXPECT_EQ(exact::sin(0.0), 0.0);
  EXPECT_EQ(exact::cos(0.0), 1.0);
  EXPECT_EQ(exact::pow(10000.0, 0.0), 1.0);
  EXPECT_EQ(exact::pow(10000.0, 0.5), 100.0);
  EXPECT_EQ(exact::pow(2.0, 10.0), 1024.0);
  EXPECT_EQ(exact::pow(10.0, 400.0), kInfinity);
  EXPECT_EQ(exact::pow(10.0, -400.0), 0.0);
}

/// These bits are the contract: no compiler flag and no system may change them.
TEST(ExactMath, GivesTheSameBitsEverywhere) {
  EXPECT_EQ(exact::log1p(1.0), 0x1.62e42fefa39efp-1);
  std::uint64_t hash = 1469598103934665603u;
  std::mt19937_64 engine(3);
  for (int i = 0; i < 100'000; ++i) {
    const double x = static_cast<double>(engine() % 2'000'001) * 1e-5 - 10.0;
    for (const double value : {exact::exp(x), exact::log1p(x + 10.0), exact::sin(x), exact::cos(x)})
      hash = (hash ^ std::bit_cast<std::uint64_t>(value)) * 1099511628211u;
  }
  EXPECT_EQ(hash, 12192036961976899420u);
}

TEST(Rope, YarnBlendsBetweenBothFrequencies) {
  const RopeParameters plain{.base = 160000.0f, .dim = 64};
  RopeParameters yarn = plain;
  yarn.original_length = 65536;
  yarn.factor = 16.0f;
  const auto unscaled = rope_frequencies(plain), blended = rope_frequencies(yarn);
  EXPECT_EQ(blended.front(), unscaled.front());
  EXPECT_EQ(blended.back(), unscaled.back() / 16.0f);
  for (std::size_t i = 0; i < blended.size(); ++i) {
    EXPECT_LE(blended[i], unscaled[i]);
    EXPECT_GE(blended[i], unscaled[i] / 16.0f);
  }
}

}  // namespace
}  // namespace dsv41
