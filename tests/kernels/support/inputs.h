// Inputs for tests of the kernels: reproducible random values and the code patterns that break inexact
// arithmetic.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/views.h"

namespace dsv41::testing {

enum class Codes {
  Gaussian,
  Uniform,                 // every code but NaN
  MaximaBesideSubnormals,  // the widest exact sums: +-448 next to 2^-9
  AllMaximal,              // one sign: the largest sums
  AllZero,                 // both signs of zero
};

enum class Scales {
  Usual,    // around 2^-6
  Extreme,  // 0, 1, 127, 253, 254 mixed: products that underflow or overflow fp32
};

class Inputs {
 public:
  explicit Inputs(std::uint64_t seed) : engine_(seed) {}

  double gaussian() { return normal_(engine_); }
  std::size_t below(std::size_t bound) { return engine_() % bound; }

  std::vector<BFloat16> bfloat16(std::size_t count, double size = 1.0) {
    std::vector<BFloat16> values(count);
    for (BFloat16& value : values) value = to_bfloat16(gaussian() * size);
    return values;
  }

  std::vector<float> fp32(std::size_t count, double size = 1.0) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(gaussian() * size);
    return values;
  }

  std::vector<std::uint8_t> e4m3(std::size_t count, Codes codes) {
    std::vector<std::uint8_t> values(count);
    for (std::uint8_t& value : values) value = e4m3_code(codes);
    return values;
  }

  /// Packed E2M1, `count` elements in count/2 bytes.
  std::vector<std::uint8_t> e2m1(std::size_t count, Codes codes) {
    std::vector<std::uint8_t> values(count / 2);
    for (std::uint8_t& value : values)
      value = static_cast<std::uint8_t>(e2m1_code(codes) | e2m1_code(codes) << 4);
    return values;
  }

  std::vector<std::uint8_t> e8m0(std::size_t count, Scales scales) {
    static constexpr std::uint8_t kExtreme[] = {0, 1, 2, 64, 127, 190, 253, 254};
    std::vector<std::uint8_t> values(count);
    for (std::uint8_t& value : values)
      value = scales == Scales::Usual ? static_cast<std::uint8_t>(116 + below(10)) : kExtreme[below(8)];
    return values;
  }

 private:
  std::uint8_t e4m3_code(Codes codes) {
    const auto sign = static_cast<std::uint8_t>(below(2) << 7);
    switch (codes) {
      case Codes::Gaussian:
        return encode_e4m3(static_cast<float>(gaussian() * 100.0));
      case Codes::Uniform:
        return static_cast<std::uint8_t>(sign | below(127));
      case Codes::MaximaBesideSubnormals:
        return static_cast<std::uint8_t>(sign | (below(2) != 0 ? 0x7E : 1 + below(7)));
      case Codes::AllMaximal:
        return 0x7E;
      case Codes::AllZero:
        return sign;
    }
    return 0;
  }

  std::uint8_t e2m1_code(Codes codes) {
    const auto sign = static_cast<std::uint8_t>(below(2) << 3);
    switch (codes) {
      case Codes::Gaussian:
        return encode_e2m1(static_cast<float>(std::fmax(-6.0, std::fmin(6.0, gaussian() * 2.0))));
      case Codes::Uniform:
        return static_cast<std::uint8_t>(below(16));
      case Codes::MaximaBesideSubnormals:
        return static_cast<std::uint8_t>(sign | (below(2) != 0 ? 7 : 1));
      case Codes::AllMaximal:
        return 7;
      case Codes::AllZero:
        return sign;
    }
    return 0;
  }

  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

inline std::uint32_t bits_of(BFloat16 value) {
  return value.bits;
}
inline std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
inline std::uint64_t bits_of(double value) {
  return std::bit_cast<std::uint64_t>(value);
}
inline std::uint32_t bits_of(std::uint8_t value) {
  return value;
}
inline bool is_nan(BFloat16 value) {
  return (value.bits & 0x7FFFu) > 0x7F80u;
}
inline bool is_nan(float value) {
  return std::isnan(value);
}
inline bool is_nan(double value) {
  return std::isnan(value);
}
inline bool is_nan(std::uint8_t) {
  return false;
}

/// The first index at which two results differ in a bit (any NaN equals any other), or count.
template <class T>
std::size_t first_difference(std::span<const T> a, std::span<const T> b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (bits_of(a[i]) != bits_of(b[i]) && !(is_nan(a[i]) && is_nan(b[i]))) return i;
  return a.size();
}

}  // namespace dsv41::testing
