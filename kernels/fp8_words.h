// FP8 products with words (docs/kernels.md), what the fast backends have in common without vectors. In units
// of 2^-9 an activation is h * 2^s + l with a word h; a weight is 8 t + r with a word t.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dsv41::fp8_words {

/// Of |h| in a block; times 28672, the largest weight word, it stays below 2^31.
inline constexpr std::int32_t kLargestSum = 74898;

/// The smallest s with which a block's products of words fit 32 bits. sum: of the 32 magnitudes; largest: at
/// least the largest of them, with no more bits.
constexpr int shift_for(std::int32_t sum, std::int32_t largest) {
  int shift = 0;
  // Rounding to nearest adds a half at most to each of the 32 magnitudes.
  while (sum >> shift >= kLargestSum - 16 || largest >> shift >= 32767) ++shift;
  return shift;
}

/// A value for every E4M3 code.
template <std::int32_t (*Value)(std::uint8_t)>
constexpr std::array<std::int32_t, 256> table_by_code() {
  std::array<std::int32_t, 256> values{};
  for (std::size_t code = 0; code < 256; ++code) values[code] = Value(static_cast<std::uint8_t>(code));
  return values;
}

}  // namespace dsv41::fp8_words
