// Decode tables of the short formats (docs/model.md 1). Every entry is what kernels/formats.h computes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

namespace dsv41::plain {

inline constexpr auto kE4m3 = [] {
  std::array<double, 256> values{};
  for (std::size_t code = 0; code < values.size(); ++code)
    values[code] = decode_e4m3(static_cast<std::uint8_t>(code));
  return values;
}();

inline constexpr auto kE8m0 = [] {
  std::array<float, 256> values{};
  for (std::size_t code = 0; code < values.size(); ++code)
    values[code] = decode_e8m0(static_cast<std::uint8_t>(code));
  return values;
}();

/// Both elements of a packed byte, the even one (low nibble) first.
struct E2m1Pair {
  double even, odd;
};
inline constexpr auto kE2m1Pairs = [] {
  std::array<E2m1Pair, 256> values{};
  for (std::size_t code = 0; code < values.size(); ++code)
    values[code] = {decode_e2m1(static_cast<std::uint8_t>(code & 15)),
                    decode_e2m1(static_cast<std::uint8_t>(code >> 4))};
  return values;
}();

}  // namespace dsv41::plain
